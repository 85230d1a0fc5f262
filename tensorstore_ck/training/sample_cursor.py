"""The order in which a job reads a map-style dataset, and the position in it, equal on all ranks.

The position counts the samples of this epoch that all ranks together have consumed, so any number of ranks can resume from it, and each
sample comes exactly once in an epoch. Only `SampleCursor.advance` moves it: a loader that reads ahead does not. The order of an epoch
follows from (dataset size, seed, epoch) alone, by a fixed rule that uses no library's generator and needs no memory for the dataset's size.

The generators of a loader's worker processes cannot be saved: workers draw ahead of training, and torch offers no access to them. So
`SampleCursor.loader` seeds the generators for each sample, from seed, epoch and sample, in the process that reads it.
"""

import math
import operator
import struct
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.training import random_generators
from tensorstore_ck.training.stateful_parts import StatefulPart

SHUFFLED: Final = "shuffle-v1"
"""Names the rule in `_shuffled`, which never changes: another order needs another name."""
IN_ORDER: Final = "in order"
ROUNDS: Final = 24
"""16 suffice for all permutations of 5 and 6 samples to be equally frequent."""

_Numbers = npt.NDArray[np.uint64]
_MIX: Final = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


@short_errors
class SampleCursor:
    """A job's position in its dataset. All ranks create the same one, advance it at each batch, and save it in the shared state.

    ::

        cursor = tsck.SampleCursor(len(dataset), batch_size=256, seed=1)
        loader = cursor.loader(dataset, rank, world_size, num_workers=4)
        while cursor.epoch < epochs:
            for batch in loader:  # what is left of this epoch
                train(batch)
                cursor.advance()  # consumed: a snapshot from here on does not read it again

    `batch_size` is that of all ranks together. It and the number of ranks may change when the job resumes. Not thread-safe.
    """

    def __init__(self, dataset_size: int, *, batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = True) -> None:
        """`drop_last`: skip the samples at the end of an epoch that do not fill a batch; else they form a smaller batch."""
        self._size = _whole("dataset_size", dataset_size, 1, 1 << 62)
        self._batch_size = _whole("batch_size", batch_size, 1, 1 << 62)
        self._seed = _whole("seed", seed, 0, (1 << 64) - 1)
        self._order = SHUFFLED if shuffle else IN_ORDER
        self._drop_last = drop_last
        if drop_last and batch_size > dataset_size:
            raise InvalidOptionError(
                f"{dataset_size} samples do not fill a batch of {batch_size}: pass drop_last=False, or a smaller batch_size",
                object_id="batch_size",
            )
        self._epoch = self._position = 0

    def __repr__(self) -> str:
        return f"SampleCursor(epoch {self._epoch}, {self._position} of {self._size} samples)"

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._epoch

    @property
    def dataset_size(self) -> int:
        """The number of samples of an epoch."""
        return self._size

    @property
    def seed(self) -> int:
        """The seed of the order of samples."""
        return self._seed

    @property
    def position(self) -> int:
        """The number of samples of this epoch that all ranks together have consumed."""
        return self._position

    @property
    def samples_seen(self) -> int:
        """The number of samples that all ranks together have consumed in all epochs, if `batch_size` was always the present one."""
        return self._epoch * (self._size - self._size % self._batch_size * self._drop_last) + self._position

    def advance(self) -> None:
        """Call it when all ranks have consumed a batch. After the last batch of an epoch the next epoch begins."""
        self._position += min(self._batch_size, self._size - self._position)
        self._end_epoch()

    def batches(self, rank: int = 0, world_size: int = 1) -> "RankBatches":
        """This rank's share of each remaining batch of the epoch."""
        world_size = _whole("world_size", world_size, 1, 1 << 32)
        if world_size > self._batch_size:
            raise InvalidOptionError(
                f"a batch of {self._batch_size} samples is not enough for {world_size} ranks: batch_size is that of all ranks together",
                object_id="batch_size",
            )
        return RankBatches(self, _whole("rank", rank, 0, world_size - 1), world_size)

    def loader(self, dataset: "Dataset[Any]", rank: int = 0, world_size: int = 1, **options: Any) -> "DataLoader[Any]":
        """A DataLoader over `batches` that draws the random numbers of each sample again when a resumed job reads it.

        Python's, NumPy's and torch's CPU generator are seeded before each sample, from the cursor's seed, the epoch and the sample's
        number; the process that trains gets its generators back. So random augmentation is the same in a resumed job, with any number of
        workers. A dataset that reads a whole batch at once (``__getitems__``) is seeded once for the batch: the same with as many ranks.

        Args:
            dataset: A map-style dataset.
            rank: See `batches`.
            world_size: See `batches`.
            options: Other options of DataLoader, such as `num_workers`.

        Raises:
            InvalidOptionError: the dataset has another number of samples than the cursor.
        """
        return seeded_loader(dataset, self.batches(rank, world_size), **options)

    def state_dict(self) -> dict[str, int | str]:
        """The position as plain values, equal on all ranks, so they belong in the shared state."""
        return {"epoch": self._epoch, "position": self._position, "dataset_size": self._size, "seed": self._seed, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. Restart loaders that are being iterated.

        Raises:
            MismatchError: dataset size, seed or rule differ, so the order of samples would differ.
        """
        for key, own in (("dataset_size", self._size), ("seed", self._seed), ("order", self._order)):
            if state.get(key) != own:
                raise MismatchError(
                    f"the cursor was saved with {key} {state.get(key)!r}, and this one has {own!r}, so its samples come in another order: "
                    "create it with the same value, or start over without loading it",
                    object_id=key,
                )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= self._size:
            raise MismatchError(
                f"epoch {epoch!r}, position {position!r} of {self._size} samples is not a state of a SampleCursor", object_id="position"
            )
        self._epoch, self._position = epoch, position
        self._end_epoch()  # with another batch size the rest may not fill a batch

    def _end_epoch(self) -> None:
        if self._batches_left() == 0:
            self._epoch, self._position = self._epoch + 1, 0

    def _batches_left(self) -> int:
        left = self._size - self._position
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)


class RankBatches:
    """One rank's batches, as a ``batch_sampler=``: each iteration covers the rest of the epoch at its start."""

    def __init__(self, cursor: SampleCursor, rank: int, world_size: int) -> None:
        self.cursor, self._rank, self._world_size = cursor, rank, world_size

    def __len__(self) -> int:
        """The number of remaining batches of the epoch."""
        return self.cursor._batches_left()

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample numbers. Raises `InvalidOptionError` if the last batch of the epoch would leave ranks without a sample."""
        cursor = self.cursor
        left = cursor._size - cursor._position
        last = left % cursor._batch_size
        if not cursor._drop_last and 0 < last < self._world_size:
            raise InvalidOptionError(
                f"the last batch of epoch {cursor._epoch} has {last} samples for {self._world_size} ranks: "
                "pass drop_last=True, or another batch_size",
                object_id="batch_size",
            )
        starts = range(cursor._position, cursor._position + len(self) * cursor._batch_size, cursor._batch_size)
        return map(self._share, starts, repeat(cursor._epoch))

    def _share(self, start: int, epoch: int) -> list[int]:
        """This rank's share of the batch at `start`: shares differ by at most one sample."""
        cursor = self.cursor
        count = min(cursor._batch_size, cursor._size - start)
        first, end = (start + count * rank // self._world_size for rank in (self._rank, self._rank + 1))
        positions = np.arange(first, end, dtype=np.uint64)
        numbers = _shuffled(positions, cursor._size, cursor._seed, epoch) if cursor._order == SHUFFLED else positions
        return [int(number) for number in numbers.tolist()]


def require_one_position(loaders: StatefulPart) -> None:
    """Rejects a StatefulDataLoader over a cursor's batches: after a restore, both would skip the samples that were consumed.

    Raises:
        InvalidOptionError: a loader is one.
    """
    for key, loader in loaders.objects.items():
        if isinstance(getattr(loader, "batch_sampler", None), RankBatches):
            path = loaders.path(key)
            raise InvalidOptionError(
                f"{path} has the batches of a SampleCursor, so both would skip the consumed samples: pass the cursor alone", object_id=path
            )


def _shuffled(positions: _Numbers, size: int, seed: int, epoch: int) -> _Numbers:
    """The samples at these positions in the order of an epoch.

    A Feistel network over a grid of about sqrt(size) x sqrt(size), with keys from seed and epoch. The grid has up to sqrt(size) more cells
    than there are samples; a result outside the samples goes through the network again.
    """
    drawn = blake3(struct.pack("<QQ", seed, epoch), derive_key_context="tensorstore_ck v1 sample order").digest(length=8 * ROUNDS)
    keys = np.frombuffer(drawn, "<u8").astype(np.uint64)
    columns = math.isqrt(size - 1) + 1
    widths = np.uint64(-(-size // columns)), np.uint64(columns)
    samples = positions.copy()
    again = np.ones(len(positions), np.bool_)
    while again.any():
        halves = list(np.divmod(samples[again], widths[1]))
        for number, key in enumerate(keys):
            side = number % 2
            halves[side] = (halves[side] + _mixed(halves[1 - side] + key) % widths[side]) % widths[side]
        samples[again] = halves[0] * widths[1] + halves[1]
        again = samples >= size
    return samples


def _mixed(numbers: _Numbers) -> _Numbers:
    """The finalizer of SplitMix64: every bit of the result depends on every bit."""
    for shift, factor in _MIX:
        numbers = (numbers ^ numbers >> shift) * factor
    return numbers ^ numbers >> np.uint64(31)


def _whole(name: str, value: int, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise InvalidOptionError(f"{name} must be a whole number from {least} to {most}, not {value!r}", object_id=name)
    return number


_Key = tuple[int, int]
"""(epoch, sample number)."""
_CONTEXT: Final = "tensorstore_ck v1 random numbers of a sample"


def seeded_loader(dataset: Dataset[Any], batches: "RankBatches", **options: Any) -> DataLoader[Any]:
    """See `SampleCursor.loader`."""
    cursor = batches.cursor
    size = len(dataset)  # type: ignore[arg-type]
    if size != cursor.dataset_size:
        raise InvalidOptionError(f"the dataset has {size} samples, and the cursor {cursor.dataset_size}", object_id="dataset")
    keyed: Any = _KeyedBatches(batches)
    # its default would draw from the process's generator at each iteration: dropout would go on differently in a resumed job
    return DataLoader(_SeededSamples(dataset, cursor.seed), batch_sampler=keyed, **{"generator": torch.Generator(), **options})


class _KeyedBatches:
    """Batches of (epoch, sample): persistent workers keep the dataset as it was when they started, so it cannot hold the epoch."""

    def __init__(self, batches: "RankBatches") -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[_Key]]:
        epoch = self._batches.cursor.epoch
        return ([(epoch, number) for number in batch] for batch in self._batches)


class _SeededSamples(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, keys: list[_Key]) -> Any:
        """The samples of a batch. In a worker, what `collate_fn` draws continues from the last sample's seed."""
        if get_worker_info() is not None:
            return self._read(keys)
        with random_generators.preserved_on_host():
            return self._read(keys)

    def _read(self, keys: list[_Key]) -> Any:
        whole = getattr(self._dataset, "__getitems__", None)
        if whole is not None:
            self._seed_generators(keys[0])
            return whole([number for _, number in keys])
        return [self._read_one(key) for key in keys]

    def _read_one(self, key: _Key) -> Any:
        self._seed_generators(key)
        return self._dataset[key[1]]

    def _seed_generators(self, key: _Key) -> None:
        drawn = blake3(struct.pack("<QQQ", self._seed, *key), derive_key_context=_CONTEXT).digest(length=8)
        random_generators.seed_host(int.from_bytes(drawn, "little"))
