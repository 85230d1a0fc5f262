"""Policies from the outside: set in the store, applied with each save and by `retain`, and never to what must stay."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.log.field_checks import RowKind
from tensorstore_ck.log.retention import UnmatchedRuleWarning
from tensorstore_ck.log.table_rows import NOTES, PINS, TAGS
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE, Clock, open_store, require_sound, sizes, state

DAY_SECONDS = 86_400


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[tsck.Store]:
    with open_store(clock=clock) as store:
        yield store


def put(store: tsck.Store, *steps: int, ref: str = "runs/gpt", **options: Any) -> None:
    for step in steps:
        store.put_snapshot(state(step), ref=ref, step=step, **options)


def steps(store: tsck.Store, ref: str = "runs/gpt") -> list[int | None]:
    return [snapshot.step for snapshot in reversed(store.log(ref))]


def test_each_save_applies_it_in_its_own_entry(store: tsck.Store) -> None:
    store.set_policy("runs/*", keep_last=2, keep_every=4)
    before = store.engine.log.sync().n
    put(store, *range(1, 10))
    assert steps(store) == [1, 4, 8, 9]
    assert store.engine.log.sync().n == before + 9
    put(store, 1, 2, 3, 4, ref="other")
    assert steps(store, "other") == [1, 2, 3, 4]


def test_a_long_history_is_looked_at_with_some_saves(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.log.retention.expire_operations.LONG", 4)
    monkeypatch.setattr("tensorstore_ck.log.retention.expire_operations.LONG_EVERY", 10)
    put(store, *range(1, 8))
    store.set_policy("runs/*", keep_last=2)
    put(store, 8, 9)
    assert len(steps(store)) == 9
    put(store, 10, 11)
    assert steps(store) == [10, 11]
    put(store, 12, 13)
    assert steps(store) == [12, 13]


def test_what_went_comes_back_for_a_day(store: tsck.Store, clock: Clock) -> None:
    store.set_policy("runs/*", keep_last=2)
    put(store, 1, 2, 3)
    assert steps(store) == [2, 3]
    store.undo("runs/gpt@1")
    assert steps(store) == [1, 2, 3]
    put(store, 4)
    assert steps(store) == [3, 4]
    clock.advance(2 * DAY_SECONDS)
    store.gc(AT_ONCE)
    with pytest.raises(NotFoundError):
        store.undo("runs/gpt@1")


def test_what_is_tagged_pinned_or_a_fallback_stays(store: tsck.Store) -> None:
    put(store, *range(1, 8))
    store.tag("paper", "runs/gpt@2")
    store.pin("runs/gpt@3", owner="ada")
    store.mark("runs/gpt@6", "bad")
    report = store.apply_policies("runs/gpt", dry_run=True, rules={"keep_last": 1})
    assert [(each.snapshot.step, each.why) for each in report.branches[0].snapshots if each.stays] == [
        (2, ("tag paper",)),
        (3, ("pinned by ada",)),
        (5, ("fallback",)),
        (7, ("newest", "keep_last")),
    ]
    store.set_policy("runs/gpt", keep_last=1)
    assert steps(store) == [1, 2, 3, 4, 5, 6, 7], "only a put or retain applies it"
    assert [each.snapshot.step for branch in store.apply_policies().branches for each in branch.snapshots if not each.stays] == [1, 4, 6]
    assert steps(store) == [2, 3, 5, 7]


def test_what_is_announced_as_freeable_is_freed(store: tsck.Store) -> None:
    backend = store.engine.backend
    store.put_snapshot(state(1, 4), ref="runs/gpt", step=1)  # which shares a tensor with what stays
    put(store, 2, 3, 4)
    put(store, 4, 5, ref="runs/other")  # which shares step 4
    store.branch("kept", "runs/gpt@2")
    store.set_policy("runs/*", keep_last=1)
    planned = store.apply_policies(dry_run=True)
    assert steps(store) == [1, 2, 3, 4]
    assert store.apply_policies().going == planned.going == 2
    before = sum(sizes(backend).values())
    freed = store.gc(AT_ONCE).freed_bytes
    assert planned.frees_bytes is not None
    assert 0 < planned.frees_bytes <= freed
    assert before - sum(sizes(backend).values()) == freed
    assert freed - planned.frees_bytes < 1000  # records, headers and footers
    require_sound(store, {"runs/gpt": state(4), "runs/gpt@3": state(3), "runs/other": state(5), "kept": state(2)})


def test_bytes_are_a_limit(store: tsck.Store) -> None:
    put(store, *range(1, 9))
    whole = store.usage().stored_bytes
    store.set_policy("runs/*", keep_last=100, max_bytes=whole // 2)
    report = store.apply_policies()
    assert [each.why for each in report.branches[0].snapshots if not each.stays] == [("max_bytes",)] * report.going
    store.gc(AT_ONCE)
    assert whole // 4 < store.usage().stored_bytes <= whole // 2 + 1000  # records are not counted
    assert steps(store)[-1] == 8


def test_each_policy_counts_its_limit_of_bytes_from_zero(store: tsck.Store) -> None:
    put(store, *range(1, 9))
    limit = store.usage().stored_bytes // 2
    alone = store.apply_policies(dry_run=True, rules={"keep_last": 100, "max_bytes": limit})
    store.set_policy("runs/*", keep_last=100, max_bytes=limit)
    store.set_policy("*", keep_last=100, max_bytes=limit)
    assert alone.going > 0
    assert store.apply_policies(dry_run=True).going == alone.going


def test_metrics_that_come_later_count(store: tsck.Store) -> None:
    put(store, 1, 2, 3, 4, 5)
    store.annotate("runs/gpt@2", {"loss": 0.1})
    store.annotate("runs/gpt@3", {"loss": float("nan")})
    report = store.apply_policies(dry_run=True, rules={"keep_best": (1, "loss", "min")})
    assert [each.snapshot.step for each in report.branches[0].snapshots if each.stays] == [2, 4, 5]


def test_a_rule_that_matches_nothing_lets_nothing_go(store: tsck.Store) -> None:
    put(store, 1, 2, 3, 4, metrics={"val_loss": 1.0, "acc": 0.5})
    for rule, missing in (
        ({"keep_best": (1, "val_los", "min")}, "keep_best val_los: no snapshot has it; they have 'acc', 'val_loss'"),
        ({"keep_epochs": 2}, "keep_epochs: no snapshot has it"),
        ({"keep_triggers": ["my_own"]}, "keep_triggers my_own: no snapshot has it; they have none"),
    ):
        with pytest.warns(UnmatchedRuleWarning, match=missing):
            store.set_policy("runs/*", keep_last=2, **rule)
        step = store.resolve("runs/gpt").step or 0
        for later in (step + 1, step + 2):
            with pytest.warns(UnmatchedRuleWarning, match=missing):
                put(store, later, metrics={"val_loss": 1.0})
        with pytest.warns(UnmatchedRuleWarning, match=missing):
            assert store.apply_policies().going == 0
        with pytest.warns(UnmatchedRuleWarning, match=missing):
            assert not any("goes" in why for why in store.explain_retention("runs/gpt").values())
    assert steps(store) == list(range(1, 11))
    store.set_policy("runs/*", keep_last=2, keep_triggers=["every_epochs"])  # which may still fire
    put(store, 11)
    assert steps(store) == [10, 11]


def test_a_rule_that_matches_nothing_in_many_branches_is_one_warning(store: tsck.Store) -> None:
    for number in range(3):
        put(store, 1, ref=f"runs/{number}", metrics={f"loss{number}": 1.0})
    message = "in 'runs/0' and in 2 more, .* keep_best typo: no snapshot has it; they have 'loss0', 'loss1', 'loss2'"
    with pytest.warns(UnmatchedRuleWarning, match=message) as met:
        store.set_policy("runs/*", keep_best=(1, "typo", "min"))
    assert len(met) == 1
    with pytest.warns(UnmatchedRuleWarning, match=message) as met:
        store.apply_policies()
    assert len(met) == 1


def test_tags_and_pins_are_read_once_for_all_branches(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[object] = []
    scan = RefTable.scan

    def noted(view: RefTable, kind: Any, *args: Any, **options: Any) -> Any:
        scanned.append(kind)
        return scan(view, kind, *args, **options)

    monkeypatch.setattr(RefTable, "scan", noted)
    store.set_policy("runs/*", keep_last=1)
    counts = []
    for branches in (range(2), range(2, 8)):
        for number in branches:
            put(store, 1, 2, ref=f"runs/{number}")
        scanned.clear()
        store.apply_policies()
        counts.append((scanned.count(TAGS), scanned.count(PINS)))
    assert counts[0] == counts[1]


def test_a_save_reads_tags_and_notes_only_where_they_matter(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_policy("runs/*", keep_last=2)
    put(store, 1, 2, 3)
    put(store, 1, ref="other")
    store.tag("best", "other")
    for step in (2, 3):
        store.annotate(f"runs/gpt@{step}", {"eval": 1.0})
    decoded: list[object] = []
    decode = RowKind.decode

    def noted(kind: Any, *args: Any) -> Any:
        decoded.append(kind)
        return decode(kind, *args)

    monkeypatch.setattr(RowKind, "decode", noted)
    put(store, 4)
    assert steps(store) == [3, 4]
    assert not {id(TAGS), id(NOTES)}.intersection(map(id, decoded))


def test_the_triggers_and_epochs_of_snapshots_keep_them(store: tsck.Store) -> None:
    for step in range(1, 9):
        triggers = {2: ["at_steps"], 3: ["every_steps", "at_fraction"], 4: ["every_epochs"]}.get(step, ["every_steps"])
        put(store, step, triggers=triggers, epoch=step / 2)
    found = store.resolve("runs/gpt@3")
    assert (found.triggers, found.epoch) == (("every_steps", "at_fraction"), 1.5)
    for rules, kept in (
        ({}, [2, 3, 7, 8]),
        ({"keep_milestones": False}, [7, 8]),
        ({"keep_triggers": "every_epochs"}, [2, 3, 4, 7, 8]),
        ({"keep_epochs": 2, "keep_milestones": False}, [1, 4, 7, 8]),
    ):
        report = store.apply_policies(dry_run=True, rules={"keep_last": 2, **rules})
        assert [each.snapshot.step for each in report.branches[0].snapshots if each.stays] == kept
    store.set_policy("runs/*", keep_last=1)
    why = store.explain_retention("runs/gpt")
    assert why[found.id] == ("keep_milestones at_fraction",)
    store.set_policy("runs/*", keep_last=1, keep_epochs=2)
    reasons = store.explain_retention("runs/gpt")
    assert reasons[store.resolve("runs/gpt@4").id] == ("keep_epochs (epoch 2)",)


@pytest.mark.parametrize(
    "wrong",
    [{"triggers": "at_steps"}, {"triggers": [1]}, {"triggers": ["x" * 65]}, {"epoch": -1}, {"epoch": float("nan")}, {"epoch": True}],
)
def test_a_save_that_no_rule_could_read_is_refused(store: tsck.Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        put(store, 1, **wrong)
    assert not store.branches()


def test_age_counts_by_the_clock(store: tsck.Store, clock: Clock) -> None:
    store.set_policy("runs/*", keep_younger="60h")
    for step in range(1, 6):
        put(store, step)
        clock.advance(DAY_SECONDS)
    assert steps(store) == [3, 4, 5]
    clock.advance(30 * DAY_SECONDS)
    store.apply_policies()
    assert steps(store) == [4, 5], "the newest and its fallback"


def test_steps_that_went_back(store: tsck.Store) -> None:
    store.set_policy("runs/*", keep_every=10, keep_last=1)
    put(store, 10, 15, 20, 25)
    store.reset("runs/gpt", "runs/gpt@10")
    put(store, 15, 20, 21)
    assert steps(store)[-1] == 21
    assert store.resolve("runs/gpt@20").id == store.log("runs/gpt")[1].id


def test_where_a_branch_came_back_to_is_its_newest(store: tsck.Store) -> None:
    put(store, 1, 2, 3)
    store.reset("runs/gpt", "runs/gpt@1")
    report = store.apply_policies(dry_run=True, rules={"keep_last": 1})
    assert [(each.snapshot.step, each.why) for each in report.branches[0].snapshots if each.stays] == [
        (3, ("fallback",)),
        (1, ("newest", "keep_last")),
    ]


def test_staged_saves_apply_them(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", staging=tmp_path / "stage") as store:
        store.set_policy("runs/*", keep_last=2)
        for step in range(1, 5):
            store.put_snapshot_async(state(step), ref="runs/gpt", step=step).wait()
        assert steps(store) == [3, 4]


def test_policies_are_shown_replaced_and_removed(store: tsck.Store) -> None:
    store.set_policy("runs/*", keep_last=1)
    store.set_policy("runs/gpt", keep_steps=[1])
    with open_store(store.engine.backend) as other:
        assert {glob: policy.encode() for glob, policy in other.policies().items()} == {
            "runs/*": {"keep_last": 1},
            "runs/gpt": {"keep_steps": [1]},
        }
    put(store, 1, 2, 3, 4)
    assert steps(store) == [1, 3, 4]
    store.set_policy("runs/gpt", keep_last=3)
    store.remove_policy("runs/*")
    assert list(store.policies()) == ["runs/gpt"]
    put(store, 5)
    assert steps(store) == [3, 4, 5]
    with pytest.raises(NotFoundError, match="no policy"):
        store.remove_policy("runs/*")


def test_bad_input(store: tsck.Store) -> None:
    put(store, 1)
    for glob in ("", "runs/gpt\n", "é*", "x" * 300):
        with pytest.raises(InvalidOptionError, match="matches no ref"):
            store.set_policy(glob, keep_last=1)
    with pytest.raises(InvalidOptionError, match="keeps something"):
        store.set_policy("runs/*", expire_after="1d")
    with pytest.raises(InvalidOptionError, match="dry_run"):
        store.apply_policies(rules={"keep_last": 1})
    with pytest.raises(NotFoundError, match="no branch"):
        store.apply_policies("runs/none", dry_run=True)
    assert store.apply_policies().branches == ()


def test_rules_of_a_newer_build_let_nothing_go(store: tsck.Store) -> None:
    put(store, 1, 2, 3)
    store.engine.log.append(lambda view: [Op.policy("runs/*", {"keep_last": 1, "keep_lucky": 7})])
    put(store, 4)
    assert steps(store) == [1, 2, 3, 4]
    assert store.explain_retention("runs/gpt") == {}
    for use in (store.policies, store.apply_policies):
        with pytest.raises(InvalidOptionError, match="cannot be used: there is no rule 'keep_lucky'"):
            use()


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_every_seconds": 1e-300},
        {"keep_every_seconds": math.inf},
        {"keep_steps": [(1 << 64) - 1]},
        {"keep_younger": -1.0, "keep_last": 1},
    ],
    ids=str,
)
def test_a_policy_with_numbers_that_none_may_have_stops_no_save(store: tsck.Store, rules: dict[str, Any]) -> None:
    """Whoever may append to the log can set one; each save and each page of policies would fail in the arithmetic."""
    put(store, 1)
    store.engine.log.append(lambda view: [Op.policy("*", rules)])
    put(store, 2, 3)
    assert steps(store) == [1, 2, 3]
    for use in (store.policies, store.apply_policies):
        with pytest.raises(InvalidOptionError, match=f"the policy for '\\*' cannot be used: {next(iter(rules))}"):
            use()
    store.remove_policy("*")
    assert store.policies() == {}


def test_a_hold_that_comes_meanwhile_counts() -> None:
    backend = MemoryBackend()
    store, other = open_store(backend), open_store(backend)
    put(store, 1, 2, 3, 4)
    store.set_policy("runs/*", keep_last=1)
    append = store.engine.log.append

    def late(build: Any) -> Any:
        other.tag("late", "runs/gpt@1")
        return append(build)

    store.engine.log.append = late  # type: ignore[method-assign, assignment]
    assert store.apply_policies().going == 2
    assert steps(other) == [1, 3, 4]


def test_a_salvaged_log_has_them() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    put(store, 1, 2, 3, metrics={"loss": 3.0})
    store.set_policy("runs/*", keep_last=3, keep_best=(1, "loss", "min"))
    put(store, 4, 5, metrics={"loss": 1.0})
    backend.delete([sorted(info.name for info in backend.list("log/"))[1]])
    assert salvage(backend).log
    found = open_store(backend)
    assert found.policies() == store.policies() != {}
    found.checkout("runs/gpt")
    put(found, 6, metrics={"loss": 2.0})
    assert steps(found) == [4, 5, 6]
