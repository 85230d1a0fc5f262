"""The language of conditions: text -> a tree. Never run as Python; knows no field, no metric and no SQL.

``val_loss < 2.1 and (step between 1000 and 5000 or "val/acc" >= 0.9) and job like 'gpt%' and not tag is null``

Operators by precedence: ``or``, ``and``, ``not``, comparisons (``0 < x < 1`` is a chain), ``+ -``, ``* /``, signs. White space includes
comments (``# ...``). The parser keeps its own stacks: nothing recurses, however deeply a text is nested.
"""

import keyword
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeGuard

from tensorstore_ck.errors import InvalidOptionError

FLIPPED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SHOWN_CHARS: Final = 24
_INT_CHARS: Final = 20
"""A longer number is a float."""


@dataclass(frozen=True, slots=True)
class Name:
    """A field or a metric."""

    text: str
    is_metric: bool
    """It was quoted, so it is not a field."""
    at: int = field(default=0, compare=False)


class Value(NamedTuple):
    """A literal."""

    text: str
    kind: str
    """``number``, ``quantity`` (``7d``, ``10GB``), ``text``, ``flag``."""
    at: int = 0
    number: float = 0


class Arithmetic(NamedTuple):
    """Steps from left to right: ``a * 2 - b`` is ``a`` with ``* 2`` and ``- b``."""

    first: "Operand"
    steps: "tuple[tuple[str, Operand], ...]"


class Comparison(NamedTuple):
    """A comparison of anything but a name with a value."""

    op: str
    left: "Operand"
    right: "Operand"
    depth: int = 1
    tests: int = 1


class NameTest(NamedTuple):
    """A test of one name."""

    name: Name
    op: str
    """``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``like``, ``between``, ``null``, ``nan``, ``flag``."""
    values: tuple[Value, ...] = ()
    negated: bool = False
    """Whether ``not`` precedes an operator that is a word: ``not in``."""
    depth: int = 1
    tests: int = 1


class Joined(NamedTuple):
    """Conditions joined by ``and`` or ``or``; or ``not`` of one."""

    how: str
    parts: "list[Condition]"
    depth: int
    tests: int


Operand = Name | Value | Arithmetic
Condition = Comparison | NameTest | Joined


class _Token(NamedTuple):
    kind: str
    """``number``, ``quantity``, ``text``, ``quoted``, ``name``, or the operator; empty at the end."""
    text: str
    at: int
    word: str
    """Of a name: the keyword that it spells, ignoring case; or empty."""


_SPACE: Final = re.compile(r"(?:\s|\\(?:\r\n?|\n)|#[^\r\n]*)*")
_DIGITS: Final = r"[0-9](?:_?[0-9])*"
_FLOAT: Final = rf"(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?"
_TOKEN: Final = (
    rf"(?P<number>(?>0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+|{_FLOAT})(?:(?![\w.])|(?=(?:and|or)(?!\w))))"
    r"|(?P<quantity>[0-9]+(?:\.[0-9]+)?[A-Za-z]+(?![\w.]))"
    r"""|(?P<text>'(?:[^']|'')*')|(?P<quoted>"(?:[^"]|"")+")"""
    r"|(?P<op><=|>=|==|!=|<>|[-+*/<>=(),])|(?P<name>"
)
_PATH_NAMES: Final = re.compile(_TOKEN + r"[^\W\d][\w./]*)")
_PYTHON_NAMES: Final = re.compile(_TOKEN + r"(?!\d)(?:\w|[^\x00-\x7f\s])+)")
_WORDS: Final = ("and", "or", "not", "in", "like", "between", "is", "null", "nan", "true", "false", "metric")
_WORD: Final = re.compile("|".join(f"(?P<{word}>{word})" for word in _WORDS), re.IGNORECASE)
_NOT, _CHAIN, _COMPARE, _ADD = 3, 4, 5, 6
_LEVELS: Final = {"(": 0, "or": 1, "and": 2, "not": _NOT, "chain": _CHAIN, "+": _ADD, "-": _ADD, "*": 7, "/": 7, "sign": 8}
_LEVELS.update(dict.fromkeys(("=", "==", "!=", "<>", "<", "<=", ">", ">="), _COMPARE))


def parse(text: object, *, max_chars: int, arithmetic: bool = False) -> Condition:
    """The tree of a condition.

    Args:
        text: The condition.
        max_chars: Refuse a longer one.
        arithmetic: Names are Python's, ``a/b`` is a quotient, and anything may be compared. Otherwise a name may contain ``/`` and ``.``,
            ``true`` is a value, and a comparison is of a name with a value.

    Raises:
        InvalidOptionError: it is not a condition; the message says where.
    """
    if not is_text(text) or len(text) > max_chars:
        raise InvalidOptionError(f"a condition must be a text of at most {max_chars:,} characters", object_id="condition")
    return _Parser(text, arithmetic=arithmetic).parse()


