"""The valid values of a field of an operation or of a row of the ref table, names of refs among them: data, which one function compares
values with; and how a row of such fields is written, and decoded strictly, with its key. Pure.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgpack

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Ulid
from tensorstore_ck.common.signing_keys import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from tensorstore_ck.errors import CorruptObjectError, InvalidNameError
from tensorstore_ck.format.attributes import MAX_ATTRIBUTES, are_attributes
from tensorstore_ck.format.record import are_triggers, is_epoch
from tensorstore_ck.format.sealed import FOLDERS, pack_body
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.object_set import ObjectKey, is_ulids

MAX_REF_CHARS: Final = 255
"""A name must fit into a key of the ref table."""

_COMPONENT: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME: Final = re.compile(rf"{_COMPONENT}(/{_COMPONENT}){{0,8}}")
_GLOB: Final = re.compile(rf"[A-Za-z0-9._/*?\[\]!-]{{1,{MAX_REF_CHARS}}}")
_ROOT: Final = re.compile(r"[0-9a-fA-F]{8,64}")

MAX_METRICS: Final = 1024
MAX_METRIC_NAME_CHARS: Final = 256
MAX_REASON_CHARS: Final = 4096
MAX_OP_NAME_CHARS: Final = 64
MAX_OWNER_BYTES: Final = 256
MAX_ACTOR_CHARS: Final = 256
MAX_RULES: Final = 64
MAX_RULE_ITEMS: Final = 1000
MAX_URL_CHARS: Final = 1024
MAX_COUNTS: Final = 64
MAX_RUN_CHARS: Final = 64
MAX_MESSAGE_CHARS: Final = 1000
MARKS: Final = ("bad", "damaged", "drift", "")
MAX_INTEGER: Final = (1 << 63) - 1
MIN_STEP: Final = -(1 << 63)

PREFIX: Final = b"r/"
"""The prefix of the ref table's keys in a host's table. Keys in checkpoints lack it."""

_KIND_BYTES: Final = {kind: {"pack": b"k", "part": b"p", "snapshot": b"s", "moved": b"m"}[kind] for kind in FOLDERS}
KINDS_BY_BYTE: Final = {byte: kind for kind, byte in _KIND_BYTES.items()}
"""How a key of an object begins -> the kind of the object."""

Row = TypeVar("Row", bound=tuple[Any, ...])


class Field(NamedTuple):
    """The valid values of one field."""

    type: type[Any]
    low: int = 0
    """The least number, or the least length of another type."""
    high: int = MAX_INTEGER
    """The greatest one."""
    rule: Callable[[Any], bool] | None = None
    """A further condition on a value of that type and size."""
    may_be_nil: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the field may hold `value`."""
        return first_invalid((self,), (value,)) is None

    def or_nil(self) -> "Field":
        """The same, or nil."""
        return self._replace(may_be_nil=True)


def first_invalid(fields: Iterable[Field], values: Iterable[Any]) -> int | None:
    """The position of the first value that its field may not hold; None if all are valid."""
    for position, (field, value) in enumerate(zip(fields, values, strict=True)):
        kind, low, high, rule, may_be_nil = field
        if value is None and may_be_nil:
            continue
        if type(value) is not kind:
            return position
        size: float = value if kind is int or kind is bool or kind is float else len(value)
        if not low <= size <= high or (rule is not None and not rule(value)):
            return position
    return None


