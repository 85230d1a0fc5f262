"""Every way in which adding an entry can end: nothing acknowledged is lost, nothing happens twice, nobody says "failed" too early."""

import itertools
from collections.abc import Callable

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Created
from tensorstore_ck.errors import (
    AlreadyExistsError,
    BackendUnavailableError,
    BrokenLogError,
    ConflictError,
    FormatVersionError,
    InvalidOptionError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    UndecidedError,
    UnsupportedValueError,
)
from tensorstore_ck.log import Log, LogChangedWarning, Op, RefTable
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import RESEND_DELAYS, entry_name
from tests.log.cache.faultytable import CacheFaults, FaultyTable
from tests.log.scripted import UUID, Tricky, append_puts, mark_op, names_in, new_id, open_log, put_op


def append(log: Log, name: str) -> int:
    return log.append(lambda _view: [mark_op(name)]).n


@pytest.fixture
def backend() -> Tricky:
    tricky = Tricky()
    append(open_log(tricky.inner), "first")
    return tricky


def other_writer(backend: Tricky, name: str = "other") -> Callable[[], object]:
    return lambda: append(open_log(backend.inner), name)


# --- outcomes of create ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_busy", [True, False])
def test_what_is_published_is_known_though_neither_cache_nor_log_can_be_read_then(backend: Tricky, is_busy: bool) -> None:
    faults = CacheFaults()
    log = open_log(backend, FaultyTable(faults))
    put = put_op("runs/gpt", 7, step=7)

    def land(name: str, data: bytes) -> Created:
        faults.reset(range(1 << 30), is_busy=is_busy)
        backend.before = fail
        return backend.inner.create(name, data)

    def fail(_what: str, _name: str) -> None:
        raise BackendUnavailableError("injected: down")

    backend.on_create = [land]
    appended = log.append(lambda _view: [put])
    info = log.published(appended, put.fields["snapshot"])
    assert info is not None
    assert (info.root, info.step, info.n, info.arrived_ns) == (put.fields["root"], 7, 2, appended.time_ns)


def test_what_is_published_has_what_was_noted_of_its_root_before_and_in_the_same_entry(backend: Tricky) -> None:
    log = open_log(backend)
    first, again, third = put_op("first", 7, loss=1.0), put_op("again", 7, loss=1.0), put_op("third", 7, loss=1.0)
    root = first.fields["root"]
    log.append(lambda _view: [first, Op.annotate(root, {"accuracy": 0.5}), Op.mark(root, "bad", "diverged")])
    published = []
    for put, marks in ((again, []), (third, [Op.mark(root, "drift", "of rank 1")])):
        appended = log.append(lambda _view, ops=(put, *marks): ops)  # type: ignore[misc]
        published.append(log.published(appended, put.fields["snapshot"]))
        assert published[-1] == log.view().snapshot(put.fields["snapshot"])
    assert [(info.metrics, info.mark, info.reason) for info in published if info is not None] == [
        ({"loss": 1.0, "accuracy": 0.5}, "bad", "diverged"),
        ({"loss": 1.0, "accuracy": 0.5}, "drift", "of rank 1"),
    ]


@pytest.mark.parametrize(
    ("hows", "sent"),
    [
        ([], 1),
        (["lands_unknown"], 1),
        (["lands_exists"], 1),
        (["lands_lost"], 1),
        (["absent_unknown"] * 3, 4),
        (["absent_down"] * 3, 4),
        *(([until], None) for until in (1, 2, 3, 4)),
    ],
)
def test_it_lands_once_whatever_the_reply_says(backend: Tricky, hows: list[str | int], sent: int | None) -> None:
    """A number: it lands at that call, after it was missed."""
    backend.on_create = [backend.delayed(how) if isinstance(how, int) else getattr(backend, how) for how in hows]
    assert append(open_log(backend), "mine") == 2
    assert sent is None or (len(backend.sent), len(set(backend.sent))) == (sent, 1), "the same bytes, until the number is taken"
    append(open_log(backend.inner), "next")
    assert names_in(backend.inner) == ["first", "mine", "next"]


def test_rows_that_belong_to_an_entry_are_written_when_it_is_folded(backend: Tricky) -> None:
    backend.on_create = [backend.loses_to(other_writer(backend)), backend.lands_unknown]
    table = MemoryTable()
    log = open_log(backend, table)
    appended = log.append(lambda _view: [mark_op("mine")], also=lambda batch, n: batch.put(b"x/", b"%d" % n))
    assert (appended.n, table.get(b"x/")) == (3, b"3")


