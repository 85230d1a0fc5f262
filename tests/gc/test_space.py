"""`usage`, `gc`, `fsck` and `NoSpaceError` say the same of what is freed now, and later; and what they say comes true, to the byte."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.cli import main
from tensorstore_ck.common.free_space import MinFree
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.gc.report import Freeable
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.gc.stores import Clock, leave_orphans, open_store, sizes, state, stay_in_one_thread

DAY = 86_400
NS = 10**9
KEPT = state(*range(100, 160))
"""So much that no run frees half of the store."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


def total(backend: Backend) -> int:
    return sum(sizes(backend).values())


def said(store: Store, options: GcOptions | None = None) -> Freeable:
    """What gc says, when all say the same; `fsck` says it when it finds something that nothing refers to."""
    plan = store.gc(options, dry_run=True)
    found = Freeable(plan.freed_bytes, plan.command, plan.later)
    if options is None:
        assert store.usage().freeable == found
        checked = store.fsck()
        if checked.freeable is not None:
            assert checked.freeable == found
        else:
            assert not any(finding.kind == "unreferenced" for finding in checked.findings)
    return found


def come_true(store: Store, clock: Clock, options: GcOptions | None = None) -> dict[str, int]:
    """Waits for each date that is said, and frees: why -> bytes, all as foretold."""
    backend, freeable = store.engine.backend, said(store, options)
    before = total(backend)
    assert store.gc(options).freed_bytes == freeable.now_bytes == before - total(backend)
    done = {"now": freeable.now_bytes}
    dated = sorted((later for later in freeable.later if later.due_ns is not None), key=lambda later: later.due_ns or 0)
    for later in dated:
        assert later.due_ns is not None
        if later.due_ns == clock.now_ns:
            continue  # gone with the one before
        assert later.due_ns > clock.now_ns
        clock.now_ns = later.due_ns - 1 * NS
        store.gc(options)
        left = total(backend)
        clock.now_ns = later.due_ns
        report = store.gc(options)
        assert report.freed_bytes == left - total(backend) > 0, f"some of it goes at that time: {later.why}"
    freed_bytes = before - total(backend)
    assert freed_bytes == freeable.now_bytes + sum(later.bytes for later in dated)
    assert not [later for later in said(store, options).later if later.due_ns is not None]
    return done | {later.why: later.bytes for later in freeable.later}


def store_with_all_that_is_kept(clock: Clock) -> Store:
    store = open_store(MemoryBackend(clock=clock), clock=clock)
    store.put_snapshot(KEPT, ref="kept", step=1, codec="raw")
    return store


def orphans(store: Store, clock: Clock) -> None:
    leave_orphans(store.engine.backend, state(1))


def forgotten(store: Store, clock: Clock) -> None:
    store.put_snapshot(state(11, 12), ref="forgotten", step=1)
    clock.advance(2 * DAY)
    store.forget("forgotten")


def forgotten_and_young(store: Store, clock: Clock) -> None:
    store.put_snapshot(state(21, 22), ref="young", step=1)
    store.forget("young")


def pinned(store: Store, clock: Clock) -> None:
    root = store.put_snapshot(state(31, 32), ref="pinned", step=1).root
    store.pin(root, owner="me", expires="3d")
    clock.advance(2 * DAY)
    store.forget("pinned")
    clock.advance(DAY / 2)


def forgotten_in_part(store: Store, clock: Clock) -> None:
    """A pack that becomes sparse, and is rewritten."""
    store.put_snapshot(state(41, 42, 43, 44), ref="sparse", step=1)
    store.put_snapshot(state(41), ref="sparse", step=2)
    clock.advance(DAY)
    store.forget("sparse@1")


def freed_already(store: Store, clock: Clock) -> None:
    store.put_snapshot(state(51), ref="gone", step=1)
    store.forget("gone")
    clock.advance(DAY)


def pinned_by_two(store: Store, clock: Clock) -> None:
    """What they share goes with the last."""
    store.pin(store.put_snapshot(state(61, 62), ref="shared", step=1).root, owner="me", expires="2d")
    store.put_snapshot(state(61, 63), ref="shared", step=2)
    clock.advance(DAY)
    store.forget("shared")


