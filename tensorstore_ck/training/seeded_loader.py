"""A DataLoader whose random augmentation follows from seed, epoch and sample, so that a resumed job repeats it.

The generators of a loader's worker processes cannot be saved: workers draw ahead of training, and torch offers no access to them. So the
generators are seeded for each sample instead, in the process that reads it.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from blake3 import blake3
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.training import random_generators

if TYPE_CHECKING:
    from tensorstore_ck.training.sample_cursor import RankBatches

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