def test_another_writer_was_faster(backend: Tricky) -> None:
    backend.on_create = [backend.loses_to(other_writer(backend))]
    assert append(open_log(backend), "mine") == 3
    assert names_in(backend.inner) == ["first", "other", "mine"]


def test_another_writer_takes_the_number_while_ours_is_under_way(backend: Tricky) -> None:
    late: list[Created] = []
    backend.on_create = [backend.delayed(4, late.append), backend.loses_to(other_writer(backend))]
    assert append(open_log(backend), "mine") == 3
    append(open_log(backend), "next")
    assert late == [Created.EXISTS], "it cannot land any more"
    assert names_in(backend.inner) == ["first", "other", "mine", "next"]


def test_a_refusal_before_anything_was_sent_is_final(backend: Tricky) -> None:
    backend.on_create = [backend.refused]
    log = open_log(backend)
    with pytest.raises(NoSpaceError):
        append(log, "mine")
    assert append(log, "mine too") == 2
    assert names_in(backend.inner) == ["first", "mine too"]


def test_a_refusal_after_something_was_sent_decides_nothing(backend: Tricky) -> None:
    backend.on_create = [backend.absent_unknown, *[backend.refused] * len(RESEND_DELAYS)]
    with pytest.raises(UndecidedError, match="injected: full"):
        append(open_log(backend), "mine")


def test_a_server_that_hangs_at_each_try_is_given_up_in_time(backend: Tricky) -> None:
    seconds = itertools.count(step=45)
    log = Log(backend, MemoryTable(), uuid=UUID, clock=lambda: next(seconds) * 10**9, actor="me", new_id=new_id, sleep=lambda _: None)
    backend.on_create = [backend.absent_down] * len(RESEND_DELAYS)
    with pytest.raises(UndecidedError):
        append(log, "mine")
    assert len(backend.sent) == 2


def test_undecided_names_the_write_id_and_the_log_shows_the_outcome_later(backend: Tricky) -> None:
    backend.on_create = [backend.absent_down] * len(RESEND_DELAYS)
    log = open_log(backend)
    with pytest.raises(UndecidedError) as caught:
        append(log, "mine")
    name, sealed = backend.sent[0]
    assert backend.inner.create(name, sealed) is Created.CREATED
    (entry,) = log.entries(start=2)
    assert entry.write_id.hex() == caught.value.object_id
    assert append(log, "next") == 3
    assert names_in(backend.inner) == ["first", "mine", "next"]


def test_undecided_while_the_backend_does_not_even_answer_reads(backend: Tricky) -> None:
    log = open_log(backend)
    log.sync()

    def down(what: str, _name: str) -> None:
        if what != "sync_folders" and any(call[0] == "create" for call in backend.calls):
            raise BackendUnavailableError("injected: gone")

    backend.before = down
    with pytest.raises(UndecidedError):
        append(log, "mine")
    backend.before = lambda _what, _name: None
    assert names_in(backend.inner) == ["first"]


def test_where_create_may_overwrite_nothing_is_sent_after_an_undecided_one(backend: Tricky) -> None:
    backend.on_create = [backend.absent_down] * len(RESEND_DELAYS)
    log = open_log(backend, shared=False)
    for _ in range(2):
        with pytest.raises(UndecidedError):
            append(log, "mine")
    assert len({data for _, data in backend.sent}) == 1


def test_after_an_undecided_entry_that_may_land_late_nothing_is_built_on_the_head(backend: Tricky) -> None:
    """Neither success without an operation nor a refusal may rest on a head that the late entry changes."""
    backend.on_create = [backend.absent_down] * len(RESEND_DELAYS)
    log = open_log(backend, shared=False)
    with pytest.raises(UndecidedError):
        append(log, "mine")
    with pytest.raises(UndecidedError):
        log.append(lambda _view: pytest.fail("it is not asked"))


def test_a_damaged_winner_is_damage_not_a_conflict(backend: Tricky) -> None:
    backend.on_create = [backend.loses_to(lambda: backend.inner.create(entry_name("log", 2), b"garbage"))]
    with pytest.raises(BrokenLogError, match=entry_name("log", 2)):
        append(open_log(backend), "mine")


# --- what is built --------------------------------------------------------------------------------------------------------


def test_operations_are_computed_again_at_the_new_head(backend: Tricky) -> None:
    backend.on_create = [backend.loses_to(lambda: append_puts(open_log(backend.inner), 1, "job"))]
    seen: list[bool] = []

    def build(view: RefTable) -> list[Op]:
        seen.append(view.branch("job") is None)
        if view.branch("job") is not None:
            raise ConflictError("job has moved", object_id="job")
        return [put_op("job", 5)]

    log = open_log(backend)
    with pytest.raises(ConflictError):
        log.append(build)
    assert seen == [True, False]
    assert log.sync().n == 2


