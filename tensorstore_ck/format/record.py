"""Snapshot records: the root object of one snapshot. Pure: bytes in, bytes out. Format: FORMAT.md, "Snapshot records".

The *root* is a Merkle hash over logical content only (part ids, step, parent root, metadata), so it does not depend on the backend or
on how blocks are packed.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, ZERO_DIGEST, Digest, Ulid, derived_hash, split_ulids
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError
from tensorstore_ck.format.attributes import Attributes, are_attributes, attributes_of
from tensorstore_ck.format.sealed import object_name, pack_body, seal, take, take_count, take_digest, unpack_body, unseal

T = TypeVar("T")

MAX_METADATA_BYTES: Final = 1 << 20
MAX_STEP: Final = (1 << 63) - 1
MAX_TRIGGERS: Final = 16
MAX_TRIGGER_CHARS: Final = 64
ROOT_HEADER: Final = struct.Struct("<QBqBQ")
"""Bytes of the part ids, has step, step, has parent, bytes of the metadata."""
STORE_KEY: Final = "tsck"
"""The store's own metadata key, a map: ``non_finite`` is the share of the sampled floats that are NaN or infinite, if any are."""


class SaveOrigin(NamedTuple):
    """Why and when a snapshot was made, and what to search it by. The root does not cover it."""

    triggers: Sequence[str] = ()
    """The names of the triggers that caused the save."""
    epoch: float | None = None
    """How many epochs the training had completed."""
    made_ns: int | None = None
    """When the state was made, if it is older than the save, as an imported file is."""
    attributes: Attributes | None = None


class Record(NamedTuple):
    """One decoded snapshot record."""

    ref: str
    """The ref that it was saved to; a hint for salvage."""
    step: int | None
    parent: Digest | None
    metadata: bytes
    """msgpack of a map."""
    metrics: dict[str, float]
    time_ns: int
    """When the snapshot was made."""
    parts: list[Ulid]
    part_ids: bytes
    """32 bytes per part, in rank order."""
    logical_bytes: int
    new_bytes: int
    """Bytes of the packs and parts that this snapshot added to the store."""
    streams: str = ""
    """With rank states: the rule by which other numbers of ranks derive random streams (`random_streams.RULE`)."""
    triggers: Sequence[str] = ()
    epoch: float | None = None
    attributes: Attributes | None = None

    @property
    def stored_bytes(self) -> int:
        """Roughly the record's size in the store."""
        return (ULID_BYTES + DIGEST_BYTES) * len(self.parts) + len(self.metadata)

    def root(self) -> Digest:
        """The Merkle root."""
        return derived_hash("root", *self.logical_section())

    def logical_section(self) -> tuple[bytes, ...]:
        """What the root hashes, in pieces; the first one is a `ROOT_HEADER`."""
        sizes = len(self.part_ids), self.step is not None, self.step or 0, self.parent is not None, len(self.metadata)
        return ROOT_HEADER.pack(*sizes), self.part_ids, self.parent or ZERO_DIGEST, self.metadata

    def part_id(self, rank: int) -> Digest:
        """The id of a rank's part."""
        return Digest(self.part_ids[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES])

    def origin_fields(self) -> dict[str, Any]:
        """The optional fields of a `SaveOrigin`, of a record and of a log entry."""
        fields: dict[str, Any] = {"triggers": list(self.triggers)} if self.triggers else {}
        if self.attributes:
            fields["attributes"] = dict(self.attributes)
        return fields if self.epoch is None else {**fields, "epoch": self.epoch}

    def encode(self) -> bytes:
        """The sealed record object."""
        return seal(
            "snapshot",
            {
                "ref": self.ref,
                "step": self.step,
                "parent": self.parent,
                "metadata": self.metadata,
                "metrics": self.metrics,
                "time_ns": self.time_ns,
                "parts": b"".join(self.parts),
                "part_ids": self.part_ids,
                "logical_bytes": self.logical_bytes,
                "new_bytes": self.new_bytes,
                "root": self.root(),
                "signatures": [],
                **({"streams": self.streams} if self.streams else {}),
                **self.origin_fields(),
            },
        )


record_name = partial(object_name, "snapshot")
"""The name of a snapshot's record in the store, by the snapshot's ULID."""


def decode_record(data: bytes, name: str) -> Record:
    """Decodes and checks a sealed record. Raises `CorruptObjectError` if it is not a record, or its root does not match its content."""
    body = unseal("snapshot", data, name)
    try:
        parts, metrics = take(body, "parts", bytes), take(body, "metrics", dict)
        if any(type(value) is not float for value in metrics.values()):
            raise TypeError("a metric is not a float")
        record = Record(
            ref=take(body, "ref", str),
            step=None if body["step"] is None else take(body, "step", int),
            parent=None if body["parent"] is None else take_digest(body, "parent"),
            metadata=take(body, "metadata", bytes),
            metrics=metrics,
            time_ns=take_count(body, "time_ns"),
            parts=split_ulids(parts),
            part_ids=take(body, "part_ids", bytes),
            logical_bytes=take_count(body, "logical_bytes"),
            new_bytes=take_count(body, "new_bytes"),
            streams=take(body, "streams", str) if "streams" in body else "",
            triggers=triggers if are_triggers(triggers := body.get("triggers")) else (),
            epoch=epoch if is_epoch(epoch := body.get("epoch")) else None,
            attributes=attributes if (attributes := body.get("attributes")) is not None and are_attributes(attributes) else None,
        )
        is_root = record.root() == body["root"]
    except (KeyError, TypeError, ValueError, struct.error) as exc:
        raise CorruptObjectError(f"{name} is not a valid record: {exc!r}", object_id=name) from exc
    is_whole = len(parts) % ULID_BYTES == 0 and len(record.part_ids) == len(record.parts) * DIGEST_BYTES and record.parts
    if not is_whole or len(record.metadata) > MAX_METADATA_BYTES or not is_root:
        raise CorruptObjectError(f"{name}: its root does not match its content", object_id=name)
    return record


