"""The language of conditions: text -> tests joined by and, or, not. Parsed by a grammar, never run; knows no field and no SQL.

``val_loss < 2.1 and (step between 1000 and 5000 or "val/acc" >= 0.9) and job like 'gpt%' and not tag is null``
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeGuard

from lark import Lark, Token, Transformer
from lark.exceptions import LarkError, UnexpectedInput, UnexpectedToken, VisitError

from tensorstore_ck.errors import InvalidOptionError

MAX_CHARS: Final = 10_000
MAX_DEPTH: Final = 40
MAX_TESTS: Final = 200
"""SQLite takes no expression that is 1,000 deep."""
_SHOWN_CHARS: Final = 24

_GRAMMAR: Final = r"""
?start: any_
?any_: all_ | all_ (_OR all_)+ -> any_of
?all_: not_ | not_ (_AND not_)+ -> all_of
?not_: _NOT not_ -> negation
     | test
?test: "(" any_ ")"
     | name OP value -> compare
     | value OP name -> flipped
     | name _IN _values -> one_of
     | name _NOT _IN _values -> none_of
     | name _LIKE TEXT -> like
     | name _NOT _LIKE TEXT -> not_like
     | name _BETWEEN value _AND value -> between
     | name _NOT _BETWEEN value _AND value -> not_between
     | name _IS _NULL -> null
     | name _IS _NOT _NULL -> not_null
     | name _IS _NAN -> nan
     | name _IS _NOT _NAN -> not_nan
     | name -> flag
_values: "(" value ("," value)* ")"
name: NAME -> plain
    | QUOTED -> quoted
    | _METRIC "(" TEXT ")" -> quoted
value: NUMBER | QUANTITY | TEXT | TRUE | FALSE

_AND.3: /and(?![\w.\/])/i
_OR.3: /or(?![\w.\/])/i
_NOT.3: /not(?![\w.\/])/i
_IN.3: /in(?![\w.\/])/i
_LIKE.3: /like(?![\w.\/])/i
_BETWEEN.3: /between(?![\w.\/])/i
_IS.3: /is(?![\w.\/])/i
_NULL.3: /null(?![\w.\/])/i
_NAN.3: /nan(?![\w.\/])/i
TRUE.3: /true(?![\w.\/])/i
FALSE.3: /false(?![\w.\/])/i
_METRIC.3: /metric(?=\s*\()/i
OP: "<=" | ">=" | "==" | "!=" | "<>" | "<" | ">" | "="
NUMBER.2: /[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?(?![\w.])/
QUANTITY: /[0-9]+(\.[0-9]+)?[A-Za-z]+(?![\w.])/
TEXT: /'([^']|'')*'/
QUOTED: /"([^"]|"")+"/
NAME: /(?!(and|or|not|in|like|between|is|null|true|false)(?![\w.\/]))[A-Za-z_][\w.\/]*/i
%ignore /\s+/
"""


@dataclass(frozen=True, slots=True)
class TestedName:
    """What is tested."""

    text: str
    is_metric: bool
    """It was quoted, so that it is no field."""


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """What it is compared with."""

    text: str
    kind: str
    """``number``, ``quantity`` (``7d``, ``10GB``), ``text``, ``flag``."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test."""

    name: TestedName
    op: str
    """``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``like``, ``between``, ``null``, ``nan``, ``flag``."""
    values: tuple[ComparedValue, ...] = ()
    negated: bool = False
    """For those that are words: ``not in``."""
    depth: int = 1
    tests: int = 1


@dataclass(frozen=True, slots=True)
class Joined:
    """``and``, ``or``, or ``not`` of one."""

    how: str
    parts: "tuple[Node, ...]"
    depth: int
    tests: int


Node = Test | Joined
_FLIPPED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def parse(text: object) -> Node:
    """The tests that `text` stands for.

    Raises:
        InvalidOptionError: it is no condition; the message says where.
    """
    if not is_text(text) or len(text) > MAX_CHARS:
        raise InvalidOptionError(f"a condition must be a text of at most {MAX_CHARS:,} characters", object_id="condition")
    try:
        parsed = _parser().parse(text)
    except UnexpectedInput as exc:
        raise _refused(text, exc) from None
    except VisitError as exc:
        raise exc.orig_exc from None
    except LarkError as exc:
        raise InvalidOptionError(f"the condition cannot be understood: {exc}", object_id=text[:_SHOWN_CHARS]) from None
    if not isinstance(parsed, Test | Joined):
        raise TypeError(f"the grammar made a {type(parsed).__name__}")
    return parsed


