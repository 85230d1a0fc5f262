"""Statistics of stored tensors, and of their changes between two snapshots. Reads piece by piece.

All numbers are computed in float64, to which elements are converted one by one: integers beyond 2**53 are rounded. Sums are made in one
fixed order, so that the same tensor has the same statistics on every machine of one kind. An element is *finite* if it is neither NaN
nor infinite; a complex number is NaN if one of its two parts is, and infinite if one is and none is NaN.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.tree import parse
from tensorstore_ck.state.allocate import TensorOrArray
from tensorstore_ck.state.read_pieces import (
    Numbers,
    Piece,
    StoredTensor,
    cut,
    has_numbers,
    piece_batches,
    read_pieces,
    same_bits,
    steps,
    stored_tensors,
)
from tensorstore_ck.state.select import Selection

MAX_BINS = 1 << 16
TensorForm = tuple[str, tuple[int, ...]]
"""(dtype, shape)."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many finite elements lie in each of several bins of one width, between the minimum and the maximum."""

    edges: tuple[float, ...]
    """One more than there are bins. A bin has its lower edge, the last one also its upper. If all elements are equal, the bins span 0.5
    to either side."""
    counts: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Histogram({len(self.counts)} bins from {self.edges[0]:.6g} to {self.edges[-1]:.6g})"


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The elements of one tensor. `nan` to `norm` are None for dtypes whose elements are no numbers: text, times, bits, int4, float4.

    float8 and all integers are numbers as they are stored: the scales of a quantized tensor are a tensor of their own. bool counts as 0
    and 1. Complex numbers have counts and the norm, but no `min`, `max`, `mean` and `std`.
    """

    name: str
    dtype: str
    """As `tsck show` prints it: ``bfloat16``; with ``np:`` for numpy arrays."""
    shape: tuple[int, ...]
    count: int
    """Of all elements."""
    nan: int | None = None
    inf: int | None = None
    zeros: int | None = None
    """Elements that are equal to 0, as -0.0 is."""
    min: float | None = None
    """Over the finite elements, like all fields below; None without any."""
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    """The root of the mean square distance from the mean: divided by the number of elements, not by one less."""
    norm: float | None = None
    """The root of the sum of squares; infinite if that is beyond float64."""
    histogram: Histogram | None = None
    """Only if bins were requested, the elements are real numbers, and at least one is finite."""


@dataclass(frozen=True, slots=True)
class ChangeStatistics:
    """One tensor whose bytes, dtype or shape differ between two snapshots, or which only one of them has."""

    name: str
    kind: Literal["changed", "reshaped", "added", "removed"]
    """``changed``: the shape is the same. The numbers below are None for all other kinds, and if the elements are no numbers."""
    old: TensorForm | None
    """(dtype, shape) in the old snapshot."""
    new: TensorForm | None
    max_change: float | None = None
    """The largest absolute value of new - old. Infinite if an element is NaN or infinite in one snapshot, and not the same in the other;
    elements that are the same NaN or infinity in both do not count."""
    relative_change: float | None = None
    """The norm of new - old, divided by the norm of the old tensor's finite elements; infinite if only the latter is 0, or if
    `max_change` is infinite; 0 if both are 0."""
    nan: int | None = None
    """How many elements of the new tensor are NaN."""
    inf: int | None = None


def tensor_statistics(content: SnapshotContent, select: Sequence[str] | None = None, bins: int = 0) -> list[TensorStatistics]:
    """The statistics of the tensors of a snapshot; see `Store.statistics`."""
    if type(bins) is not int or not 0 <= bins <= MAX_BINS:
        raise InvalidOptionError(f"bins must be a number from 0 to {MAX_BINS:,}, not {bins!r}", object_id="bins")
    return statistics_of(_selected(stored_tensors(content), select, content), bins)


def statistics_of(tensors: Mapping[str, StoredTensor], bins: int) -> list[TensorStatistics]:
    """The statistics of these tensors of one snapshot, by name."""
    sums = {name: _Sums() for name, tensor in tensors.items() if has_numbers(tensor.form.dtype)}
    for name, flat in _read(tensors, sums):
        for (numbers,) in steps(flat):
            sums[name].add(numbers)
    counts = {name: np.zeros(bins, np.int64) for name, tensor_sums in sums.items() if bins and tensor_sums.has_range}
    for name, flat in _read(tensors, counts):
        for (numbers,) in steps(flat):
            counts[name] += np.histogram(numbers[np.isfinite(numbers)], bins, (sums[name].low, sums[name].high))[0]
    return [_statistics(name, tensor, sums.get(name), counts.get(name)) for name, tensor in tensors.items()]


def first_not_finite(content: SnapshotContent, select: Sequence[str] | None = None) -> str | None:
    """The first tensor of a snapshot with an element that is not finite; see `Store.find_nan`."""
    tensors = _selected(stored_tensors(content), select, content)
    for name, flat in _read(tensors, (name for name, tensor in tensors.items() if has_numbers(tensor.form.dtype))):
        if not all(bool(np.isfinite(numbers).all()) for (numbers,) in steps(flat)):
            return name
    return None


def _read(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterable[tuple[str, TensorOrArray]]:
    """The elements of the tensors with these names, one piece after another."""
    pieces = ((Piece(tensors[name], *bounds),) for name in names for bounds in cut(tensors[name]))
    for batch in piece_batches(pieces):
        batch_pieces = [piece for (piece,) in batch]
        for piece, flat in zip(batch_pieces, read_pieces(batch_pieces), strict=True):
            yield piece.tensor.leaf.path, flat


def _statistics(name: str, tensor: StoredTensor, sums: "_Sums | None", counts: Any) -> TensorStatistics:
    form = (name, tensor.dtype_name, tensor.form.shape, tensor.count)
    if sums is None:
        return TensorStatistics(*form)
    histogram = None
    if counts is not None:
        edges = np.histogram_bin_edges(np.empty(0), len(counts), (sums.low, sums.high))
        histogram = Histogram(tuple(edges.tolist()), tuple(counts.tolist()))
    finite = sums.finite
    if tensor.form.dtype.kind == "c" if isinstance(tensor.form.dtype, np.dtype) else tensor.form.dtype.is_complex:
        return TensorStatistics(*form, sums.nan, sums.inf, sums.zeros, norm=math.sqrt(sums.squares) if finite else None)
    if not finite:
        return TensorStatistics(*form, sums.nan, sums.inf, sums.zeros)
    norm = math.sqrt(sums.squares + finite * sums.mean * sums.mean)
    std = math.sqrt(sums.squares / finite)
    return TensorStatistics(*form, sums.nan, sums.inf, sums.zeros, sums.low, sums.high, sums.mean, std, norm, histogram)


class _Sums:
    """Sums over the elements so far."""

    def __init__(self) -> None:
        self.nan = self.inf = self.zeros = self.finite = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = 0.0
        self.squares = 0.0
        """Computed from the distances to the mean, so that nothing cancels out; of complex numbers, from 0."""

    @property
    def has_range(self) -> bool:
        """Whether there are real finite elements, whose distance is a float64."""
        return self.low <= self.high and math.isfinite(self.high - self.low)

    def add(self, numbers: Numbers) -> None:
        """Some more elements; the order counts for the last bits."""
        self.zeros += len(numbers) - int(np.count_nonzero(numbers))
        with np.errstate(over="ignore", invalid="ignore"):
            total = numbers.sum()
            if not np.isfinite(total):  # most likely an element is not; else the sum went beyond float64
                nan, is_finite = int(np.count_nonzero(np.isnan(numbers))), np.isfinite(numbers)
                self.nan += nan
                self.inf += len(numbers) - nan - int(np.count_nonzero(is_finite))
                numbers = numbers[is_finite]
                total = numbers.sum()
            if not len(numbers):
                return
            before, self.finite = self.finite, self.finite + len(numbers)
            if np.iscomplexobj(numbers):
                self.squares += float(np.vdot(numbers, numbers).real)
                return
            self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
            mean = float(total) / len(numbers) if np.isfinite(total) else float((numbers / len(numbers)).sum())
            distances = numbers - mean
            step, share = mean - self.mean, len(numbers) / self.finite
            self.squares += float(distances @ distances) + (step * step * before * share if before else 0.0)
            self.mean += step * share


def change_statistics(
    old: SnapshotContent, new: SnapshotContent, changed: Iterable[str], select: Sequence[str] | None = None
) -> list[ChangeStatistics]:
    """The changes of tensors; see `Store.change_statistics`. Reads only tensors whose stored tensor is in `changed`."""
    before, after = (_selected(stored_tensors(content), select, old, new) for content in (old, new))
    return changes_of(before, after, changed)


def changes_of(before: Mapping[str, StoredTensor], after: Mapping[str, StoredTensor], changed: Iterable[str]) -> list[ChangeStatistics]:
    """As `change_statistics`, of these tensors of the old and of the new snapshot, by name."""
    known = set(changed)
    uncompared, compared = list[ChangeStatistics](), dict[str, tuple[StoredTensor, StoredTensor]]()
    for name in [*after, *(name for name in before if name not in after)]:
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            uncompared.append(ChangeStatistics(name, "removed" if two is None else "added", _form(one), _form(two)))
        elif one.form.shape != two.form.shape:
            uncompared.append(ChangeStatistics(name, "reshaped", _form(one), _form(two)))
        elif one.form != two.form or one.base_name != two.base_name or one.base_name in known:
            if has_numbers(one.form.dtype) and has_numbers(two.form.dtype):
                compared[name] = one, two
            else:
                uncompared.append(ChangeStatistics(name, "changed", _form(one), _form(two)))
    sums = {name: _ChangeSums() for name in compared}
    for batch in piece_batches((Piece(one, *bounds), Piece(two, *bounds)) for one, two in compared.values() for bounds in cut(one, two)):
        flat = (read_pieces(pieces) for pieces in zip(*batch, strict=True))
        for (piece, _), one_flat, two_flat in zip(batch, *flat, strict=True):
            found_sums = sums[piece.tensor.leaf.path]
            found_sums.differs = found_sums.differs or not same_bits(one_flat, two_flat)
            for earlier, later in steps(one_flat, two_flat):
                found_sums.add(earlier, later)
    done = [
        ChangeStatistics(
            name=name,
            kind="changed",
            old=_form(one),
            new=_form(two),
            max_change=sums[name].high,
            relative_change=sums[name].relative,
            nan=sums[name].nan,
            inf=sums[name].inf,
        )
        for name, (one, two) in compared.items()
        if sums[name].differs
    ]
    kinds = ("changed", "reshaped", "added", "removed")
    done.sort(key=lambda change: -(change.relative_change or 0.0))
    return done + sorted(uncompared, key=lambda change: kinds.index(change.kind))


def _form(tensor: StoredTensor | None) -> TensorForm | None:
    return None if tensor is None else (tensor.dtype_name, tensor.form.shape)


class _ChangeSums:
    """Sums over the changes so far."""

    def __init__(self) -> None:
        self.nan = self.inf = 0
        self.high = self._changed = self._old = 0.0
        self.differs = False
        """Whether any bit differs: a tensor that shares memory with a changed one may be unchanged."""

    @property
    def relative(self) -> float:
        if math.isinf(self.high):
            return math.inf
        changed, old = math.sqrt(self._changed), math.sqrt(self._old)
        return changed / old if old else (math.inf if changed else 0.0)

    def add(self, old: Numbers, new: Numbers) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            change = new - old
            if not np.isfinite(change.sum()):
                nan = int(np.count_nonzero(np.isnan(new)))
                self.nan += nan
                self.inf += int(np.count_nonzero(~np.isfinite(new))) - nan
                same = (old == new) | (np.isnan(old) & np.isnan(new))
                change[same] = 0
                change[np.isnan(change)] = np.inf
                old = old[np.isfinite(old)]
            self.high = max(self.high, float(np.abs(change).max()))
            self._changed += float(np.vdot(change, change).real)
            self._old += float(np.vdot(old, old).real)


def _selected(tensors: dict[str, StoredTensor], select: Sequence[str] | None, *contents: SnapshotContent) -> dict[str, StoredTensor]:
    """The selected tensors. Raises `MismatchError` if a glob fits nothing in any of the snapshots."""
    if select is None:
        return tensors
    selection = Selection(select)
    trees = [parse(content.layout, len(content.values)) for content in contents]
    for glob in [select] if isinstance(select, str) else select:
        for tree in trees:
            try:
                Selection([glob]).require_used(tree)
                break
            except MismatchError:
                if tree is trees[-1]:
                    raise
    return {name: tensor for name, tensor in tensors.items() if selection.fits(name)}