WAYS: dict[str, tuple[Callable[[Store, Clock], None], set[str]]] = {
    "nothing": (lambda store, clock: None, set()),
    "orphans": (orphans, {"age"}),
    "forgotten": (forgotten, {"undo window"}),
    "forgotten and young": (forgotten_and_young, {"undo window"}),
    "pinned": (pinned, {"pins"}),
    "sparse": (forgotten_in_part, {"undo window"}),
    "now": (freed_already, set()),
    "shared": (pinned_by_two, {"pins", "undo window"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_said_comes_true(way: str) -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    make, reasons = WAYS[way]
    make(store, clock)
    freed = come_true(store, clock)
    assert freed.keys() == {"now"} | reasons
    assert (freed["now"] > 0) == (way == "now")


def test_a_mixture_adds_up() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    for make in (pinned, forgotten_in_part, freed_already, forgotten, pinned_by_two, forgotten_and_young, orphans):
        make(store, clock)
    freed = come_true(store, clock)
    assert freed.keys() == {"now", "age", "undo window", "pins"}
    assert all(size > 0 for size in freed.values())


def test_grace_is_a_reason_of_its_own() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    options = GcOptions(grace_seconds=600)
    freed_already(store, clock)
    freed_already(store, clock)
    plan = said(store, options)
    assert [later.why for later in plan.later] == ["grace"]
    assert plan.now_bytes == 0
    assert plan.later[0].commands == ("tsck gc -s memory:",), "which does not wait"
    assert store.gc(options).later == plan.later
    assert said(store).now_bytes == plan.later[0].bytes, "condemned by now, and due for whoever gives no grace"
    clock.advance(599)
    assert store.gc(options).later == plan.later
    clock.advance(1)
    assert store.gc(options).freed_bytes == plan.later[0].bytes


def test_what_runs_out_waits_for_the_grace_period_after_that() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    options = GcOptions(grace_seconds=600)
    orphans(store, clock)
    begin_ns = clock.now_ns
    [later] = said(store, options).later
    assert later.due_ns == begin_ns + (DAY + 600) * NS
    clock.advance(DAY)
    store.gc(options)
    clock.advance(600)
    assert store.gc(options).freed_bytes == later.bytes
    assert "not while a save is running or staged" in later.describe(early=True)


def test_dead_blocks_of_packs_in_use_are_never_freed_unless_asked_for() -> None:
    """What `usage` calls held by nothing, and gc leaves."""
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    store.put_snapshot(state(1, 2, 3, 4), ref="job", step=1)
    store.put_snapshot(state(1, 2, 3), ref="job", step=2)
    store.forget("job@1")
    clock.advance(DAY)
    store.gc()
    usage = store.usage()
    assert usage.unreferenced_bytes > 5000
    [later] = said(store).later
    assert (later.why, later.due_ns) == ("packs in use", None)
    assert later.commands == ("tsck gc --compact-below 100% -s memory:",)
    assert store.gc(GcOptions(compact_below=1.0)).freed_bytes == later.bytes
    assert said(store).later == ()
    assert store.usage().unreferenced_bytes < 500


def test_a_command_for_options_that_are_not_the_usual_ones_has_them() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    orphans(store, clock)
    options = GcOptions(min_age_seconds=90.5, undo_window_seconds=3e6, compact_below=0.25, max_delete=0.9)
    plan = store.gc(options, dry_run=True)
    assert plan.command == "tsck gc --min-age 90.5s --undo-window 3000000s --max-delete 90% --compact-below 25% -s memory:"


def test_what_would_be_refused_is_allowed_by_the_command() -> None:
    clock = Clock()
    store = open_store(MemoryBackend(clock=clock), clock=clock)
    store.put_snapshot(state(1), ref="job", step=1)
    store.put_snapshot(state(2, 3), ref="big", step=1)
    store.forget("big")
    clock.advance(DAY)
    assert said(store).command == "tsck gc --max-delete 100% -s memory:"
    refused = store.gc(dry_run=True).refused
    assert refused is not None
    assert "`tsck gc --max-delete 100% -s memory:`" in refused


# --- commands, as printed -----------------------------------------------------------------------------------------------


def run(command: str, cache: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "tsck"
    result = CliRunner().invoke(main, words[1:], env={"TSCK_CACHE_DIR": str(cache)}, catch_exceptions=False)
    assert result.exit_code == 0, (command, result.output)
    return result.stdout


@pytest.mark.parametrize("only", ["age", "undo window", "pins"])
def test_each_printed_command_frees_what_it_says(tmp_path: Path, only: str) -> None:
    """On a folder, whose name a shell must not split."""
    url, cache = tmp_path / "my ck", tmp_path / "cache"
    backend = LocalBackend(str(url))
    with tsck.open(url, create=True, cache_dir=cache) as store:
        store.put_snapshot(KEPT, ref="kept", step=1, codec="raw")
        leave_orphans(backend, state(1))
        store.put_snapshot(state(11, 12), ref="forgotten", step=1)
        store.forget("forgotten")
        root = store.put_snapshot(state(31, 32), ref="pinned", step=1).root
        store.pin(root, owner="me & you", expires="3d")
        store.forget("pinned")
    found = json.loads(run(f"tsck usage --json -s '{url}'", cache))["freeable"]
    by_reason = {later["why"]: later for later in found["later"]}
    assert [*by_reason] == ["age", "undo window", "pins"]
    assert found["now_bytes"] == 0
    printed = run(f"tsck usage -s '{url}'", cache)
    assert run(f"tsck gc --dry-run -s '{url}'", cache).splitlines()[-3:] == printed.splitlines()[-3:]
    assert run(f"tsck gc -s '{url}'", cache).splitlines()[-3:] == printed.splitlines()[-3:], "nothing was freed, and it says why"
    assert not [option for option in ("--undo-window", "--min-age", "unpin") if option in printed], "nobody is talked out of a protection"
    with tsck.open(url, cache_dir=cache) as store:
        urgent = " ".join(said(store).describe(is_full=True))
    before = total(backend)
    for command in by_reason[only]["commands"]:
        assert command in urgent
        run(command, cache)
    counted = [*by_reason][: [*by_reason].index(only) + 1]  # these commands go on from those before
    assert before - total(backend) == sum(by_reason[why]["bytes"] for why in counted)
    with tsck.open(url, cache_dir=cache) as store:
        assert not {later.why for later in said(store).later} & set(counted)


def test_no_space_says_what_gc_can_free(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(KEPT, ref="kept", step=1, codec="raw")
        leave_orphans(LocalBackend(str(tmp_path / "ck")), state(1))
        store.engine.min_free = MinFree(size_bytes=1 << 60)
        with pytest.raises(NoSpaceError) as refused:
            store.put_snapshot(state(2), ref="kept", step=2)
        freeable = said(store)
        assert freeable.later[0].bytes > 5000
        assert str(refused.value).endswith(". ".join(freeable.describe(is_full=True)))
        assert freeable.later[0].commands == (f"tsck gc --min-age 0s -s {tmp_path / 'ck'}",)


def test_fsck_says_when_each_object_is_freed(tmp_path: Path) -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    clock.now_ns -= 10 * NS
    orphans(store, clock)
    clock.now_ns += 10 * NS
    assert {finding.kind for finding in store.fsck().findings} == {"unreferenced"}
    assert all(finding.message.endswith("gc frees it by 2033-05-19T03:33:10Z") for finding in store.fsck().findings)
    clock.advance(DAY)
    assert all(finding.message.endswith("`tsck gc -s memory:` frees it") for finding in store.fsck().findings)
    store.gc()
    assert store.fsck().findings == ()
    assert store.fsck().freeable is None


def test_gc_options_that_are_given_are_those_of_the_prediction() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    forgotten(store, clock)
    options = replace(GcOptions(), undo_window_seconds=3600.0)
    [later] = said(store, options).later
    assert later.due_ns == clock.now_ns + 3600 * NS
    assert come_true(store, clock, options)["undo window"] == later.bytes


def test_footers_of_packs_that_are_needed_whole_are_read_once_a_host() -> None:
    faults = Faults()
    clock = Clock()
    backend = FaultyBackend(MemoryBackend(clock=clock), faults, atomic_put=True)
    store = open_store(backend, clock=clock)
    for step in range(5):
        store.put_snapshot(state(step), ref="job", step=step)
    store.put_snapshot(state(10, 11), ref="job", step=10)
    store.put_snapshot(state(10), ref="job", step=11)
    read = []
    for _ in range(3):
        before = faults.calls
        store.gc(dry_run=True)
        read.append(faults.calls - before)
        if len(read) == 2:
            store.forget("job@10")
    assert read[0] - read[1] >= 3 * 6, "three reads a pack"
    assert read[1] < read[2] < read[1] + 12, "of one pack, which is not needed whole once the window ends"


def test_what_was_saved_and_forgotten_at_once_waits_for_its_age_too() -> None:
    clock = Clock()
    store = store_with_all_that_is_kept(clock)
    forgotten_and_young(store, clock)
    options = GcOptions(undo_window_seconds=3600)
    [later] = said(store, options).later
    assert (later.why, later.due_ns) == ("undo window", clock.now_ns + DAY * NS)
    clock.advance(3600)
    assert [later.why for later in said(store, options).later] == ["age"]
    assert come_true(store, clock, options)["age"] == later.bytes


def test_no_age_and_no_undo_window_free_what_a_clock_ahead_wrote() -> None:
    """The command that is printed frees it, and is not printed again by its own run."""
    clock = Clock()
    store = open_store(clock=clock)
    clock.advance(365 * DAY)
    for number in range(3):
        store.put_snapshot(state(number), ref="job", step=number)
    store.forget("job@0")
    leave_orphans(store.engine.backend, state(9))
    clock.advance(-365 * DAY)
    options = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
    command = "tsck gc --min-age 0s --undo-window 0s{} -s memory:"
    kept = said(store)
    assert {later.why for later in kept.later} == {"age", "undo window"}
    assert kept.later[-1].commands == (command.format(""),)
    assert store.gc(options).freed_bytes == sum(later.bytes for later in kept.later)
    assert said(store, options) == Freeable(0, command.format(" --max-delete 100%"), ())
