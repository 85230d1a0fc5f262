"""Small records that the ranks of a group exchange through a key-value store.

Knows no torch: a store is any `KeyValue`, reached through a `StoreRunner`. Records of other ranks are decoded strictly. A key is read only
if it exists, since a store's `get` waits for it, up to half an hour; so a key may be deleted only when no rank reads it any more (see
`RoundLedger`). Every call has a deadline, on the `clock` of this rank.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.sealed import Body, pack_body, take, take_count, unpack_body
from tensorstore_ck.session.group.late_rank_warning import ASK_SECONDS, LATE_SECONDS
from tensorstore_ck.session.group.liveness import UNBORN, LivenessWatch
from tensorstore_ck.session.group.rank_messages import unheard

T = TypeVar("T")

MAX_RECORD_BYTES: Final = 1 << 20
PIECE_BYTES: Final = MAX_RECORD_BYTES - 1024
"""Larger data is sent in pieces of this size."""
BATCH: Final = 256
"""The keys per request: few round trips, and still frequent polls."""
CALL_SECONDS: Final = 3.0
"""The time that a call has if it begins at its deadline."""
LONGEST_PAUSE: Final = 0.25
PAUSE_SHARE: Final = 1 / 32
"""A pause is this share of the time waited so far."""
SHORTEST_PAUSE: Final = 0.001
PAUSE_PER_RANK: Final = 20e-6
"""The shortest pause. With it all ranks together do not overload the process that serves the store."""


class ChannelError(Exception):
    """The store of the group cannot be used, or holds no record where one should be. Never leaves this package."""


class LateError(ChannelError):
    """No record came by the deadline."""


class SilentError(LateError):
    """The rank whose record is awaited has been silent for too long."""


class KeyValue(Protocol):
    """The methods of `torch.distributed.Store` that are used."""

    def set(self, key: str, value: bytes, /) -> object:
        """Sets or replaces a value."""

    def multi_set(self, keys: list[str], values: list[bytes], /) -> object:
        """Sets or replaces values."""

    def get(self, key: str, /) -> bytes:
        """The value; waits for it."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """All values; waits for them."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them exist; does not wait."""

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Sets a value if the present one is as expected, where empty means absent; returns the value that counts now."""

    def delete_key(self, key: str, /) -> bool:
        """Deletes a key."""


class StoreRunner(Protocol):
    """Calls the store, so that a store that hangs does not hang the caller."""

    def __call__(self, action: Callable[[KeyValue], T], seconds: float) -> T:
        """The result of `action` on the store. An action may still have its effect after the error.

        Raises:
            TimeoutError: it did not return within `seconds`.
            RuntimeError, OSError: from the store.
        """


class CollectedRecords(NamedTuple):
    """The result of `Channel.collect`."""

    values: dict[str, bytes]
    alarm: bytes | None
    silent: Sequence[int]
    """Ranks that were given up because they are silent."""


class Channel:
    """The keys under one prefix. Thread-safe as far as its `StoreRunner` is."""

    def __init__(
        self,
        run: StoreRunner,
        prefix: str,
        *,
        ranks: int,
        watch: LivenessWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`ranks` poll at the same time. Without a `watch` no rank is given up before the deadline."""
        self._run = run
        self._prefix = prefix
        self.watch = watch or LivenessWatch("", every=math.inf, limit=math.inf)
        self._shortest = min(max(SHORTEST_PAUSE, ranks * PAUSE_PER_RANK), LONGEST_PAUSE)
        self.clock = clock
        self.sleep = sleep
        self.written: list[str] = []
        """The keys that were written through this object."""

    def put(self, key: str, record: Mapping[str, Any], deadline: float) -> None:
        """Sets a record.

        Raises:
            UnsupportedValueError: it is too large, or has types that msgpack does not know.
            ChannelError: the store cannot be used; the record may be there.
        """
        packed = encode_record(record, key)
        self.written.append(key)
        self._call(lambda store: store.set(self._prefix + key, packed), deadline)

    def put_first(self, key: str, record: Mapping[str, Any], deadline: float) -> Body:
        """Sets a record unless there is one already; returns the one that is set.

        Raises:
            UnsupportedValueError: it is too large, or has types that msgpack does not know.
            ChannelError: the store cannot be used, and the record may be there; or this is no record.
        """
        packed = encode_record(record, key)
        self.written.append(key)
        return self._decode(self._call(lambda store: store.compare_set(self._prefix + key, b"", packed), deadline), key)

    def put_large(self, key: str, data: bytes, deadline: float) -> None:
        """Sets a record for bytes of any size: see `whole`.

        Raises:
            ChannelError: the store cannot be used; the record may be there.
        """
        if len(data) <= PIECE_BYTES:
            self.put(key, {"data": data}, deadline)
            return
        starts = range(0, len(data), PIECE_BYTES)
        for number, start in enumerate(starts):
            self.put(f"{key}/piece/{number}", {"data": data[start : start + PIECE_BYTES]}, deadline)
        self.put(key, {"pieces": len(starts)}, deadline)

    def whole(self, key: str, record: Body, deadline: float) -> bytes:
        """The bytes that `put_large` wrote under `key`.

        Raises:
            ChannelError: the store cannot be used, or this is no such record.
        """
        try:
            if "data" in record:
                return take(record, "data", bytes)
            names = [f"{self._prefix}{key}/piece/{number}" for number in range(take_count(record, "pieces"))]
            pieces = self._call(lambda store: store.multi_get(names), deadline)
            return b"".join(take(self._decode(piece, key), "data", bytes) for piece in pieces)
        except TypeError as exc:
            raise ChannelError(f"the record {key} is malformed: {exc}") from exc

    def try_get(self, key: str, deadline: float) -> Body | None:
        """The record, None when there is none yet.

        Raises:
            ChannelError: the store cannot be used, or this is no record.
        """
        record = self._first_of([key], deadline)
        return None if record is None else record[1]

    def wait(
        self, keys: Sequence[str], deadline: float, *, writer: int | None = None, on_late: Callable[[], object] | None = None
    ) -> tuple[str, Body]:
        """The first of `keys` that exists, with its record; polls at least once, even after the deadline.

        `on_late` is called once, if none has come within `ASK_SECONDS`.

        Raises:
            SilentError: none came, and the rank `writer` is silent.
            LateError: none came by the deadline.
            ChannelError: the store cannot be used, or this is no record.
        """
        started = self.clock()
        while True:
            silent = () if writer is None else self._silent([writer], deadline)
            record = self._first_of(keys, deadline)
            if record is not None:
                return record
            if silent:
                raise SilentError(unheard(silent, self.watch.limit))
            if on_late is not None and self.clock() - started >= ASK_SECONDS:
                on_late()
                on_late = None
            if not self._pause(started, deadline):
                raise LateError(f"no answer within {self.clock() - started:.0f} s")

    def collect(
        self, keys: Mapping[str, int], deadline: float, *, alarm: str, on_late: Callable[[Sequence[int]], object] | None = None
    ) -> CollectedRecords:
        """The raw values of `keys`: all of them, or those that exist at the deadline, or as soon as `alarm` exists or a rank is given up.

        Keys are read in batches, in order, the next batch when one is complete: a poll costs one small request for any number of ranks,
        and the whole collection ``2 * len(keys) / BATCH`` round trips.

        `keys`: which rank writes each. `on_late` is called once, with the ranks that have not written their key within `LATE_SECONDS`.

        Raises:
            ChannelError: the store cannot be used.
        """
        names = [self._prefix + key for key in keys]
        alarm_name = self._prefix + alarm
        values: list[bytes] = []
        started = self.clock()

        def more(store: KeyValue) -> tuple[dict[str, bytes], bytes | None]:
            """The next complete batches."""
            complete: dict[str, bytes] = {}
            for start in range(len(values), len(names), BATCH):
                batch = names[start : start + BATCH]
                if not store.check(batch):
                    return complete, store.get(alarm_name) if store.check([alarm_name]) else None
                complete |= zip(batch, store.multi_get(batch), strict=True)
            return complete, None

        while True:
            complete, alarm_value = self._call(more, deadline)
            values += complete.values()
            if len(values) == len(names):
                return CollectedRecords(dict(zip(keys, values, strict=True)), None, ())
            rest = dict(list(keys.items())[len(values) :])
            if on_late is not None and self.clock() - started >= LATE_SECONDS:
                come = self._values_of(list(rest), deadline)
                on_late([rank for key, rank in rest.items() if key not in come])
                on_late = None
            silent = self._silent_without(rest, deadline)
            if silent or alarm_value is not None or not self._pause(started, deadline):
                break
        by_key = dict(zip(keys, values, strict=False)) | self._values_of(list(rest), deadline)
        return CollectedRecords(by_key, alarm_value, silent)

    def set_unborn(self, ranks: int, prefix: str, deadline: float) -> None:
        """Creates the counters of ranks 0 to `ranks` - 1, so that a rank that reads them finds all of them.

        Raises:
            ChannelError: the store cannot be used.
        """

        def set_all(store: KeyValue) -> None:
            for start in range(0, ranks, BATCH):
                batch = [f"{prefix}{rank}" for rank in range(start, min(start + BATCH, ranks))]
                store.multi_set(batch, [UNBORN] * len(batch))

        self._call(set_all, deadline)

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Deletes keys that no rank reads any more.

        Raises:
            ChannelError: the store cannot be used.
        """

        def delete_all(store: KeyValue) -> None:
            for key in keys:
                store.delete_key(self._prefix + key)

        if keys:
            self._call(delete_all, deadline)

    def _silent(self, ranks: Collection[int], deadline: float) -> list[int]:
        """The silent ranks. Reads their counters when it is time, with two requests per batch."""
        if not self.watch.is_due(self.clock()):
            return []
        names = {f"{self.watch.prefix}{rank}": rank for rank in ranks}

        def look(store: KeyValue) -> dict[int, bytes]:
            counters: dict[int, bytes] = {}
            for start in range(0, len(names), BATCH):
                batch = list(names)[start : start + BATCH]
                if store.check(batch):
                    counters |= zip((names[name] for name in batch), store.multi_get(batch), strict=True)
            return counters

        return self.watch.silent(self._call(look, deadline), self.clock())

    def _silent_without(self, keys: Mapping[str, int], deadline: float) -> list[int]:
        silent = set(self._silent(keys.values(), deadline))
        awaited = [key for key, rank in keys.items() if rank in silent]
        written = self._values_of(awaited, deadline)
        return [keys[key] for key in awaited if key not in written]

    def _values_of(self, keys: Sequence[str], deadline: float) -> dict[str, bytes]:
        names = [self._prefix + key for key in keys]
        values: dict[str, bytes] = {}
        for start in range(0, len(names), BATCH):
            values |= self._call(lambda store, batch=names[start : start + BATCH]: _existing(store, batch), deadline)  # type: ignore[misc]
        return {name.removeprefix(self._prefix): value for name, value in values.items()}

    def _first_of(self, keys: Sequence[str], deadline: float) -> tuple[str, Body] | None:
        def look(store: KeyValue) -> tuple[str, bytes] | None:
            for key in keys:
                if store.check([self._prefix + key]):
                    return key, store.get(self._prefix + key)
            return None

        first = self._call(look, deadline)
        return None if first is None else (first[0], self._decode(first[1], first[0]))

    def _decode(self, data: bytes, key: str) -> Body:
        try:
            return decode_record(data, key)
        except CorruptObjectError as exc:
            raise ChannelError(str(exc)) from exc

    def _pause(self, started: float, deadline: float) -> bool:
        """Sleeps for a while that grows with the time waited; False, at once, when the deadline has passed."""
        now = self.clock()
        if now >= deadline:
            return False
        self.sleep(min(max(self._shortest, (now - started) * PAUSE_SHARE), LONGEST_PAUSE, deadline - now))
        return True

    def _call(self, action: Callable[[KeyValue], T], deadline: float) -> T:
        try:
            return self._run(action, max(deadline - self.clock(), CALL_SECONDS))
        except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors
            raise ChannelError(f"the process group's store cannot be used: {exc}") from exc


def encode_record(record: Mapping[str, Any], name: str) -> bytes:
    """The msgpack of a record.

    Raises:
        UnsupportedValueError: it is too large, or has types that msgpack does not know.
    """
    packed = pack_body(record)
    if len(packed) > MAX_RECORD_BYTES:
        raise UnsupportedValueError(
            f"the record {name} takes {len(packed)} bytes, and ranks exchange at most {MAX_RECORD_BYTES}", object_id=name
        )
    return packed


def decode_record(data: bytes, name: str) -> Body:
    """The record that another rank wrote.

    Raises:
        CorruptObjectError: it is not a record.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise CorruptObjectError(f"the record {name} takes {len(data)} bytes, more than ranks exchange", object_id=name)
    record = unpack_body(memoryview(data), name)
    if type(record) is not dict:
        raise CorruptObjectError(f"the record {name} is a {type(record).__name__}, not a map", object_id=name)
    return record


def _existing(store: KeyValue, names: list[str]) -> dict[str, bytes]:
    """The values of the names that exist: `check` answers for all names at once, so this bisects."""
    if store.check(names):
        return dict(zip(names, store.multi_get(names), strict=True))
    if len(names) == 1:
        return {}
    half = len(names) // 2
    return _existing(store, names[:half]) | _existing(store, names[half:])