def is_text(value: object) -> TypeGuard[str]:
    """Whether a database takes it: no half of a surrogate pair, as bytes that are no UTF-8 on a command line become, and no zero byte."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", transformer=_Nodes(), maybe_placeholders=False)


class _Nodes(Transformer[Token, Any]):
    """Makes nodes while the text is parsed, so that nothing recurses, however deep it is."""

    def plain(self, found: list[Token]) -> TestedName:
        return TestedName(str(found[0]), is_metric=False)

    def quoted(self, found: list[Token]) -> TestedName:
        return TestedName(_unquoted(found[0]), is_metric=True)

    def value(self, found: list[Token]) -> ComparedValue:
        kind = {"NUMBER": "number", "QUANTITY": "quantity", "TEXT": "text"}.get(found[0].type, "flag")
        return ComparedValue(_unquoted(found[0]) if kind == "text" else str(found[0]), kind)

    def compare(self, found: list[Any]) -> Test:
        name, op, value = found
        return Test(name, {"==": "=", "<>": "!="}.get(op, str(op)), (value,))

    def flipped(self, found: list[Any]) -> Test:
        value, op, name = found
        return self.compare([name, _FLIPPED.get(op, op), value])

    def one_of(self, found: list[Any]) -> Test:
        return Test(found[0], "in", tuple(found[1:]))

    def none_of(self, found: list[Any]) -> Test:
        return Test(found[0], "in", tuple(found[1:]), negated=True)

    def like(self, found: list[Any]) -> Test:
        return Test(found[0], "like", (self.value(found[1:]),))

    def not_like(self, found: list[Any]) -> Test:
        return Test(found[0], "like", (self.value(found[1:]),), negated=True)

    def between(self, found: list[Any]) -> Test:
        return Test(found[0], "between", tuple(found[1:]))

    def not_between(self, found: list[Any]) -> Test:
        return Test(found[0], "between", tuple(found[1:]), negated=True)

    def null(self, found: list[Any]) -> Test:
        return Test(found[0], "null")

    def not_null(self, found: list[Any]) -> Test:
        return Test(found[0], "null", negated=True)

    def nan(self, found: list[Any]) -> Test:
        return Test(found[0], "nan")

    def not_nan(self, found: list[Any]) -> Test:
        return Test(found[0], "nan", negated=True)

    def flag(self, found: list[Any]) -> Test:
        return Test(found[0], "flag")

    def any_of(self, found: list[Any]) -> Joined:
        return _joined("or", found)

    def all_of(self, found: list[Any]) -> Joined:
        return _joined("and", found)

    def negation(self, found: list[Any]) -> Joined:
        return _joined("not", found)


def _joined(how: str, parts: list[Node]) -> Joined:
    depth, tests = 1 + max(part.depth for part in parts), sum(part.tests for part in parts)
    if depth > MAX_DEPTH or tests > MAX_TESTS:
        raise InvalidOptionError(
            f"the condition is too long or too deep: at most {MAX_TESTS} tests, nested {MAX_DEPTH} deep", object_id="condition"
        )
    return Joined(how, tuple(parts), depth, tests)


def _unquoted(token: Token) -> str:
    quote = token[0]
    return str(token)[1:-1].replace(quote * 2, quote)


def _refused(text: str, exc: UnexpectedInput) -> InvalidOptionError:
    at = -1 if exc.pos_in_stream is None else exc.pos_in_stream
    if (isinstance(exc, UnexpectedToken) and exc.token.type == "$END") or not 0 <= at < len(text):
        where = "it ends too early" if text.strip() else "it is empty"
    else:
        rest = text[at : at + _SHOWN_CHARS] + ("..." if len(text) > at + _SHOWN_CHARS else "")
        where = f"there is something wrong at character {at + 1}, where it goes on with {rest!r}"
        if rest.startswith('"'):
            where += " (texts stand in single quotes, names of metrics in double ones)"
    return InvalidOptionError(
        f"the condition cannot be understood: {where}. It is made of tests like val_loss < 2.1, step between 100 and 900, job like 'gpt%' "
        "or tag is null, joined by and, or, not and parentheses",
        object_id=text[:_SHOWN_CHARS],
    )