def test_a_write_id_names_one_exact_content(backend: Tricky) -> None:
    mine = new_id()
    backend.on_create = [backend.absent_unknown, backend.loses_to(other_writer(backend)), backend.lands_unknown]
    open_log(backend).append(lambda _view: [mark_op("mine")], write_id=mine)
    entries = list(open_log(backend).entries())
    assert [entry.write_id == mine for entry in entries] == [False, False, False]
    assert len({entry.write_id for entry in entries}) == 3
    open_log(backend).append(lambda _view: [mark_op("too")], write_id=(other := new_id()))
    assert [entry.write_id for entry in open_log(backend).entries(4)] == [other], "the first try has the caller's"


def test_without_operations_nothing_is_added(backend: Tricky) -> None:
    assert open_log(backend).append(lambda _view: []).n == 1
    assert names_in(backend.inner) == ["first"]


@pytest.mark.parametrize(
    "op",
    [
        Op({"op": "tag", "critical": True, "name": "a/../b", "root": bytes(32)}),
        Op.annotate(put_op("a", 1).fields["root"], {"m" * 1000: 1.0}),
        Op.mark(put_op("a", 1).fields["root"], "bad", "r" * 5000),
        Op({"op": "new", "critical": False, "data": bytes(2 << 20)}),
        Op({"op": "new", "critical": False, "data": object()}),
    ],
)
def test_what_readers_would_refuse_is_not_written(backend: Tricky, op: Op) -> None:
    with pytest.raises((InvalidOptionError, UnsupportedValueError)):
        open_log(backend).append(lambda _view: [op])
    assert not backend.sent


def test_an_unknown_critical_operation_stops_writes_not_reads(backend: Tricky) -> None:
    open_log(backend.inner).append(lambda _view: [Op({"op": "from-the-future", "critical": True}), put_op("job", 1)])
    log = open_log(backend)
    assert log.sync().n == 2
    assert log.view().branch("job") is not None
    with pytest.raises(FormatVersionError, match=rf"{entry_name('log', 2)}.*from-the-future.*Upgrade"):
        append(log, "mine")
    assert not backend.sent


# --- durability order -----------------------------------------------------------------------------------------------------


def test_the_entry_before_is_made_durable_first_unless_it_is_ones_own(backend: Tricky) -> None:
    log = open_log(backend)
    append(log, "mine")
    append(log, "mine too")
    calls = [call for call in backend.calls if call[0] in ("sync_folders", "create")]
    assert calls == [("sync_folders", entry_name("log", 1)), *(("create", entry_name("log", n)) for n in (2, 3))]


def test_an_entry_found_by_reading_is_made_durable_before_it_is_acknowledged(backend: Tricky) -> None:
    backend.on_create = [backend.lands_unknown]
    append(open_log(backend), "mine")
    assert backend.calls[-1] == ("sync_folders", entry_name("log", 2))


def test_no_entry_is_created_after_one_that_could_not_be_made_durable(backend: Tricky) -> None:
    def fail(what: str, _name: str) -> None:
        if what == "sync_folders":
            raise PermissionDeniedError("injected: fsync failed")

    backend.before = fail
    with pytest.raises(PermissionDeniedError):
        append(open_log(backend), "mine")
    assert not backend.sent


# --- every call -----------------------------------------------------------------------------------------------------------

FAULTS = ["unavailable", "no-space", "denied", "lost-reply", "unknown-landed", "unknown-absent", "unknown-lands-later"]


@pytest.mark.race
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
def test_a_fault_at_every_backend_call(fault: str, persistent: bool, is_local: bool) -> None:
    """After any fault: each acknowledged operation is there once, every other one once or not at all, in the order of the calls."""
    struck, k = True, 0
    while struck:
        k += 1
        struck = run_with_fault(k, fault, persistent, is_local)
    assert k > 12


