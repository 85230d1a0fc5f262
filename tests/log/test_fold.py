"""The fold and the views of its table, against a model made of dicts and lists."""

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.log import Entry, Op, RefTable
from tensorstore_ck.log.field_checks import MAX_METRICS
from tests.effort import effort
from tests.log.scripted import entries_of, folded, new_id, open_log, put_op

REFS = ["main", "runs/a", "run"]
NUMBERS = range(2)
TXNS = [bytes([number]) * 16 for number in range(4)]
ARRIVED_NS = 1000
STEPS = [None, 0, -1, 1 << 40]


def root_of(number: int, step: int | None) -> Digest:
    return Digest(put_op("main", number, step=step).fields["root"])


ROOTS = [root_of(number, step) for number in NUMBERS for step in STEPS] + [Digest(bytes(32))]


@dataclass
class Model:
    """What an obvious implementation would hold."""

    n: int = 0
    branches: dict[str, list[tuple[bytes, int | None]]] = field(default_factory=dict)
    """Name -> (ulid, step) of each move."""
    tags: dict[str, bytes] = field(default_factory=dict)
    snapshots: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    notes: dict[bytes, tuple[dict[str, float], str, str]] = field(default_factory=dict)
    outcomes: dict[bytes, tuple[bool, int]] = field(default_factory=dict)
    quotas: dict[str, tuple[int | None, int | None, int]] = field(default_factory=dict)
    reports: dict[str, tuple[str, int]] = field(default_factory=dict)
    stop: tuple[int, str] | None = None

    def newest(self, root: bytes) -> bytes | None:
        found = sorted(ulid for ulid, put in self.snapshots.items() if put["root"] == root)
        return max(found, key=lambda ulid: self.snapshots[ulid]["n"], default=None)

    def apply(self, entry: Entry) -> None:
        self.n = entry.n
        for op in entry.ops:
            self.apply_op(entry, op.name, op.fields)
            if op.name == "from-the-future" and self.stop is None:
                self.stop = (entry.n, op.name)

    def apply_op(self, entry: Entry, name: str, op: Any) -> None:
        ulid = self.newest(op["root"]) if "root" in op else None
        step = self.snapshots[ulid]["step"] if ulid is not None else None
        match name:
            case "put" if op["txn"] not in self.outcomes:
                self.outcomes[op["txn"]] = (True, entry.n)
                self.snapshots.pop(op["snapshot"], None)
                self.snapshots[op["snapshot"]] = {**op, "n": entry.n}
                self.branches.setdefault(op["ref"], []).append((op["snapshot"], op["step"]))
            case "abort":
                self.outcomes.setdefault(op["txn"], (False, entry.n))
            case "branch" if ulid and op["name"] not in self.branches:
                self.branches[op["name"]] = [(ulid, step)]
            case "reset" if ulid and op["name"] in self.branches:
                self.branches[op["name"]].append((ulid, step))
            case "tag" if ulid:
                self.tags.setdefault(op["name"], op["root"])
            case "untag":
                self.tags.pop(op["name"], None)
            case "annotate" if ulid:
                metrics, mark, reason = self.notes.get(op["root"], ({}, "", ""))
                self.notes[op["root"]] = ({**metrics, **op["metrics"]}, mark, reason)
            case "quota":
                self.quotas.pop(op["glob"], None)
                if (op["warn_bytes"], op["refuse_bytes"]) != (None, None):
                    self.quotas[op["glob"]] = (op["warn_bytes"], op["refuse_bytes"], entry.n)
            case "report":
                self.reports[op["run"]] = (op["outcome"], entry.n)
            case "mark" if ulid:
                metrics, _, _ = self.notes.get(op["root"], ({}, "", ""))
                self.notes[op["root"]] = (metrics, op["mark"], op["reason"])


def compare(view: RefTable, model: Model) -> None:
    head = view.head()
    assert (head.n if head else 0) == model.n
    assert view.branches() == sorted(model.branches)
    assert view.tags() == sorted(model.tags)
    for ref in [*REFS, "ru", "not a name", "x" * 600, "\ud800"]:
        moves = model.branches.get(ref, [])
        branch = view.branch(ref)
        assert (branch is None) == (not moves)
        if branch is not None:
            assert (branch.ulid, branch.step, branch.length) == (*moves[-1], len(moves))
            assert branch.root == model.snapshots[branch.ulid]["root"]
        assert [info.ulid for info in view.history(ref)] == [ulid for ulid, _ in reversed(moves)]
        assert [move.ulid for move in view.moves(ref, newest_first=False, limit=2)] == [ulid for ulid, _ in moves[:2]]
        for step in [-2, -1, 0, 1, 2, 1 << 40, 1 << 70]:
            assert view.newest_with_step(ref, step) == next((ulid for ulid, other in reversed(moves) if other == step), None)
        assert view.tag(ref) == model.tags.get(ref)
    for root in ROOTS:
        info = view.by_root(root)
        assert (info.ulid if info else None) == model.newest(root)
    for info in view.snapshots():
        put = model.snapshots[info.ulid]
        metrics, mark, reason = model.notes.get(info.root, ({}, "", ""))
        assert info.metrics == {**put["metrics"], **metrics}
        assert (info.mark, info.reason, info.n, info.ref, info.step, info.root) == (
            mark,
            reason,
            put["n"],
            put["ref"],
            put["step"],
            put["root"],
        )
        assert (info.parent, info.record, info.logical_bytes, info.new_bytes) == (
            put["parent"],
            put["record"],
            put["logical_bytes"],
            put["new_bytes"],
        )
    assert {info.ulid for info in view.snapshots()} == set(model.snapshots)
    for txn in [*TXNS, b"short"]:
        outcome = view.outcome(txn)
        assert (tuple(outcome) if outcome else None) == model.outcomes.get(txn)
    added: dict[str, int] = {}
    for info in view.snapshots():
        added[info.ref] = added.get(info.ref, 0) + info.new_bytes
    assert {ref: view.added_bytes_of(ref) for ref in REFS} == {ref: added.get(ref, 0) for ref in REFS}
    assert view.added_bytes_of("run*") == sum(size for ref, size in added.items() if ref.startswith("run"))
    assert view.added_bytes_of("*") == sum(added.values())
    assert {glob: (row.warn_bytes, row.refuse_bytes, row.n) for glob, row in view.quotas().items()} == model.quotas
    for glob, row in view.quotas().items():
        assert row.used_bytes == sum(size for ref, size in added.items() if fnmatchcase(ref, glob))
    assert {run: (row.outcome, row.n) for run, row in view.reports().items()} == model.reports
    stop = view.stop()
    assert (tuple(stop) if stop else None) == model.stop


