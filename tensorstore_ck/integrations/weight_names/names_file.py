"""A file of weight names: TOML with the names of Megatron-core on the left, and those of Hugging Face on the right.

    attention_heads = 32
    query_groups = 8
    vocab_size = 32000

    [vocabulary]
    "embedding.word_embeddings.weight" = "model.embed_tokens.weight"

    [names]
    "decoder.layers.{i}.mlp.linear_fc2.weight" = "model.layers.{i}.mlp.down_proj.weight"

    [qkv]
    "decoder.layers.{i}.self_attention.linear_qkv.weight" = ["...q_proj.weight", "...k_proj.weight", "...v_proj.weight"]

    [gate_up]
    "decoder.layers.{i}.mlp.linear_fc1.weight" = ["...gate_proj.weight", "...up_proj.weight"]

``{i}`` stands for a number between dots. If only the right side has it, the tensor of Megatron has one more axis for it, in front. One
name in place of the three of ``[qkv]`` is a tensor of Hugging Face that has all queries, then all keys, then all values. Megatron may have
more rows than ``vocab_size`` of what is in ``[vocabulary]``, which are padding.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.foreign_text import MAX_TOML_BYTES, parse_toml
from tensorstore_ck.errors import InputError, NotFoundError

Fusion = Literal["names", "vocabulary", "qkv", "gate_up"]
PARTS: Final[Mapping[Fusion, tuple[str, ...]]] = {
    "names": ("",),
    "vocabulary": ("",),
    "qkv": ("query", "key", "value"),
    "gate_up": ("gate", "up"),
}
_NUMBERS: Final = ("attention_heads", "query_groups", "vocab_size")


class Pattern(NamedTuple):
    """A name with variables."""

    text: str

    def match(self, name: str) -> dict[str, int] | None:
        """The values of the variables; None if it is no such name."""
        parts, values = name.split("."), dict[str, int]()
        pattern = self.text.split(".")
        if len(parts) != len(pattern):
            return None
        for here, part in zip(pattern, parts, strict=True):
            if _is_variable(here):
                if not (part.isascii() and part.isdecimal() and str(int(part)) == part and values.setdefault(here, int(part)) == int(part)):
                    return None
            elif here != part:
                return None
        return values

    def name(self, values: Mapping[str, int]) -> str:
        """The name with these values."""
        return ".".join(str(values[part]) if _is_variable(part) else part for part in self.text.split("."))

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables in their order."""
        return tuple(dict.fromkeys(filter(_is_variable, self.text.split("."))))


class Rule(NamedTuple):
    """A tensor of Megatron, and the tensors of Hugging Face that are the same."""

    megatron: Pattern
    hf: tuple[Pattern, ...]
    fusion: Fusion

    @property
    def stacked(self) -> tuple[str, ...]:
        """The variables that are axes of Megatron's tensor."""
        return tuple(variable for variable in self.hf[0].variables if variable not in self.megatron.variables)


class WeightNames(NamedTuple):
    """The content of a file."""

    path: str
    rules: tuple[Rule, ...]
    attention_heads: int
    """0: the file has no ``[qkv]``."""
    query_groups: int
    vocab_size: int
    """0: the file has no ``[vocabulary]``."""


def read_names(path: str | os.PathLike[str]) -> WeightNames:
    """The content of a file of weight names. Raises `NotFoundError` if there is no such file, `InputError` if it is none."""
    shown = os.fspath(path)
    with os_errors("read", shown):
        try:
            with open(shown, "rb") as file:
                data = file.read(MAX_TOML_BYTES + 1)
        except FileNotFoundError as exc:
            raise NotFoundError(f"there is no file {shown}: give the path of a file of weight names", object_id=shown) from exc
    try:
        return _parsed(shown, parse_toml(data))
    except ValueError as exc:
        raise InputError(f"{shown} is no file of weight names: {exc}", object_id=shown) from exc


def _parsed(path: str, document: dict[str, Any]) -> WeightNames:
    unknown = [key for key in document if key not in (*_NUMBERS, *PARTS)]
    if unknown:
        raise ValueError(f"it has {unknown[0]!r}; it may have {', '.join((*_NUMBERS, *PARTS))}")
    rules = [rule for fusion in PARTS for rule in _rules(fusion, document.get(fusion, {}))]
    if not rules:
        raise ValueError("it has no names")
    heads, groups, vocabulary = (document.get(key, 0) for key in _NUMBERS)
    if document.get("qkv") and not (type(heads) is int and type(groups) is int and 0 < groups <= heads and heads % groups == 0):
        raise ValueError("[qkv] needs attention_heads and query_groups, of which the second divides the first")
    if document.get("vocabulary") and not (type(vocabulary) is int and vocabulary > 0):
        raise ValueError("[vocabulary] needs vocab_size, the number of rows of Hugging Face's tensors")
    return WeightNames(path, tuple(rules), heads, groups, vocabulary)


def _rules(fusion: Fusion, table: Any) -> Iterator[Rule]:
    if type(table) is not dict:
        raise ValueError(f"[{fusion}] is no table")
    for left, right in table.items():
        names = [right] if type(right) is str else right
        parts = PARTS[fusion]
        is_one = type(right) is str and fusion in ("names", "vocabulary", "qkv")
        if not is_one and (type(names) is not list or len(names) != len(parts) or any(type(name) is not str for name in names)):
            wanted = "one name" if len(parts) == 1 else f"a list of {len(parts)} names: {', '.join(parts)}"
            raise ValueError(f"{left!r} in [{fusion}] needs {wanted}")
        rule = Rule(Pattern(left), tuple(map(Pattern, names)), fusion)
        variables = {pattern.variables for pattern in rule.hf}
        differ = len({frozenset(names) for names in variables}) > 1
        if differ or not set(rule.megatron.variables) <= set(rule.hf[0].variables):
            raise ValueError(f"{left!r} in [{fusion}] has other variables than {', '.join(map(repr, names))}")
        yield rule


def _is_variable(part: str) -> bool:
    return len(part) > 2 and part[0] == "{" and part[-1] == "}" and part[1:-1].isidentifier()
