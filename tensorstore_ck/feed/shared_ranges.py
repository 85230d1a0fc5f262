"""Ranks that read the same ranges of packs: each range is read from the store by one of them, which sends it to the others.

What arrives is stored bytes, which the receiver decodes and verifies as if it had read them: gloo has no authentication, and needs none
here. The group is made for one version, so that a rank that failed in the last one is not out of step in the next. Sharing only saves
reads: where a rank is gone, or cannot read its part, each rank reads by itself.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.state.gloo_group import connect_gloo

_READ: Final = 1
"""The last byte of what a rank sends, if it could read all of it."""
_logger: Final = logging.getLogger("tensorstore_ck.feed")


class Range(NamedTuple):
    """Bytes of a pack that are read by one request."""

    pack: Ulid
    start: int
    stop: int


class Read(NamedTuple):
    """A range, and the memory that it goes to."""

    place: Range
    target: memoryview


class SharedRanges:
    """One rank's side. All members call `fetch` as often, with the same ranges; a context manager."""

    def __init__(self, store: Any, name: str, rank: int, members: Sequence[int], *, timeout_seconds: float) -> None:
        """Waits for the other `members`, the ranks that share, in order. They find each other in torch's key-value `store`.

        `name`: the same on all members, and never used in that store before. `timeout_seconds`: how long a member may take to come, and
        for each message.
        """
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - not in all builds of torch

        self._member, self._members = members.index(rank), len(members)
        self._gloo: Any = None
        try:
            own_keys = PrefixStore(f"tsck-feed/{name}", store.clone())
            self._gloo = connect_gloo(own_keys, self._member, self._members, timeout_seconds=timeout_seconds)
            self._spread([np.zeros(1, np.uint8) for _ in members])  # all have connected: none reads the keys any more
            own_keys.delete_key(f"0/{self._member}")  # gloo's name of what it publishes; each version would leave one
        except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors
            _logger.debug("this rank reads alone: it did not find ranks %s: %s", members, exc)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._gloo = None  # closes the connections, which the others notice at once

    def fetch(self, ranges: Sequence[Range], read: Callable[[Sequence["Read"]], None]) -> list[memoryview] | None:
        """The bytes of all ranges, of which this member fills a part by `read`; None, now and later, if a member could not do that."""
        if self._gloo is None:
            return None
        owners, filled, starts = _owners(ranges, self._members), [0] * self._members, []
        for place, owner in zip(ranges, owners, strict=True):
            starts.append(filled[owner])
            filled[owner] += place.stop - place.start
        buffers = [np.zeros(size + 1, np.uint8) for size in filled]
        reads = [
            Read(place, buffers[owner].data[start : start + place.stop - place.start])
            for place, owner, start in zip(ranges, owners, starts, strict=True)
        ]
        try:
            try:
                read([task for task, owner in zip(reads, owners, strict=True) if owner == self._member])
                buffers[self._member][-1] = _READ
            except Exception as exc:  # noqa: BLE001 - this rank reads again alone, and meets it again if it stays
                _logger.debug("this rank could not read its part for the others: %s", exc)
            self._spread(buffers)
        except BaseException as exc:
            self._gloo = None
            if not isinstance(exc, RuntimeError):
                raise
            _logger.debug("the ranks that shared their reads lost each other: %s", exc)
            return None
        if all(buffer[-1] == _READ for buffer in buffers):
            return [task.target for task in reads]
        self._gloo = None
        return None

    def _spread(self, buffers: Sequence[Any]) -> None:
        from torch.distributed import BroadcastOptions  # noqa: PLC0415 - not in all builds of torch

        works = []
        for member, buffer in enumerate(buffers):
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = member, 0
            works.append(self._gloo.broadcast([torch.from_numpy(buffer)], options))
        for work in works:
            work.wait()


def _owners(ranges: Sequence[Range], members: int) -> list[int]:
    """The member that reads each range: neighbouring ones, with about as many bytes for each member."""
    total, before, owners = sum(place.stop - place.start for place in ranges), 0, []
    for place in ranges:
        owners.append(min(members - 1, members * before // max(1, total)))
        before += place.stop - place.start
    return owners
