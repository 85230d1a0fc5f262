"""Plans a conversion: which rows of which tensor make each tensor of the other side. Pure: shapes in, ranges of rows out."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple, NoReturn

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.integrations.weight_names.names_file import PARTS, Pattern, Rule, WeightNames


class RowRun(NamedTuple):
    """Consecutive rows that one part has in common with the fused weight."""

    fused: int
    """The first row there."""
    part: int
    """The first row in the part."""
    rows: int


def row_runs(rule: Rule, names: WeightNames, rows: int) -> list[list[RowRun]]:
    """For each part the runs of its rows, in order; of a fused weight of `rows` rows. Raises `ValueError` if `rows` does not fit."""
    if rule.fusion == "names":
        return [[RowRun(0, 0, rows)]]
    if rule.fusion == "vocabulary":
        if rows < names.vocab_size:
            raise ValueError(f"{rows} rows are fewer than the vocab_size of {names.vocab_size}")
        return [[RowRun(0, 0, names.vocab_size)]]
    if rule.fusion == "gate_up":
        if rows % 2:
            raise ValueError(f"{rows} rows are not those of a gate and of as many of up")
        half = rows // 2
        return [[RowRun(0, 0, half)], [RowRun(half, 0, half)]]
    heads, groups = names.attention_heads, names.query_groups
    if rows % (heads + 2 * groups):
        raise ValueError(f"{rows} rows are not those of {heads} attention heads and {groups} query groups")
    head = rows // (heads + 2 * groups)
    queries = heads // groups * head
    group = queries + 2 * head
    parts = [
        [RowRun(number * group, number * queries, queries) for number in range(groups)],
        [RowRun(number * group + queries, number * head, head) for number in range(groups)],
        [RowRun(number * group + queries + head, number * head, head) for number in range(groups)],
    ]
    if len(rule.hf) == len(parts):
        return parts
    starts = (0, heads * head, (heads + groups) * head)
    return [[run._replace(part=start + run.part) for start, runs in zip(starts, parts, strict=True) for run in runs]]


SIDES: Final = ("Megatron", "Hugging Face")
_SHOWN: Final = 8


class TensorForm(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class RowCopy(NamedTuple):
    """Consecutive rows of a source. An index comes before the rows where a tensor is stacked; a tensor without dims is one row."""

    source: str
    source_index: tuple[int, ...]
    source_row: int
    target_index: tuple[int, ...]
    target_row: int
    rows: int


class ConvertedTensor(NamedTuple):
    """A tensor of the other side."""

    form: TensorForm
    copies: list[RowCopy]
    """They cover it exactly once, in the order of its elements."""


def row_box(index: tuple[int, ...], row: int, rows: int, shape: tuple[int, ...]) -> BoxBounds:
    """These rows of a tensor of this shape, which has the dims of `index` in front of its rows."""
    inner = shape[len(index) :]
    return BoxBounds((*index, *((row,) + (0,) * len(inner))[: len(inner)]), (*(1,) * len(index), *((rows, *inner[1:]) if inner else ())))


def plan_conversion(names: WeightNames, tensors: Mapping[str, TensorForm]) -> dict[str, ConvertedTensor]:
    """All tensors of the side that the names of `tensors` are not of, by name.

    Raises:
        MismatchError: a name is on neither side, a part is missing, or a shape does not fit.
    """
    unmatched = [[name for name in tensors if not any(_matches(rule, side, name) for rule in names.rules)] for side in (0, 1)]
    side = min((0, 1), key=lambda number: len(unmatched[number]))
    if not tensors or unmatched[side]:
        lacking = unmatched[side]
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        what = f"{', '.join(lacking[:_SHOWN])}{more}" if lacking else "nothing to convert: there are no tensors"
        raise MismatchError(
            f"{names.path} has no name of {SIDES[side]} for {len(lacking)} of {len(tensors)} tensors ({what}): add them to the file, or "
            "leave the tensors out with --exclude (exclude=)",
            object_id=lacking[0] if lacking else names.path,
        )
    planned = _Plan(names, tensors)
    for rule in names.rules:
        (planned.split if side == 0 else planned.fuse)(rule)
    return planned.made


def _matches(rule: Rule, side: int, name: str) -> bool:
    return any(pattern.match(name) is not None for pattern in ((rule.megatron,) if side == 0 else rule.hf))


class _Plan:
    def __init__(self, names: WeightNames, tensors: Mapping[str, TensorForm]) -> None:
        self.made: dict[str, ConvertedTensor] = {}
        self._names, self._tensors = names, tensors

    def split(self, rule: Rule) -> None:
        """Megatron's tensors of a rule -> those of Hugging Face."""
        stacked = len(rule.stacked)
        for name, values in self._found(rule.megatron):
            shape, dtype = self._tensors[name]
            if len(shape) < stacked:
                self._fail(name, f"it has the shape {list(shape)}, and {', '.join(rule.stacked)} in front of it needs {stacked} dims")
            inner = shape[stacked:]
            for index in product(*map(range, shape[:stacked])):
                bound = {**values, **dict(zip(rule.stacked, index, strict=True))}
                for pattern, runs in zip(rule.hf, self._runs(rule, name, inner), strict=True):
                    rows = sum(run.rows for run in runs)
                    form = TensorForm((rows, *inner[1:]) if inner else (), dtype)
                    copies = [
                        RowCopy(source=name, source_index=index, source_row=run.fused, target_index=(), target_row=run.part, rows=run.rows)
                        for run in runs
                    ]
                    self._add(pattern.name(bound), form, copies)

    def fuse(self, rule: Rule) -> None:
        """Hugging Face's tensors of a rule -> those of Megatron."""
        groups: dict[str, dict[tuple[int, ...], dict[str, int]]] = {}
        for pattern in rule.hf:
            for _, values in self._found(pattern):
                index = tuple(values[variable] for variable in rule.stacked)
                groups.setdefault(rule.megatron.name(values), {})[index] = values
        for target, members in groups.items():
            sizes = tuple(max(numbers) + 1 for numbers in zip(*members, strict=True))
            if len(members) != prod(sizes):
                index = next(position for position in product(*map(range, sizes)) if position not in members)
                self._fail(target, f"{', '.join(rule.stacked)} = {', '.join(map(str, index))} is missing")
            form: TensorForm | None = None
            copies: list[RowCopy] = []
            for index in sorted(members):
                inner, more = self._fused(rule, target, members[index], index)
                if form is not None and form != inner:
                    self._fail(target, f"its parts have the forms {_text(form)} and {_text(inner)}")
                form = inner
                copies += more
            assert form is not None
            self._add(target, TensorForm((*sizes, *form.shape), form.dtype), copies)

    def _fused(self, rule: Rule, target: str, values: Mapping[str, int], index: tuple[int, ...]) -> tuple[TensorForm, list[RowCopy]]:
        parts = [pattern.name(values) for pattern in rule.hf]
        missing = [name for name in parts if name not in self._tensors]
        if missing:
            self._fail(target, f"{', '.join(missing)} is missing")
        forms = [self._tensors[name] for name in parts]
        inner = (sum(form.shape[0] for form in forms), *forms[0].shape[1:]) if all(form.shape for form in forms) else ()
        all_runs = self._runs(rule, target, inner)
        expected = [TensorForm((sum(run.rows for run in runs), *inner[1:]) if inner else (), forms[0].dtype) for runs in all_runs]
        if forms != expected:
            numbers = {
                "qkv": f" with {self._names.attention_heads} attention heads and {self._names.query_groups} query groups",
                "vocabulary": f": vocab_size is {self._names.vocab_size}",
            }
            shown = ", ".join(f"{name} {_text(form)}" for name, form in zip(parts, forms, strict=True))
            self._fail(target, f"{shown} do not fit each other{numbers.get(rule.fusion, '')}")
        copies = [
            RowCopy(source=name, source_index=(), source_row=run.part, target_index=index, target_row=run.fused, rows=run.rows)
            for name, runs in zip(parts, all_runs, strict=True)
            for run in runs
        ]
        return TensorForm(inner, forms[0].dtype), sorted(copies, key=lambda copy: copy.target_row)

    def _runs(self, rule: Rule, name: str, inner: Sequence[int]) -> list[list[RowRun]]:
        try:
            if not inner and len(PARTS[rule.fusion]) > 1:
                raise ValueError("it has no rows")
            return row_runs(rule, self._names, inner[0] if inner else 1)
        except ValueError as exc:
            self._fail(name, str(exc))

    def _found(self, pattern: Pattern) -> Iterator[tuple[str, dict[str, int]]]:
        for name in self._tensors:
            if (values := pattern.match(name)) is not None:
                yield name, values

    def _add(self, name: str, form: TensorForm, copies: list[RowCopy]) -> None:
        if name in self.made:
            self._fail(name, "two tensors get this name")
        self.made[name] = ConvertedTensor(form, copies)

    def _fail(self, name: str, what: str) -> NoReturn:
        raise MismatchError(f"{self._names.path} does not fit {name}: {what}", object_id=name)


def _text(form: TensorForm) -> str:
    return f"{form.dtype} {list(form.shape)}"