def are_triggers(value: object) -> TypeGuard[list[str]]:
    """Whether a record or log entry may have these names of triggers."""
    return type(value) is list and len(value) <= MAX_TRIGGERS and all(map(_is_trigger, value))


def is_epoch(value: object) -> TypeGuard[float]:
    """Whether a record or log entry may have this epoch."""
    return type(value) is float and 0 <= value <= MAX_STEP  # not NaN


def check_origin(
    triggers: object, epoch: object, made_ns: int | None, attributes: object = None, metadata: Mapping[str, object] | None = None
) -> SaveOrigin:
    """Why and when a snapshot was made, as users pass it, and its attributes.

    Raises:
        InvalidOptionError: `triggers` is no list of names, `epoch` no number from 0 on, or `attributes` no dict of numbers and texts.
    """
    named = list(triggers) if isinstance(triggers, list | tuple) else triggers
    if not are_triggers(named):
        raise InvalidOptionError(
            f"triggers must be a list of up to {MAX_TRIGGERS} names such as 'at_steps', not {triggers!r}", object_id="triggers"
        )
    number = float(epoch) if isinstance(epoch, int | float) and not isinstance(epoch, bool) else epoch
    if number is not None and not is_epoch(number):
        raise InvalidOptionError(f"epoch must be a number from 0 on, not {epoch!r}", object_id="epoch")
    if not attributes and not metadata:
        return SaveOrigin(named, number, made_ns)
    searched = {key: value for key, value in (metadata or {}).items() if key != STORE_KEY}
    return SaveOrigin(named, number, made_ns, attributes_of(attributes, searched))


def _is_trigger(name: object) -> bool:
    return type(name) is str and 0 < len(name) <= MAX_TRIGGER_CHARS and name.isprintable()


_NO_METADATA: Final = pack_body({})


def encode_metadata(metadata: Mapping[str, object] | None) -> bytes:
    """The msgpack of user metadata: None, bool, int, float, str, lists and maps with str keys.

    Drops the store's own entry, which a caller may have copied from another snapshot: the save measures it again.

    Raises:
        InvalidOptionError: another type, more than 1 MiB, or a user's value under the store's own key.
    """
    if not metadata:
        return _NO_METADATA
    given = _as_dict(metadata, "metadata")
    if STORE_KEY in given:
        note = given.pop(STORE_KEY)
        if not isinstance(note, Mapping) or set(note) - {"non_finite"}:
            raise InvalidOptionError(f"metadata[{STORE_KEY!r}] belongs to the store: use another key", object_id=f"metadata.{STORE_KEY}")
    packed = pack_body(_plain(given, "metadata", 0))
    if len(packed) > MAX_METADATA_BYTES:
        raise InvalidOptionError(f"metadata has {len(packed)} bytes, the limit is {MAX_METADATA_BYTES}: put large values into the state")
    return packed


def decode_metadata(record: Record, name: str) -> dict[str, Any]:
    """The user's metadata."""
    value = unpack_body(memoryview(record.metadata), name)
    if not isinstance(value, dict):
        raise CorruptObjectError(f"{name}: its metadata is not a map", object_id=name)
    return value


def with_store_metadata(metadata: bytes, note: Mapping[str, object]) -> bytes:
    """Encoded metadata with the store's own entry, or unchanged if that would exceed 1 MiB."""
    value = unpack_body(memoryview(metadata), "metadata")
    packed = pack_body({**value, STORE_KEY: dict(note)})
    return packed if len(packed) <= MAX_METADATA_BYTES else metadata


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """User metrics as floats by name.

    Raises:
        InvalidOptionError: a value is not a number, or a name is not text of 1 to 256 characters.
    """
    checked: dict[str, float] = {}
    for name, value in _as_dict(metrics, "metrics").items() if metrics else ():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
            raise InvalidOptionError(f"metric {name!r} is {type(value).__name__}, not a number", object_id=str(name)) from exc
        if not isinstance(name, str) or not 0 < len(name) <= 256 or not _is_unicode(name):
            raise InvalidOptionError(f"metric name {name!r} must be text of 1 to 256 characters", object_id=repr(name))
        checked[name] = number
    return checked


def _as_dict(given: Mapping[str, T], option: str) -> dict[str, T]:
    try:
        return dict(given)
    except (TypeError, ValueError) as exc:
        raise InvalidOptionError(f"{option} must be a dict of names and values, not {type(given).__name__}", object_id=option) from exc


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _plain(value: object, path: str, depth: int) -> object:
    if depth > 16:
        raise InvalidOptionError(f"{path} is nested too deeply", object_id=path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not _is_unicode(value):
            raise InvalidOptionError(f"{path} has a lone surrogate, which is not valid text", object_id=path)
        return str(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidOptionError(f"{path} does not fit in 64 bits", object_id=path)
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not _is_unicode(key):
                raise InvalidOptionError(f"{path} has the key {key!r}: keys must be text", object_id=path)
        return {key: _plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    hint = "" if not hasattr(value, "item") else ": call .item() first"
    raise InvalidOptionError(f"{path} is a {type(value).__name__}, which metadata cannot hold{hint}", object_id=path)
