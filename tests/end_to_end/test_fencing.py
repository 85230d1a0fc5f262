"""Which save may move a ref, and what the new snapshot continues: a job that was given up as dead cannot overwrite its successor's work."""

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.session.ref_fence import RefFence
from tests.effort import PATIENCE_SECONDS

CHILD_SECONDS = PATIENCE_SECONDS


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], tsck.Store]]:
    """Opens the store as one more process would."""
    opened: list[tsck.Store] = []

    def open_one() -> tsck.Store:
        opened.append(tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / f"cache-{len(opened)}"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], tsck.Store]) -> tsck.Store:
    return open_store()


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((5000,), number)}


def put(store: tsck.Store, number: int, **options: object) -> tsck.Snapshot:
    return store.put_snapshot(state(number), ref="job", step=number, **options)  # type: ignore[arg-type]


def steps(store: tsck.Store) -> list[int | None]:
    return [snapshot.step for snapshot in store.log("job")]


def files(folder: Path) -> dict[str, bytes]:
    """Without writer records, for which no save waits."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "writers"}


def test_a_job_that_wakes_up_loses(store: tsck.Store, open_store: Callable[[], tsck.Store], tmp_path: Path) -> None:
    put(store, 1)
    successor = open_store()
    assert successor.checkout("job")["weights"][0] == 1
    put(successor, 2)
    before = files(tmp_path / "store")
    for _ in range(2):
        with pytest.raises(tsck.ConflictError, match=r"moved it.*checkout") as caught:
            put(store, 2)
        assert caught.value.object_id == "job"
    assert files(tmp_path / "store") == before
    third = put(successor, 3)
    assert steps(store) == [3, 2, 1]
    assert store.resolve("job").root == third.root


def test_who_has_not_restored_the_ref_may_not_move_it(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    put(store, 1)
    with pytest.raises(tsck.ConflictError, match="has not restored it"):
        put(open_store(), 1)


def test_expecting_a_root(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, other = put(store, 1), open_store()
    second = put(other, 2, expect=first.root)
    assert second.parent == first.root
    for stale in (first, first.root, "job~1"):
        with pytest.raises(tsck.ConflictError, match="moved it"):
            put(store, 3, expect=stale)
    assert put(store, 3, expect=second).entry > second.entry
    assert steps(store) == [3, 2, 1]


def test_expecting_anything(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first = put(store, 1)
    put(open_store(), 2, expect=tsck.ANY)
    third = put(store, 3, expect=tsck.ANY)
    assert third.parent == first.root, "the state continues what this handle had, not what lay in between"
    assert steps(store) == [3, 2, 1]


def test_expecting_nothing(store: tsck.Store) -> None:
    put(store, 1, expect=None)
    with pytest.raises(tsck.ConflictError):
        put(store, 2, expect=None)
    with pytest.raises(tsck.ConflictError, match="does not exist"):
        store.put_snapshot(state(1), ref="other", expect=store.resolve("job"))
    assert list(store.branches()) == ["job"]


@pytest.mark.parametrize("same_handle", [True, False])
def test_a_save_after_a_rollback_continues_what_was_restored(
    store: tsck.Store, open_store: Callable[[], tsck.Store], same_handle: bool
) -> None:
    first, second = put(store, 1), put(store, 2)
    third = put(store, 3)
    resumed = store if same_handle else open_store()
    resumed.checkout("job@2")
    again = put(resumed, 4)
    assert again.parent == second.root
    assert steps(resumed) == [4, 3, 2, 1], "the ref keeps the history of where it was"
    assert resumed.resolve("job~1").root == second.root, "and ~ follows parents"
    assert resumed.resolve("job@3").root == third.root
    assert resumed.resolve("job~2").root == first.root
    assert put(resumed, 5).parent == again.root


def test_a_checkout_by_root_does_not_take_the_ref_over(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first = put(store, 1)
    other = open_store()
    other.checkout(first.root)
    with pytest.raises(tsck.ConflictError):
        put(other, 2)
    forked = other.put_snapshot(state(2), ref="fork")
    assert forked.parent is None, "a new ref continues nothing, whatever was restored last"


def test_reset_fences_others(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, _ = put(store, 1), put(store, 2)
    operator = open_store()
    assert operator.reset("job", to="job@1").root == first.root
    with pytest.raises(tsck.ConflictError):
        put(store, 3)
    assert operator.checkout("job")["weights"][0] == 1
    assert put(operator, 3).parent == first.root
    assert steps(store) == [3, 1, 2, 1]
    with pytest.raises(tsck.NotFoundError):
        operator.reset("nothing", to="job")


def test_a_branch_begins_a_ref(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, _ = put(store, 1), put(store, 2)
    assert store.branch("exp", at="job@1").root == first.root
    new = store.put_snapshot(state(9), ref="exp", step=9)
    assert new.parent == first.root
    assert steps(store) == [2, 1]
    with pytest.raises(tsck.StoreError, match="exp"):
        open_store().branch("exp", at="job")


# --- looking takes nothing over -----------------------------------------------------------------------------------------------


def restored(open_store: Callable[[], tsck.Store], address: str = "job") -> tsck.Store:
    """One more handle, which has restored what is at an address."""
    other = open_store()
    other.checkout(address)
    return other


@pytest.mark.parametrize("beside", [False, True])
def test_a_notebook_that_only_restored_the_newest_snapshot_may_not_begin_there(
    store: tsck.Store, open_store: Callable[[], tsck.Store], tmp_path: Path, beside: bool
) -> None:
    head = put(store, 1000)
    notebook = restored(open_store)
    before = files(tmp_path / "store")

    def put_lower() -> object:  # an asynchronous save raises where it is called
        return notebook.put_snapshot_async(state(1), ref="job", step=1) if beside else put(notebook, 1)

    with pytest.raises(tsck.InvalidOptionError, match=r"step 1 is lower than step 1000, where .* restored ref 'job'.*expect=") as caught:
        put_lower()
    assert caught.value.object_id == "step"
    assert files(tmp_path / "store") == before
    assert put(store, 1001).parent == head.root, "the running job goes on"
    run_printed(str(caught.value))
    assert store.resolve(f"job-{head.root[:8]}").root == head.root


def test_a_save_of_no_lower_step_goes_on(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    put(store, 10)
    again = restored(open_store)
    assert put(again, 10).step == 10, "the same step, as where the last one is saved once more"
    assert put(again, 3).step == 3, "it has put there: its own steps are its own to count"
    again.checkout("job")
    assert put(again, 2).step == 2
    without = restored(open_store)
    assert without.put_snapshot(state(4), ref="job").step is None
    assert put(without, 1).step == 1


def test_an_explicit_expect_may_save_a_lower_step(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, head = put(store, 900), put(store, 1000)
    assert put(restored(open_store), 5, expect=head).step == 5
    put(store, 1000, expect=tsck.ANY)
    assert put(restored(open_store, "job@900"), 6).parent == first.root
    operator = restored(open_store)
    operator.reset("job", to="job@1000")
    assert put(operator, 7).step == 7
    assert steps(store) == [7, 1000, 6, 1000, 5, 1000, 900]


def test_the_first_save_to_a_branch_may_have_any_step(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    head = put(store, 1000)
    notebook = restored(open_store)
    assert notebook.put_snapshot(state(1), ref="new", step=1).parent is None
    notebook.branch("exp", at="job")
    assert notebook.put_snapshot(state(1), ref="exp", step=1).parent == head.root
    store.branch("exp2", at="job")
    tuning = restored(open_store, "exp2")
    assert tuning.put_snapshot(state(1), ref="exp2", step=1).parent == head.root
    later = restored(open_store, "exp2")
    with pytest.raises(tsck.InvalidOptionError, match="step 0 is lower than step 1"):
        later.put_snapshot(state(1), ref="exp2", step=0)


def test_an_import_may_have_a_lower_step(store: tsck.Store, open_store: Callable[[], tsck.Store], tmp_path: Path) -> None:
    put(store, 1000)
    torch.save(state(3), tmp_path / "old.pt")
    found = tsck.import_checkpoint(restored(open_store), tmp_path / "old.pt", ref="job", step=3)
    assert found.snapshot.step == 3


# --- a job that lost its ref learns how to go on ----------------------------------------------------------------------------


def printed_commands(text: str) -> list[list[str]]:
    """The commands that a message gives, as a shell would take them apart."""
    return [shlex.split(command) for command in re.findall(r"`(tsck (?!help )[^`]*)`", text)]


def run_printed(text: str) -> None:
    """Runs all of them, in the given order."""
    commands = printed_commands(text)
    assert commands
    for _, *arguments in commands:
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output


def test_the_conflict_says_who_and_how_to_go_on(store: tsck.Store, open_store: Callable[[], tsck.Store], tmp_path: Path) -> None:
    own, other = put(store, 1), put(restored(open_store), 2)
    with pytest.raises(tsck.ConflictError) as caught:
        put(store, 2)
    said = str(caught.value)
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.search(rf"this process, through another store handle, moved it \(to step 2, by \S+@\S+:{os.getpid()} at {when}\)", said)
    assert [words[1] for words in printed_commands(said)] == ["branch", "reset"]
    run_printed(said)
    mine = put(store, 2)
    assert mine.parent == own.root, "the job goes on as if nothing had been, by commands alone"
    kept = f"job-{other.root[:8]}"
    assert store.resolve(kept).root == other.root, "and the other one has lost nothing"
    put(open_store(), 3, expect=mine)
    with pytest.raises(tsck.ConflictError) as again:
        put(store, 3)
    assert str(tmp_path / "store") in str(again.value)


def test_the_conflict_names_a_branch_that_keeps_the_other_side(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    put(store, 1)
    other = put(restored(open_store), 2)
    store.branch("job-" + other.root[:8], at=other.root)
    with pytest.raises(tsck.ConflictError, match=rf"branch 'job-{other.root[:8]}' keeps the other one") as caught:
        put(store, 2)
    expected = re.search(r"expect='([0-9a-f]+)'", str(caught.value))
    assert expected is not None
    assert put(store, 2, expect=expected[1]).step == 2
    assert steps(store) == [2, 2, 1]


@pytest.mark.parametrize("ref", ["job", "r" * 128])
def test_the_commands_work_where_their_name_is_taken(store: tsck.Store, open_store: Callable[[], tsck.Store], ref: str) -> None:
    first = store.put_snapshot(state(1), ref=ref, step=1)
    store.tag(f"job-{first.root[:8]}", ref)
    notebook = restored(open_store, ref)
    with pytest.raises(tsck.InvalidOptionError) as caught:
        notebook.put_snapshot(state(0), ref=ref, step=0)
    for _ in range(2):
        run_printed(str(caught.value))
        assert first.root in {snapshot.root for name, snapshot in store.branches().items() if name != ref}
        with pytest.raises(tsck.InvalidOptionError) as caught:
            notebook.put_snapshot(state(0), ref=ref, step=0)


def test_the_conflict_is_reported_where_the_log_entry_cannot_be_read(
    store: tsck.Store, open_store: Callable[[], tsck.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    put(restored(open_store), 2)
    open_store().put_snapshot(state(0), ref="another", step=0)  # as the newest entry is read by every refresh
    read, broken = store.engine.log.chain.read, store.resolve("job").entry

    def fail(n: int) -> object:
        if n == broken:
            raise tsck.BackendUnavailableError("no answer")
        return read(n)

    monkeypatch.setattr(store.engine.log.chain, "read", fail)
    with pytest.raises(tsck.ConflictError, match=r"moved it \(to step 2, at [0-9]{4}-"):
        put(store, 2)


# --- what a snapshot continues ----------------------------------------------------------------------------------------------


def test_equal_states_on_new_refs_have_equal_roots(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    put(store, 1)
    other = restored(open_store)
    roots = {
        store.put_snapshot(state(5), ref="a", step=5).root,
        other.put_snapshot(state(5), ref="b", step=5).root,
        open_store().put_snapshot_async(state(5), ref="c", step=5).wait().root,
        other.put_snapshot(state(5), ref="d", step=5, parent=None).root,
    }
    assert len(roots) == 1


def test_an_explicit_parent(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, second = put(store, 1), put(store, 2)
    assert store.put_snapshot(state(3), ref="tuned", parent="job@1").parent == first.root
    assert store.put_snapshot(state(4), ref="tuned", parent=second).parent == second.root
    assert store.put_snapshot_async(state(5), ref="tuned", parent=first.root[:12]).wait().parent == first.root
    assert put(store, 3, parent=None).parent is None
    with pytest.raises(tsck.NotFoundError):
        store.put_snapshot(state(6), ref="tuned", parent="nothing")
    with pytest.raises(tsck.InvalidOptionError, match="parent must be"):
        store.put_snapshot(state(6), ref="tuned", parent=3)  # type: ignore[arg-type]


def test_blocks_of_what_was_restored_are_found_without_being_its_child(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    weights = torch.randn(1 << 18)
    store.put_snapshot({"weights": weights}, ref="base", step=1)
    fresh = restored(open_store, "base")  # with a cache of its own, which knows no blocks
    tuned = fresh.put_snapshot({"weights": weights}, ref="tuned", step=0)
    assert tuned.parent is None
    assert tuned.new_bytes < weights.nbytes // 100


def run_in_child(work: Callable[[], str]) -> str:
    """What `work` returns, or the kind of the error of ours that it raises, in a forked child; fails if the child hangs."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except tsck.StoreError as exc:
            said = exc.kind
        except BaseException as exc:  # noqa: BLE001 - the parent reports it
            said = repr(exc)
        os.write(write_fd, said.encode())
        os._exit(0)
    os.close(write_fd)
    if not wait([read_fd], CHILD_SECONDS):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = os.read(read_fd, 1 << 16).decode()
    os.close(read_fd)
    return said or "the child hung"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_the_store(store: tsck.Store, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
    put(store, 1)

    def inherited() -> str:
        assert store.checkout("job")["weights"][0] == 1
        return str(put(store, 2).step)

    def opened_anew() -> str:
        with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as own:
            own.checkout("job")
            return str(put(own, 3).step)

    assert run_in_child(inherited) == "2"
    with pytest.raises(tsck.ConflictError):
        put(store, 2)
    assert run_in_child(opened_anew) == "3"
    assert store.checkout("job")["weights"][0] == 3
    assert put(store, 4).step == 4
    assert steps(store) == [4, 3, 2, 1]
    assert store.fsck(read_data=True).ok


def test_a_handle_knows_what_it_forgot_and_brought_back(store: tsck.Store) -> None:
    put(store, 1)
    put(store, 2)
    store.forget("job")
    store.undo()
    put(store, 3)
    assert steps(store) == [3, 2, 1]
    assert store.resolve("job").parent == store.resolve("job@2").root


def test_a_handle_knows_a_move_that_it_could_not_note(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes, or the answer is lost, between the log entry and the note: of a first save, of a later one and of a reset."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    calls: list[Callable[[], object]] = [lambda: put(store, 1), lambda: put(store, 3), lambda: store.reset("job", "job@1")]
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(RefFence, "note", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        head = store.resolve("job")
        assert put(store, (head.step or 0) + 1).parent == head.root


def test_what_an_earlier_process_staged_is_not_taken_for_this_ones_save(tmp_path: Path) -> None:
    """It publishes that, but has not restored it."""
    where = {"create": True, "cache_dir": tmp_path / "cache", "staging": tmp_path / "staging"}
    with tsck.open(tmp_path / "store", **where) as first:  # type: ignore[call-overload]
        put(first, 1)
        fence = first.session.fence
        first.session.fence._refs.clear()  # as of a handle that only published it
        head = first.engine.log.newest_view().branch("job")
        assert head is not None
        assert first.engine.log.wrote(head.n)
        assert not fence.catch_up(first.engine, first.engine.log.view(), "job")


def test_a_staged_save_and_a_publication_are_noted_one_after_the_other() -> None:
    """Each reads where the ref was before it writes."""
    fence, is_locked = RefFence(), list[bool]()

    class Watched(dict[str, object]):
        def get(self, ref: str, default: object = None) -> object:
            is_locked.append(fence._lock.locked())
            return super().get(ref, default)

    fence._refs = Watched()  # type: ignore[assignment]
    one, two = Digest(bytes([1] * 32)), Digest(bytes([2] * 32))
    fence.note_staged("job", one)
    fence.note_staged("job", two)
    fence.note_published("job", one)
    assert (fence._refs["job"].head, fence._refs["job"].current) == (one, two)
    assert is_locked == [True] * 3


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ("me@here:17", "an earlier run of yours on this host, or one that is still running, moved it (to step 2, by me@here:42 "),
        ("me@there:42", "another process moved it (to step 2, by me@here:42 "),
        ("you@here:42", "another process moved it (to step 2, by me@here:42 "),
    ],
)
def test_the_conflict_says_whose_process_moved_the_branch(
    open_store: Callable[[], tsck.Store], monkeypatch: pytest.MonkeyPatch, actor: str, said: str
) -> None:
    """The usual reason is one's own rerun, which is no other process of a stranger."""
    monkeypatch.setattr("tensorstore_ck.engine.opening.current_actor", lambda: "me@here:42")
    put(open_store(), 1)
    put(restored(open_store), 2)
    monkeypatch.setattr("tensorstore_ck.engine.write.branch_conflict.current_actor", lambda: actor)
    with pytest.raises(tsck.ConflictError, match=re.escape(said)):
        put(open_store(), 3)
