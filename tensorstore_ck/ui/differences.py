"""The differences between two snapshots, by their tables; and by how much tensors changed, which reads them. Both in the background."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.maintenance.describe import SnapshotDiff, TensorChange
from tensorstore_ck.store.internals import diff_snapshots, open_content
from tensorstore_ck.ui.background import Progress, Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.snapshot_content import info_of
from tensorstore_ck.ui.sources import StoreKey
from tensorstore_ck.ui.tensor_statistics import STEP_BYTES, TensorNumbers, size_of

if TYPE_CHECKING:
    from tensorstore_ck.state.statistics import ChangeStatistics

KINDS: Final = ("changed", "reshaped", "added", "removed")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two snapshots of a store."""

    old: CatalogSnapshot
    new: CatalogSnapshot

    @property
    def kind(self) -> str:
        """Identifies the pair in the kind of a background read."""
        return f"{self.old.ulid} {self.new.ulid}"


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Tensors that differ and whose names share the part before the first dot."""

    name: str
    counts: dict[str, int]
    """Change -> number of tensors."""
    changed_bytes: int


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences by the tables."""

    diff: SnapshotDiff
    groups: tuple[GroupChange, ...]
    """By bytes that differ, most first."""

    def tensors(self, text: str) -> list[TensorChange]:
        """The tensors whose names contain `text`, those with the most differing bytes first."""
        tensors = [tensor for tensor in self.diff.tensors if text.lower() in tensor.name.lower()]
        return sorted(tensors, key=lambda tensor: -tensor.changed_bytes)


@dataclass(frozen=True, slots=True)
class Changes(TensorNumbers):
    """By how much tensors changed: those with NaN or infinity first, then by relative change."""


def read_differences(pages: Pages, store: StoreKey, pair: Pair, patience_seconds: float) -> Read:
    """The read of `Differences`; it begins now unless it was made before."""

    def work(progress: Progress) -> Differences:
        progress("comparing the tables", 0, 0)
        return _differences(_diff(pages, store, pair))

    return pages.sources.looks.read_once(store.uuid, f"differences {pair.kind}", work, patience_seconds)


def _diff(pages: Pages, store: StoreKey, pair: Pair) -> SnapshotDiff:
    return diff_snapshots(pages.sources.open(store), info_of(pages, store, pair.old), info_of(pages, store, pair.new))


def _differences(diff: SnapshotDiff) -> Differences:
    counts: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    for tensor in diff.tensors:
        group = tensor.name.split(".", 1)[0]
        counts.setdefault(group, Counter())[tensor.change] += 1
        sizes[group] += tensor.changed_bytes
    groups = [GroupChange(name, dict(by_kind), sizes[name]) for name, by_kind in counts.items()]
    return Differences(diff, tuple(sorted(groups, key=lambda group: -group.changed_bytes)))


def read_changes(pages: Pages, store: StoreKey, pair: Pair, group: str, patience_seconds: float) -> Read:
    """The read of the `Changes` of all tensors, or of those in a group; it begins now unless it was made before."""
    looks = pages.sources.looks

    def is_wanted(name: str) -> bool:
        return not group or name == group or name.startswith(f"{group}.")

    def work(progress: Progress) -> Changes:
        from tensorstore_ck.state.read_pieces import stored_tensors  # noqa: PLC0415 - loads torch
        from tensorstore_ck.state.statistics import changes_of  # noqa: PLC0415

        with looks.alone(progress):
            progress("comparing the tables", 0, 0)
            known = looks.read(store.uuid, f"differences {pair.kind}").result
            diff = known.diff if isinstance(known, Differences) else _diff(pages, store, pair)
            changed = {item.name for item in diff.tensors}
            opened = pages.sources.open(store)
            before, after = (stored_tensors(open_content(opened, info_of(pages, store, side))) for side in (pair.old, pair.new))
            names = [name for name in dict.fromkeys([*after, *before]) if is_wanted(name)]
            if not names:
                raise NotFoundError(f"neither has a tensor in {group!r}; states of single ranks have no statistics", object_id=group)

            def read_bytes(name: str) -> int:
                both = before.get(name), after.get(name)
                return sum(size_of(item) for item in both if item is not None) if None not in both and name in changed else 0

            total = sum(map(read_bytes, names))
            changes: list[ChangeStatistics] = []
            done = 0
            for batch in batches(names, read_bytes, STEP_BYTES):
                progress(f"reading tensors: {human_bytes(done)} of {human_bytes(total)}", done, total)
                old, new = ({name: side[name] for name in batch if name in side} for side in (before, after))
                changes += changes_of(old, new, changed)
                done += sum(map(read_bytes, batch))
        changes.sort(key=lambda change: (not (change.nan or change.inf), KINDS.index(change.kind), -(change.relative_change or 0.0)))
        return Changes(tuple(changes))

    return looks.read_once(store.uuid, f"changes {pair.kind} {group}", work, patience_seconds)