def is_text(value: object) -> TypeGuard[str]:
    """Whether a database accepts it: no lone surrogate (made from command-line bytes that are not UTF-8) and no zero byte."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def syntax_error(text: str, at: int) -> InvalidOptionError:
    """The syntax error at a character of a condition."""
    if at >= len(text):
        where = "the condition ends too early" if text.strip() else "the condition is empty"
    else:
        rest = text[at : at + _SHOWN_CHARS] + ("..." if len(text) > at + _SHOWN_CHARS else "")
        where = f"syntax error at character {at + 1} near {rest!r}"
        if rest.startswith('"'):
            where += " (texts stand in single quotes, names of metrics in double ones)"
    return InvalidOptionError(
        f"{where}; a condition is tests such as val_loss < 2.1 or step between 100 and 900, joined by and, or, not and parentheses",
        object_id=text[:_SHOWN_CHARS],
    )


class _Parser:
    """Operator precedence by two stacks."""

    def __init__(self, text: str, *, arithmetic: bool) -> None:
        self._text = text
        self._arithmetic = arithmetic
        self._operands: list[Operand | Condition] = []
        self._operators: list[_Token] = []
        self._next = self._scan(0)

    def parse(self) -> Condition:
        while True:
            if self._takes_prefix():
                continue
            self._operands.append(self._operand())
            while not self._takes_operator():
                if not self._next.kind:
                    self._reduce(1)
                    if self._operators:
                        raise self._error(self._next)
                    return self._pop_condition(self._next)

    def _scan(self, at: int) -> _Token:
        space = _SPACE.match(self._text, at)
        at = space.end() if space is not None else at
        if at == len(self._text):
            return _Token("", "", at, "")
        match = (_PYTHON_NAMES if self._arithmetic else _PATH_NAMES).match(self._text, at)
        if match is None or (self._arithmetic and match["name"] and not match["name"].isidentifier()):
            raise syntax_error(self._text, at)
        word = _WORD.fullmatch(match["name"] or "")
        return _Token(str(match["op"] or match.lastgroup), match[0], at, str(word.lastgroup) if word is not None else "")

    def _take(self, *kinds: str) -> _Token:
        token = self._next
        if kinds and not {token.kind, token.word} & {*kinds}:
            raise self._error(token)
        self._next = self._scan(token.at + len(token.text))
        return token

    def _error(self, token: _Token) -> InvalidOptionError:
        return syntax_error(self._text, token.at)

    def _takes_prefix(self) -> bool:
        is_not = self._next.word == "not" and (self._next.text == "not" or not self._arithmetic)
        kind = "not" if is_not else {"(": "(", "+": "sign", "-": "sign"}.get(self._next.kind)
        if kind is not None:
            self._operators.append(self._take()._replace(kind=kind))
        return kind is not None

    def _operand(self) -> Operand:
        token = self._next
        is_reserved = keyword.iskeyword(token.text) if self._arithmetic else token.word not in ("", "nan", "metric")
        if is_reserved or token.kind not in ("name", "quoted"):
            return self._value()
        self._take()
        if token.word == "metric" and self._next.kind == "(":
            self._take()
            token = self._take("text", "quoted")
            self._take(")")
        if token.kind != "name":
            return Name(_unquoted(token), is_metric=True, at=token.at)
        return Name(unicodedata.normalize("NFKC", token.text) if self._arithmetic else token.text, is_metric=False, at=token.at)

    def _value(self) -> Value:
        sign = self._take() if self._next.kind in ("+", "-") else None
        token = self._take("number") if sign else self._take("number", "quantity", "text", "true", "false")
        if token.kind == "name":
            return Value(token.word, "flag", token.at)
        if token.kind == "text":
            return Value(_unquoted(token), "text", token.at)
        value = Value(token.text, token.kind, token.at, _number(token.text) if token.kind == "number" else 0)
        return _signed(sign, value) if sign else value

    def _takes_operator(self) -> bool:
        """Takes the token after an operand; returns whether another operand must follow."""
        token = self._next
        op = token.word or token.kind
        level = _LEVELS.get(op, 0) if op != "not" else 0
        if level == _COMPARE:
            self._reduce(_ADD)
            if self._level() == _COMPARE:  # a < b < c is a < b and b < c
                right = self._operands[-1]
                self._reduce(_CHAIN)
                self._operators.append(token._replace(kind="chain"))
                self._operands.append(right)
        elif level >= _ADD and not self._arithmetic:
            raise self._error(token)
        if level:
            self._reduce(level)
            self._operators.append(self._take()._replace(kind=op))
        elif op == ")":
            self._reduce(1)
            if not self._operators:
                raise self._error(token)
            self._operators.pop()
            self._take()
        elif op:
            self._operands.append(self._test())
        return level > 0

    def _test(self) -> NameTest:
        self._reduce(_ADD)
        name = self._operands.pop()
        if not isinstance(name, Name) or self._level() == _COMPARE:
            raise self._error(self._next)
        op = self._take("not", "in", "like", "between", "is").word
        if op == "is":
            op = self._take("not", "null", "nan").word
            return NameTest(name, op) if op != "not" else NameTest(name, self._take("null", "nan").word, negated=True)
        negated = op == "not"
        if negated:
            op = self._take("in", "like", "between").word
        if op == "like":
            token = self._take("text")
            return NameTest(name, op, (Value(_unquoted(token), "text", token.at),), negated)
        if op == "in":
            self._take("(")
        values, separators = [self._value()], ("and",) if op == "between" else (",", ")")
        while self._take(*separators).kind != ")":
            values.append(self._value())
            if op == "between":
                break
        return NameTest(name, op, tuple(values), negated)

    def _level(self) -> int:
        return _LEVELS[self._operators[-1].kind] if self._operators else 0

    def _reduce(self, level: int) -> None:
        while self._level() >= level:
            token = self._operators.pop()
            self._operands.append(self._made(token, _LEVELS[token.kind]))

    def _made(self, token: _Token, level: int) -> Operand | Condition:
        if level <= _CHAIN:
            last = self._pop_condition(token)
            if level == _NOT:
                return Joined("not", [last], last.depth + 1, last.tests)
            return _joined("and" if level == _CHAIN else token.kind, self._pop_condition(token), last)
        right = self._pop_operand(token, level)
        if token.kind == "sign":
            if isinstance(right, Value):
                return _signed(token, right)
            if not self._arithmetic:
                raise self._error(token)
            return _arithmetic(right, "*", Value(token.text + "1", "number", token.at, -1 if token.text == "-" else 1))
        left = self._pop_operand(token, level)
        if level != _COMPARE:
            return _arithmetic(left, token.kind, right)
        op = {"==": "=", "<>": "!="}.get(token.kind, token.kind)
        if isinstance(left, Value) and isinstance(right, Name):
            left, op, right = right, FLIPPED.get(op, op), left
        if isinstance(left, Name) and isinstance(right, Value):
            return NameTest(left, op, (right,))
        if not self._arithmetic and not isinstance(right, Arithmetic):
            raise syntax_error(self._text, right.at)
        return Comparison(op, left, right)

    def _pop_operand(self, token: _Token, level: int) -> Operand:
        operand = self._operands.pop()
        if not isinstance(operand, Operand) or (level != _COMPARE and isinstance(operand, Value) and operand.kind != "number"):
            raise self._error(token)
        return operand

    def _pop_condition(self, token: _Token) -> Condition:
        operand = self._operands.pop()
        if isinstance(operand, Value | Arithmetic):
            raise self._error(token)
        return NameTest(operand, "flag") if isinstance(operand, Name) else operand


def _joined(how: str, left: Condition, right: Condition) -> Joined:
    """Flat: ``a and b and c`` has three parts. Extends the left list, so that a long text takes no quadratic time."""
    (parts, depth), (others, other_depth) = (
        (part.parts, part.depth) if isinstance(part, Joined) and part.how == how else ([part], part.depth + 1) for part in (left, right)
    )
    parts.extend(others)
    return Joined(how, parts, max(depth, other_depth), left.tests + right.tests)


def _arithmetic(left: Operand, op: str, right: Operand) -> Arithmetic:
    first, steps = (left.first, left.steps) if isinstance(left, Arithmetic) else (left, ())
    return Arithmetic(first, (*steps, (op, right)))


def _signed(sign: _Token, value: Value) -> Value:
    number = -value.number if sign.text == "-" else value.number
    text = sign.text + value.text
    return Value(text, value.kind, sign.at, number if len(text) < _INT_CHARS else float(number))


def _number(text: str) -> float:
    if text[:2].lower() in ("0x", "0o", "0b"):
        try:
            return float(int(text, 0))
        except OverflowError:
            return math.inf
    return int(text) if len(text) < _INT_CHARS and text.replace("_", "").isdecimal() else float(text)


def _unquoted(token: _Token) -> str:
    return token.text[1:-1].replace(token.text[0] * 2, token.text[0])
