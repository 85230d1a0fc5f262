"""Usage against sums over plain sets, on stores of any shape."""

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.gc.roots import UNDO
from tensorstore_ck.gc.usage import JobUsage, RefUsage, SnapshotUsage, Usage, measure_usage
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.gc.made import Counting, Made, Place, make_part, open_engine, pack_ulid, publish, stored_bytes

REFS = ["jobs/a/x", "jobs/a/y", "jobs/b/x", "jobs/b", "alone"]
PACKS = 4
PACK_BYTES = 40_000

places = st.lists(st.tuples(st.integers(0, PACKS - 1), st.integers(0, 12) | st.integers(0, 400)), min_size=1, max_size=12)
snapshots = st.tuples(st.sampled_from(REFS), st.lists(places, min_size=1, max_size=3), st.integers(0, 40), st.booleans())
actions = st.tuples(st.sampled_from(["tag", "pin", "branch", "forget", "forget branch"]), st.integers(0, 100), st.integers(0, 3))


@dataclass
class Model:
    """What holds each snapshot, and what each refers to: (object or location) -> (stored, raw)."""

    labels: dict[int, list[str]] = field(default_factory=dict)
    items: dict[int, dict[object, tuple[int, int]]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    shape: tuple[list[list[Place]], int] = ([], 0)
    """Of the newest snapshot."""

    def publish(self, store: Store, ref: str, parts: list[list[Place]], inline: int, again: bool) -> None:
        """Saves a snapshot; with `again`, one of the very parts of the snapshot before."""
        step = len(self.made)
        ulids = self.made[step - 1].parts if again and step else None
        parts, inline = self.shape = self.shape if ulids else (parts, inline)
        built = [
            make_part(places, rank=rank, ranks=len(parts), bases=len(places) // 3, inline=bytes(inline))
            for rank, places in enumerate(parts)
        ]
        made = self.made[step] = publish(store.engine, ref, step, built, ulids)
        items: dict[object, tuple[int, int]] = {made.info.ulid: (made.object_bytes[0], 0)}
        items |= {part: (size, inline) for part, size in zip(made.parts, made.object_bytes[1:], strict=True)}
        items |= {place: (stored_bytes(place), 2 * stored_bytes(place)) for places in parts for place in places}
        self.items[step] = items
        self.labels[step] = []

    def holders(self, store: Store) -> None:
        """Looks up who holds what, by the store's own commands."""
        by_root = {made.info.root.hex(): step for step, made in self.made.items()}
        for step in self.labels:
            self.labels[step] = []
        for branch in store.branches():
            for snapshot in store.log(branch):
                self.labels[by_root[snapshot.root]].append(branch)
        for tag, snapshot in store.tags().items():
            self.labels[by_root[snapshot.root]].append(tag)
        for pinned in store.pins():
            self.labels[by_root[pinned.snapshot.root]].append(f"pin:{pinned.owner}")
        for forgotten in store.forgotten():
            for snapshot in forgotten.snapshots:
                self.labels[by_root[snapshot.root]].append(UNDO)

    def steps(self, labels: set[str]) -> set[int]:
        return {step for step, held in self.labels.items() if labels & set(held)}

    def union(self, steps: set[int]) -> dict[object, tuple[int, int]]:
        return {key: value for step in steps for key, value in self.items[step].items()}


def stored(items: dict[object, tuple[int, int]], without: dict[object, tuple[int, int]] | None = None) -> int:
    return sum(size for key, (size, _) in items.items() if key not in (without or {}))


def common(one: dict[object, tuple[int, int]], two: dict[object, tuple[int, int]]) -> int:
    return sum(size for key, (size, _) in one.items() if key in two)


def apply(store: Store, model: Model, action: tuple[str, int, int]) -> None:
    what, number, other = action
    branches = sorted(store.branches())
    branch = branches[number % len(branches)]
    snapshot = store.log(branch)[other % len(store.log(branch))]
    if what == "tag" and f"tags/{number}" not in store.tags():
        store.tag(f"tags/{number}", snapshot.root)
    elif what == "pin":
        store.pin(snapshot.root, owner=f"user{other}")
    elif what == "branch" and f"forks/{number}" not in store.branches():
        store.branch(f"forks/{number}", snapshot.root)
    elif what == "forget" and snapshot.root != store.log(branch)[0].root:
        store.forget(f"{branch}@{snapshot.step}")
    elif what == "forget branch" and len(branches) > 1:
        store.forget(branch)


@settings(max_examples=effort(40, 500))
@given(st.lists(snapshots, min_size=1, max_size=7), st.lists(actions, max_size=6))
def test_every_figure(made: list[tuple[str, list[list[Place]], int, bool]], actions: list[tuple[str, int, int]]) -> None:
    backend = Counting()
    store, model = Store(open_engine(backend)), Model()
    for pack in range(PACKS):
        backend.put(pack_name(pack_ulid(pack)), bytes(PACK_BYTES))
    for snapshot in made:
        model.publish(store, *snapshot)
    for action in actions:
        apply(store, model, action)
    model.holders(store)
    compare(measure_usage(store.engine, per_snapshot=True), model)


def compare(usage: Usage, model: Model) -> None:
    every_label = {label for labels in model.labels.values() for label in labels}
    refs = {label for label in every_label if label != UNDO and not label.startswith("pin:")}
    pins = every_label - refs - {UNDO}

    groups: list[tuple[str, RefUsage | JobUsage, set[str]]] = [
        *((ref.ref, ref, {ref.ref}) for ref in usage.refs),
        *((job.job, job, {ref for ref in refs if (ref.rsplit("/", 1)[0] if "/" in ref else ref) == job.job}) for job in usage.jobs),
    ]
    for name, found, labels in groups:
        steps = model.steps(labels)
        items = model.union(steps)
        assert (found.snapshots, found.logical_bytes) == (len(steps), sum(1000 + step for step in steps)), name
        assert found.stored_bytes == stored(items), name
        assert found.unique_bytes == sum(raw for _, raw in items.values()), name
        assert found.shared_bytes == common(items, model.union(model.steps(refs - labels))), name
        assert found.exclusive_bytes == stored(items, model.union(model.steps((refs | pins) - labels))), name
    assert {ref.ref for ref in usage.refs} == refs
    assert sum(job.refs for job in usage.jobs) == len(refs)

    live = model.union(model.steps(every_label))
    by_refs, by_pins = model.union(model.steps(refs)), model.union(model.steps(pins))
    assert (usage.snapshots, usage.stored_bytes) == (len(model.steps(every_label)), stored(live))
    assert usage.pinned_bytes == stored(by_pins, by_refs)
    assert usage.undo_bytes == stored(live, by_refs | by_pins)
    holders: dict[object, set[str]] = defaultdict(set)
    for step, held in model.labels.items():
        for key in model.items[step]:
            holders[key] |= set(held) & refs
    assert usage.shared_bytes == sum(size for key, (size, _) in live.items() if len(holders[key]) > 1)

    assert {pack.name for pack in usage.packs} == {pack_name(pack_ulid(pack)) for pack in range(PACKS)}
    for number in range(PACKS):
        pack = next(pack for pack in usage.packs if pack.name == pack_name(pack_ulid(number)))
        in_pack = [size for key, (size, _) in live.items() if isinstance(key, tuple) and key[0] == number]
        ratio = (sum(in_pack) + 64 * len(in_pack)) / (PACK_BYTES - 128)
        assert (pack.bytes, pack.live_bytes, pack.live_ratio) == (PACK_BYTES, sum(in_pack), ratio)
    compare_snapshots({row.id: row for row in usage.by_snapshot or ()}, model, model.steps(refs | pins))


def compare_snapshots(rows: dict[str, SnapshotUsage], model: Model, steps: set[int]) -> None:
    assert rows.keys() == {ulid_text(model.made[step].info.ulid) for step in steps}
    for step in steps:
        row, items = rows[ulid_text(model.made[step].info.ulid)], model.items[step]
        assert (row.step, row.root, row.ref) == (step, model.made[step].info.root.hex(), model.made[step].info.ref)
        assert sorted(row.held_by) == sorted(set(model.labels[step]))
        assert row.logical_bytes == 1000 + step
        assert row.stored_bytes == stored(items)
        assert row.exclusive_bytes == stored(items, model.union(steps - {step}))
        assert row.shared_bytes == row.stored_bytes - row.exclusive_bytes


def test_hundreds_of_refs_that_share() -> None:
    """More sets of refs than a byte can number."""
    engine = open_engine(Counting())
    engine.backend.put(pack_name(pack_ulid(0)), bytes(PACK_BYTES))
    for number in range(1, 301):
        publish(engine, f"runs/{number}", number, [make_part([(0, 0), (0, number)])])
    usage = measure_usage(engine)
    assert {ref.shared_bytes for ref in usage.refs} == {stored_bytes((0, 0))}
    assert usage.unique_bytes == sum(2 * stored_bytes((0, entry)) for entry in range(301))


def test_snapshots_are_left_out_unless_asked_for() -> None:
    store = Store(open_engine(Counting()))
    assert measure_usage(store.engine).by_snapshot is None
    assert measure_usage(store.engine, per_snapshot=True).by_snapshot == ()