def roots_by_prefix(view: RefTable, model: Model) -> None:
    known = sorted({put["root"] for put in model.snapshots.values()})
    for root in ROOTS:
        for digits in (0, 1, 2, 7, 8, 9, 63, 64):
            prefix = root.hex()[:digits]
            assert view.roots_with_prefix(prefix, limit=100) == [other for other in known if other.hex().startswith(prefix)]
    assert view.roots_with_prefix("", limit=2) == known[:2]
    assert view.roots_with_prefix("xyz") == view.roots_with_prefix("F" * 8) == view.roots_with_prefix("0" * 65) == []


refs = st.sampled_from(REFS)
roots = st.sampled_from(ROOTS)
metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(allow_nan=False), max_size=2)
puts = st.builds(
    lambda ref, number, step, txn, values: put_op(ref, number, step=step, txn=txn, **values),
    refs,
    st.sampled_from(NUMBERS),
    st.sampled_from(STEPS),
    st.sampled_from(TXNS) | st.builds(new_id),
    metrics,
)
ops = st.one_of(
    puts,
    puts,
    st.builds(Op.branch, refs, roots),
    st.builds(Op.reset, refs, roots),
    st.builds(Op.tag, refs, roots),
    st.builds(lambda name: Op({"op": "untag", "critical": True, "name": name}), refs),
    st.builds(Op.annotate, roots, metrics),
    st.builds(Op.mark, roots, st.sampled_from(["bad", ""]), st.sampled_from(["", "diverged"])),
    st.builds(Op.abort, st.sampled_from(TXNS)),
    st.builds(Op.quota, st.sampled_from(["*", "run?"]), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    st.builds(Op.report, st.sampled_from(["gc", "fsck"]), st.sampled_from(["ok", "findings"]), st.just(7), st.just({"errors": 1})),
    st.sampled_from([Op({"op": "from-the-future", "critical": True}), Op({"op": "from-the-future-too", "critical": False})]),
)
logs = st.lists(st.lists(ops, max_size=3), max_size=12)


@settings(max_examples=effort(100, 1000))
@given(logs)
def test_the_table_is_what_the_model_says(log: list[list[Op]]) -> None:
    entries, model = entries_of(log), Model()
    table = folded(entries)
    for entry in entries:
        model.apply(entry)
    compare(RefTable(table), model)
    roots_by_prefix(RefTable(table), model)


def test_annotations_stop_at_the_limit_of_a_row() -> None:
    put = put_op("main", 1)
    annotate = [Op.annotate(put.fields["root"], {f"{batch}.{number}": 1.0 for number in range(MAX_METRICS)}) for batch in range(2)]
    info = RefTable(folded(entries_of([[put], *([op] for op in annotate)]))).by_root(put.fields["root"])
    assert info is not None
    assert set(info.metrics) == {f"0.{number}" for number in range(MAX_METRICS)}


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ({"made_ns": 5, "triggers": ["at_steps", "mine"], "epoch": 2.5}, (5, ["at_steps", "mine"], 2.5)),
        *(({"made_ns": wrong}, (ARRIVED_NS, [], None)) for wrong in (None, ARRIVED_NS + 1, -1, True, 5.0, "5", (1 << 64) - 1)),
        *(({"triggers": wrong}, (1, [], None)) for wrong in (None, "at_steps", [1], [""], ["a\nb"], ["x" * 65], ["x"] * 17, {"x": 1})),
        *(({"epoch": wrong}, (1, [], None)) for wrong in (None, 2, True, -0.5, math.nan, math.inf, "2.5")),
    ],
)
def test_an_entry_is_believed_an_origin_of_its_snapshot_that_can_be_true(said: dict[str, Any], believed: tuple[Any, ...]) -> None:
    """Made later than it arrived, a snapshot would never be old; other builds and programs write entries, too."""
    put = put_op("main", 1)
    log = open_log(MemoryBackend(), clock=lambda: ARRIVED_NS)
    log.append(lambda _view: [Op({**put.fields, **said})])
    info = log.view().snapshot(put.fields["snapshot"])
    assert info is not None
    assert (info.time_ns, info.triggers, info.epoch) == believed
    assert info.arrived_ns == ARRIVED_NS