def run_with_fault(k: int, fault: str, persistent: bool, is_local: bool) -> bool:
    backend = Tricky(is_local=is_local)
    append(open_log(backend.inner), "first")
    landings: list[Callable[[], object]] = []
    struck = 0

    def fail(what: str, name: str) -> None:
        nonlocal struck
        while landings:
            landings.pop()()
        if len(backend.calls) < k or (struck and not persistent):
            return
        struck += 1
        match fault:
            case "no-space":
                raise NoSpaceError(f"injected: {what}")
            case "denied":
                raise PermissionDeniedError(f"injected: {what}")
            case "unavailable":
                raise BackendUnavailableError(f"injected: {what}")
        if what != "create" or not name.startswith("log/"):
            raise BackendUnavailableError(f"injected: {what}")
        match fault:
            case "lost-reply":
                backend.on_create = [backend.lands_lost]
            case "unknown-landed":
                backend.on_create = [backend.lands_unknown]
            case "unknown-absent":
                backend.on_create = [backend.absent_unknown]
            case "unknown-lands-later":

                def later(name: str, data: bytes) -> Created:
                    landings.append(lambda: backend.inner.create(name, data))
                    return Created.UNKNOWN

                backend.on_create = [later]

    backend.before = fail
    log = open_log(backend)
    acknowledged, possible = ["first"], ["first"]
    for name in ("one", "two", "three"):
        try:
            append(log, name)
            acknowledged.append(name)
            possible.append(name)
        except UndecidedError:
            possible.append(name)
        except StoreError:
            assert name not in names_in(backend.inner), f"{fault} at call {k}: {name} was said to have failed"
    while landings:
        landings.pop()()
    found = names_in(backend.inner)
    assert len(set(found)) == len(found)
    assert set(acknowledged) <= set(found) <= set(possible), f"{fault} at call {k}"
    assert found == sorted(found, key=["first", "one", "two", "three"].index)
    assert append(open_log(backend.inner), "last") == len(found) + 1
    return struck > 0


def test_preconditions_name_what_is_there() -> None:
    log = open_log(MemoryBackend())
    log.append(lambda _view: [put_op("job", 1)])
    root = put_op("job", 1).fields["root"]
    log.append(lambda _view: [Op.tag("v1", root)])
    for op, error in [(Op.branch("job", root), "reset"), (Op.branch("v1", root), "another name"), (Op.tag("job", root), "another name")]:
        with pytest.raises(AlreadyExistsError, match=error):
            op.check(log.view())


# --- at a view at which the caller has followed the log -----------------------------------------------------------------


def test_a_log_that_the_caller_has_followed_is_not_followed_again(backend: Tricky) -> None:
    log = open_log(backend)
    view = log.newest_view()
    backend.calls.clear()
    assert log.append(lambda _view: [mark_op("mine")], at=view).n == 2
    assert [name for what, name in backend.calls if what == "get"] == [entry_name("log", 1)], "the entry before is still there"
    assert names_in(backend.inner) == ["first", "mine"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_view_that_is_behind_costs_no_pause(backend: Tricky, is_known: bool) -> None:
    pauses: list[float] = []
    log = open_log(backend, sleep=pauses.append)
    view = log.newest_view()
    other_writer(backend)()
    if is_known:
        log.sync()
    assert log.append(lambda _view: [mark_op("mine")], at=view).n == 3
    assert (names_in(backend.inner), pauses) == (["first", "other", "mine"], [])


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_refusal_at_a_view_holds_only_if_it_is_the_newest(backend: Tricky, is_behind: bool) -> None:
    log, built = open_log(backend), list[int]()
    view = log.newest_view()
    if is_behind:
        other_writer(backend)()

    def build(at: RefTable) -> list[Op]:
        head = at.head()
        assert head is not None
        built.append(head.n)
        if head.n == 1:
            raise ConflictError("injected: not from here")
        return [mark_op("mine")]

    if is_behind:
        assert log.append(build, at=view).n == 3
    else:
        with pytest.raises(ConflictError):
            log.append(build, at=view)
    assert built == ([1, 2] if is_behind else [1])


def test_no_entry_follows_one_that_is_gone(backend: Tricky) -> None:
    log = open_log(backend)
    append(log, "lost")
    view = log.newest_view()
    backend.inner.delete([entry_name("log", 2)])
    with pytest.warns(LogChangedWarning):
        assert log.append(lambda _view: [mark_op("mine")], at=view).n == 2
    assert names_in(backend.inner) == ["first", "mine"]


def test_what_another_process_of_this_host_has_seen_is_not_written_again(backend: Tricky) -> None:
    """A hole in the log can be filled from a copy as long as nothing else has its number."""
    table = MemoryTable()
    log, other = open_log(backend, table), open_log(backend, table)
    view = log.newest_view()
    append(other, "lost")
    append(other, "later")
    backend.inner.delete([entry_name("log", 2)])
    assert log.append(lambda _view: [mark_op("mine")], at=view).n == 4


def test_where_create_may_overwrite_the_log_is_followed_first(backend: Tricky) -> None:
    log = open_log(backend, shared=False)
    view = log.newest_view()
    other_writer(backend)()
    assert log.append(lambda _view: [mark_op("mine")], at=view).n == 3
    assert [name for name, _ in backend.sent] == [entry_name("log", 3)]
