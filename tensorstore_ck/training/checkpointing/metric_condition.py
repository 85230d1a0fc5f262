"""Conditions on metrics: ``val_loss < 2.1 and not (acc < 0.5 or step == 0)``. Parsed, never run as Python.

Names, numbers, ``+ - * /``, comparisons (also in a row, as ``0 < x < 1``), ``and``, ``or``, ``not`` and parentheses; nothing else.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from tensorstore_ck.errors import InvalidOptionError

MAX_CHARS: Final = 1000
Numbers = Mapping[str, float]
_Node = Callable[[Numbers], float]
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_COUNT: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if b else math.nan,
}


def condition(text: str) -> Callable[[Numbers], bool]:
    """What says whether it holds for some numbers. A comparison with a number that is missing or NaN does not hold, whichever it is.

    Raises:
        InvalidOptionError: it is no such condition; the message says where.
    """
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        raise InvalidOptionError(f"a condition must be a text of at most {MAX_CHARS:,} characters", object_id="condition")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise InvalidOptionError(f"{text!r} is no condition: {getattr(exc, 'msg', exc)}", object_id=text) from exc
    return _condition(parsed, text)


def _condition(node: ast.expr, text: str) -> Callable[[Numbers], bool]:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            each = [_condition(value, text) for value in values]
            return lambda numbers: all(holds(numbers) for holds in each)
        case ast.BoolOp(op=ast.Or(), values=values):
            some = [_condition(value, text) for value in values]
            return lambda numbers: any(holds(numbers) for holds in some)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            other = _condition(operand, text)
            return lambda numbers: not other(numbers)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            numbers_of = [_number(value, text) for value in (left, *comparators)]
            compare = [_COMPARE[type(op)] for op in ops]

            def holds(numbers: Numbers) -> bool:
                found = [each(numbers) for each in numbers_of]
                return not any(map(math.isnan, found)) and all(op(a, b) for op, a, b in zip(compare, found, found[1:], strict=False))

            return holds
    raise _refused(node, text, "a comparison such as val_loss < 2.1")


def _number(node: ast.expr, text: str) -> _Node:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            number = float(value)
            return lambda numbers: number
        case ast.Name(id=name):
            return lambda numbers: float(numbers.get(name, math.nan))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            inner, sign = _number(operand, text), -1.0 if isinstance(op, ast.USub) else 1.0
            return lambda numbers: sign * inner(numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COUNT:
            one, other, count = _number(left, text), _number(right, text), _COUNT[type(op)]
            return lambda numbers: count(one(numbers), other(numbers))
    raise _refused(node, text, "a name or a number")


def _refused(node: ast.expr, text: str, wanted: str) -> InvalidOptionError:
    found = ast.get_source_segment(text.strip(), node) or text
    return InvalidOptionError(f"{text!r} is no condition: {found!r} stands where {wanted} must", object_id=text)
