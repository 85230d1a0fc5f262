"""Conditions on metrics: ``val_loss < 2.1 and not (acc < 0.5 or step == 0)``."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tensorstore_ck.common.conditions import Arithmetic, Comparison, Condition, Joined, Name, NameTest, Operand, parse, syntax_error

MAX_CHARS: Final = 1000
Numbers = Mapping[str, float]
_Holds = Callable[[Numbers], bool]
_TESTS: Final[Mapping[str, Callable[..., bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
    "in": lambda number, *others: number in others,
    "between": lambda number, low, high: low <= number <= high,
}
_COUNT: Final[Mapping[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}


def condition(text: str) -> _Holds:
    """A function of numbers: whether the condition holds. A missing number, or NaN, satisfies no test but `is null` and `is nan`.

    Raises:
        InvalidOptionError: it is not a condition on metrics; the message says where.
    """
    return _condition(parse(text, max_chars=MAX_CHARS, arithmetic=True), text)


def names_in(text: str) -> frozenset[str]:
    """The metrics that a condition needs: all but those that it only tests for ``is null``."""
    return frozenset(_names(parse(text, max_chars=MAX_CHARS, arithmetic=True)))


def _names(node: Condition | Operand) -> Iterator[str]:
    match node:
        case Joined(_, parts):
            for part in parts:
                yield from _names(part)
        case Comparison(_, left, right):
            yield from _names(left)
            yield from _names(right)
        case Arithmetic(first, steps):
            for operand in (first, *(right for _, right in steps)):
                yield from _names(operand)
        case NameTest(name, op):
            yield from () if op == "null" else (name.text,)
        case Name(text):
            yield text


def _condition(node: Condition, text: str) -> _Holds:
    match node:
        case Joined(how, parts):
            conditions = [_condition(part, text) for part in parts]
            if how == "not":
                return lambda numbers: not conditions[0](numbers)
            join = all if how == "and" else any
            return lambda numbers: join(holds(numbers) for holds in conditions)
        case Comparison(op, left, right):
            return _test([left, right], text, _TESTS[op])
        case NameTest(name, "null", _, negated):
            return lambda numbers: (name.text in numbers) is negated
        case NameTest(name, "nan", _, negated):
            return lambda numbers: math.isnan(numbers.get(name.text, 0)) is not negated
        case NameTest(name, op, values, negated) if op in _TESTS:
            return _test([name, *values], text, _TESTS[op], negated=negated)
    raise syntax_error(text, node.name.at)


def _test(operands: list[Operand], text: str, holds: Callable[..., bool], *, negated: bool = False) -> _Holds:
    numbers_of = [_number(operand, text) for operand in operands]

    def test(numbers: Numbers) -> bool:
        values = [number(numbers) for number in numbers_of]
        return not any(map(math.isnan, values)) and holds(*values) is not negated

    return test


def _number(operand: Operand, text: str) -> Callable[[Numbers], float]:
    if isinstance(operand, Name):
        name = operand.text
        return lambda numbers: float(numbers.get(name, math.nan))
    if isinstance(operand, Arithmetic):
        first, steps = _number(operand.first, text), [(_COUNT[op], _number(right, text)) for op, right in operand.steps]

        def count(numbers: Numbers) -> float:
            value = first(numbers)
            for step, right in steps:
                value = step(value, right(numbers))
            return value

        return count
    if operand.kind != "number":
        raise syntax_error(text, operand.at)
    number = float(operand.number)
    return lambda numbers: number
