"""Conditions: they mean what they meant when triggers and the catalog had a language each, and whatever else is given is refused.

`conditions.json` was made by those two languages (commit 4838071), from the conditions in this repository and some hundred generated ones:
whether a trigger's condition holds for each of some rows of numbers, and the tree of a catalog's condition, nested ``and`` and ``or`` flat.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.common.conditions import Comparison, Condition, Joined, NameTest, parse
from tensorstore_ck.common.metric_condition import condition, names_in
from tensorstore_ck.errors import InvalidOptionError

CORPUS = json.loads(Path(__file__).with_name("conditions.json").read_text(encoding="utf-8"))
ROWS = [{name: float(number) for name, number in row.items()} for row in CORPUS["numbers"]]
TRIGGERS: dict[str, str] = CORPUS["triggers"]
CATALOG: dict[str, list[Any]] = CORPUS["catalog"]
MAX_CHARS = 10_000


def answers(text: str) -> str:
    holds = condition(text)
    return "".join(str(int(holds(row))) for row in ROWS)


def tree(node: Condition) -> list[Any]:
    if isinstance(node, Joined):
        return [node.how, *map(tree, node.parts)]
    assert isinstance(node, NameTest)
    values = [[value.kind, repr(value.number) if value.kind == "number" else value.text] for value in node.values]
    return [("not " if node.negated else "") + node.op, node.name.text, node.name.is_metric, *values]


def catalog_tree(text: str) -> list[Any]:
    return tree(parse(text, max_chars=MAX_CHARS))


def test_conditions_mean_what_they_meant_before() -> None:
    assert len(TRIGGERS) > 300
    assert {text: answers(text) for text in TRIGGERS} == TRIGGERS
    assert len(CATALOG) > 300
    assert {text: catalog_tree(text) for text in CATALOG} == CATALOG


def flat(how: str, *trees: list[Any]) -> list[Any]:
    return [how, *(part for each in trees for part in (each[1:] if each[0] == how else [each]))]


@given(st.sampled_from(sorted(TRIGGERS)), st.sampled_from(sorted(TRIGGERS)))
def test_triggers_are_joined(one: str, other: str) -> None:
    both, either = f"(\n{one}\n) and (\n{other}\n)", f"not(\n{one}\n)or(\n{other}\n)"
    pairs = list(zip(TRIGGERS[one], TRIGGERS[other], strict=True))
    with suppress(InvalidOptionError):  # too long together
        assert answers(both) == "".join(str(int(a == b == "1")) for a, b in pairs)
        assert answers(either) == "".join(str(int(a == "0" or b == "1")) for a, b in pairs)


@given(st.sampled_from(sorted(CATALOG)), st.sampled_from(sorted(CATALOG)))
def test_conditions_of_the_catalog_are_joined(one: str, other: str) -> None:
    assert catalog_tree(f"({one}) and ({other})") == flat("and", CATALOG[one], CATALOG[other])
    assert catalog_tree(f"not (({one}) OR {other} or pinned)")[0] == "not"
    assert catalog_tree(f"not ({one}) or ({other})") == flat("or", ["not", CATALOG[one]], CATALOG[other])


operands = st.recursive(
    st.sampled_from(["x", "y", "step", "0", "1", "2.5", ".5", "1e1", "1_0", "0x2"]),
    lambda inner: st.one_of(
        st.builds("{}{}{}".format, inner, st.sampled_from([" + ", "-", " *", "+", " - "]), inner),
        st.builds("({})".format, inner),
        st.builds("- {}".format, inner),
    ),
    max_leaves=6,
)
comparisons = st.lists(st.tuples(st.sampled_from(["<", " <= ", ">", ">= ", " == ", "!="]), operands), min_size=1, max_size=3)
triggers = st.recursive(
    st.builds(lambda first, rest: first + "".join(map("".join, rest)), operands, comparisons),
    lambda inner: st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("not {}".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=5,
)


@given(triggers, st.sampled_from([-1.0, 0.0, 1.0, 2.5, 10.0]), st.sampled_from([0.0, 1.0, 10.0, math.inf]))
def test_triggers_mean_what_they_mean_in_python(text: str, x: float, y: float) -> None:
    numbers = {"x": x, "y": 2.5, "step": y if math.isfinite(y) else 1e3}
    assert condition(text)(numbers) is eval(text, {}, numbers)


def test_what_else_the_catalog_takes_and_refuses() -> None:
    same = {
        "0 < x <= 1 < y": "x > 0 and x <= 1 and y > 1",
        "(x) < (- 1_000)  # a comment": "x < -1000",
        "x >= 0x10 and\\\n ( x < 1and y = 2)": "x >= 16e0 and x < 1 and y = 2",
        "job_损失 = 1": "job_损失 == +1",
        "损失 is nan": "(((损失 is nan)))",
        "(pinned or b) or c and (d and (e))": "pinned or b or (c and d and e)",
    }
    for text, other in same.items():
        assert catalog_tree(text) == catalog_tree(other)
    arithmetic = ["x + 1 < 2", "-x < 1", "x < 1 + 1", "- pinned", "x = -'a'", "x = -7d"]
    operands = ["x < y", "1 < 2", "x < 1 < 2", "1 < x in (1)", "(x < 1) < 2", "not 1", "x in (y)", "and x", "x y", "x < 1 not"]
    for text in (*arithmetic, *operands):
        with pytest.raises(InvalidOptionError, match=r"syntax error at character|ends too early"):
            parse(text, max_chars=MAX_CHARS)


def test_nothing_recurses_and_a_deep_tree_knows_its_size() -> None:
    deep = ["(" * 9999, "x < " + "-" * 9990, "not " * 2500, "x < " + "1+" * 4990, "x<" * 5000, "(1+" * 3000, ")" * 9999, "'" * 9999]
    for text in deep:
        for arithmetic in (False, True):
            with pytest.raises(InvalidOptionError):
                parse(text, max_chars=MAX_CHARS, arithmetic=arithmetic)
    node = parse("not " * 2000 + "(x < 1 and y)", max_chars=MAX_CHARS)
    assert (node.depth, node.tests) == (2002, 2)
    chain = parse("x < y < z + 1", max_chars=MAX_CHARS, arithmetic=True)
    assert (chain.depth, chain.tests) == (2, 2)
    assert isinstance(chain, Joined)
    assert all(isinstance(part, Comparison) for part in chain.parts)


SIGNS = "x1<>=(),+-*/#\\ \n"
WORDS = "1.5e3 7d 'a' \"b\" metric and or not in like between is null nan true"


@given(st.text(max_size=40), st.lists(st.sampled_from([*SIGNS, *WORDS.split(" ")])))
def test_any_text_is_a_condition_or_refused(text: str, words: list[str]) -> None:
    for each in (text, " ".join(words), "".join(words)):
        for arithmetic in (False, True):
            with suppress(InvalidOptionError):
                parse(each, max_chars=MAX_CHARS, arithmetic=arithmetic)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("loss > 5 or loss is nan", {"loss"}),
        ("a / (b - 1) < c and not d", {"a", "b", "c", "d"}),
        ("a in (1, 2) or 0 < x < 1", {"a", "x"}),
        ('late is null or not late is null and "val/acc" between 0 and 1', {"val/acc"}),
        ("1 < 2", set()),
    ],
)
def test_the_metrics_that_a_condition_needs(text: str, names: set[str]) -> None:
    assert names_in(text) == names