class RowKind(Generic[Row]):
    """One kind of row: where its keys begin, what its fields may hold, and the type that callers see."""

    def __init__(self, byte: bytes, row: type[Row], *fields: Field, is_key: Callable[[bytes], bool], named_by_key: int = 0) -> None:
        """`is_key` checks a key after its first byte. `named_by_key`: how many first fields of `row` come from the key."""
        self.prefix = PREFIX + byte
        self.row = row
        self.fields = fields
        self.is_key = is_key
        self._named_by_key = named_by_key

    def decode(self, value: bytes, *named: Any) -> Row:
        """The row of a value; `named` are the fields that its key holds. Raises `CorruptObjectError` if it is not a row of that kind."""
        return self.row(*named, *self.check(value))

    def check(self, value: bytes) -> list[Any]:
        """The fields of a value. Raises `CorruptObjectError` if it is not a row of that kind."""
        try:
            fields = msgpack.unpackb(value, max_array_len=MAX_RULE_ITEMS, max_map_len=MAX_METRICS, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            fields = None
        if type(fields) is not list or len(fields) != len(self.fields) or first_invalid(self.fields, fields) is not None:
            name = self.row.__name__
            raise CorruptObjectError(f"a {name} of the ref table is malformed: run `tsck fsck`", object_id=name)
        return fields

    def put(self, batch: Batch, key: bytes, row: Row) -> None:
        """Sets a row; `key` without the prefix."""
        start = self._named_by_key
        batch.put(self.prefix + key, pack_body(list(row[start : start + len(self.fields)])))

    def delete(self, batch: Batch, key: bytes) -> None:
        """Removes a row, if it is there; `key` without the prefix."""
        batch.delete(self.prefix + key)


def numbered(name: str, number: int) -> bytes:
    """The key of a move, by its number; of a step, by how far it is above `MIN_STEP`."""
    return name.encode() + b"\0" + number.to_bytes(8, "big")


def window_key(n: int, name: str) -> bytes:
    """The key of what entry `n` removed from `name`."""
    return n.to_bytes(8, "big") + name.encode()


def object_key(key: ObjectKey) -> bytes:
    """The key of an object that gc condemned or swept."""
    return _KIND_BYTES[key.kind] + key.ulid


def object_of(key: bytes) -> ObjectKey:
    """The object of an `object_key`."""
    return ObjectKey(KINDS_BY_BYTE[key[:1]], Ulid(key[1:]))


def validate_ref_name(name: object) -> str:
    """`name`, if it is valid. Raises `InvalidNameError` if it is not; the message says why."""
    problem = _name_problem(name)
    if problem is not None:
        shown = repr(name)[:80]
        raise InvalidNameError(f"{shown} cannot be the name of a branch or tag: {problem}. Use a name like runs/gpt-2", object_id=shown)
    return str(name)


def name_key(name: str) -> bytes:
    """The key of a branch or a tag; no row has that of a text which cannot be a name. Raises `InvalidNameError` if it is no string."""
    return (name if isinstance(name, str) else validate_ref_name(name)).encode("ascii", "replace")


def is_ref_glob(glob: object) -> bool:
    """Whether this is a valid pattern of a policy: a name in which ``*``, ``?`` and ``[...]`` stand for any characters."""
    return isinstance(glob, str) and _GLOB.fullmatch(glob) is not None


def is_ref_name(name: object) -> bool:
    """Whether this is a valid name of a ref."""
    return _name_problem(name) is None


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"it is a {type(name).__name__}, not a string"
    if len(name) > MAX_REF_CHARS:
        return f"it is longer than {MAX_REF_CHARS} characters"
    if not _NAME.fullmatch(name):
        return "it must be up to 9 parts joined by '/', each of letters, digits, '.', '_' and '-' and beginning with a letter or digit"
    if ".." in name:
        return "'..' is not allowed"
    if ".lock/" in f"{name}/":
        return "'.lock' at the end of a part is not allowed"
    if _ROOT.fullmatch(name):
        return "it looks like the root of a snapshot"
    return None


def _are_metrics(metrics: dict[Any, Any]) -> bool:
    are_texts = {*map(type, metrics)} <= {str} and {*map(type, metrics.values())} <= {float}
    return are_texts and max(map(len, metrics), default=0) <= MAX_METRIC_NAME_CHARS


def _are_counts(counts: dict[object, object]) -> bool:
    return all(type(name) is str and len(name) <= MAX_METRIC_NAME_CHARS and COUNT.accepts(number) for name, number in counts.items())


def _are_rules(rules: dict[object, object]) -> bool:
    """Whether a policy may have these rules; `retention.policy` knows their meaning."""
    return all(type(name) is str and _is_rule(rule, 3) for name, rule in rules.items())


def _is_rule(value: object, depth: int) -> bool:
    if type(value) is list:
        return depth > 0 and len(value) <= MAX_RULE_ITEMS and all(_is_rule(item, depth - 1) for item in value)
    return type(value) in (int, float, bool) or (type(value) is str and len(value) <= MAX_METRIC_NAME_CHARS)


DIGEST: Final = Field(bytes, DIGEST_BYTES, DIGEST_BYTES)
ULID: Final = Field(bytes, ULID_BYTES, ULID_BYTES)
ULIDS: Final = Field(bytes, rule=is_ulids)
COUNT: Final = Field(int)
FLAG: Final = Field(bool)
STEP: Final = Field(int, MIN_STEP).or_nil()
PARENT: Final = DIGEST.or_nil()
DATE: Final = COUNT.or_nil()
LIMIT: Final = COUNT.or_nil()
REF: Final = Field(str, 1, MAX_REF_CHARS, is_ref_name)
GLOB: Final = Field(str, 1, MAX_REF_CHARS, is_ref_glob)
METRICS: Final = Field(dict, 0, MAX_METRICS, _are_metrics)
MARK: Final = Field(str, rule=MARKS.__contains__)
REASON: Final = Field(str, 0, MAX_REASON_CHARS)
OWNER: Final = Field(str, 1, MAX_OWNER_BYTES, lambda owner: len(owner.encode("utf-8", "replace")) <= MAX_OWNER_BYTES and "\0" not in owner)
RULES: Final = Field(dict, 1, MAX_RULES, _are_rules)
URL: Final = Field(str, 1, MAX_URL_CHARS, str.isprintable)
SHORT_TEXT: Final = Field(str, 0, 64)
RUN: Final = Field(str, 1, MAX_RUN_CHARS, lambda name: name.isascii() and name.isprintable())
COUNTS: Final = Field(dict, 0, MAX_COUNTS, _are_counts)
MESSAGE: Final = Field(str, 0, MAX_MESSAGE_CHARS)
TRIGGERS: Final = Field(list, rule=are_triggers)
EPOCH: Final = Field(float, rule=is_epoch).or_nil()
ATTRIBUTES: Final = Field(dict, 0, MAX_ATTRIBUTES, are_attributes).or_nil()
ACTOR: Final = Field(str, 0, MAX_ACTOR_CHARS)
PUBLIC_KEY: Final = Field(bytes, PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES)
SIGNATURE: Final = Field(bytes, SIGNATURE_BYTES, SIGNATURE_BYTES)
