"""Conditions on a history in memory find what `tsck find` finds in a catalog; attributes and their limits; ``REF^best:metric``."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.errors import InvalidNameError, InvalidOptionError, NotFoundError
from tensorstore_ck.format.attributes import MAX_ATTRIBUTES, MAX_NAME_CHARS, MAX_TEXT_CHARS
from tensorstore_ck.log import Op
from tensorstore_ck.maintenance.copy_store import copy
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import Clock, open_store

NAN, DAY = float("nan"), 86_400
ORDER = ("=", "!=", "<", "<=", ">", ">=")
NUMBERS = {
    "step": ("0", "2", "2.5"),
    "loss": ("1", "2.0", "-3"),
    "lr": ("0.01", "1e-4"),
    "config.layers": ("2", "3"),
    "both": ("0", "1"),
    "epoch": ("1", "1.5"),
    "size": ("0", "4kB"),
    "new_bytes": ("900", "1500"),
    "age": ("3d", "100w"),
    "time": ("'2033-05-22'",),
}
TEXTS = {
    "ref": ("'runs/a'", "'b'"),
    "job": ("'a'", "'b'"),
    "config.name": ("'x1'", "'X1'", "'100%'", "''"),
    "triggers": ("'first'", "'first,at_steps'"),
}
LIKES = ("'%'", "'x_'", "'X%'", r"'100\%'", r"'100\_'", "'%a%'", "'f%t_%'", "'x.'", "''")
OTHERS = (
    *("loss is null", "loss is not null", "loss is nan", "not loss is nan", "lr is null", "note is nan", "both is not nan", "step is null"),
    *("step between 1 and 3", "step not between 1 and 3", "loss not in (1, 2)", "lr in (0.01, 7)", "config.name not in ('x1', 'x2')"),
    *("config.flag = true", "config.flag != true", "config.flag = 1", "mark = 'bad'", "mark is null", "mark is not null"),
    *("not (loss < 2 or lr = 0.01) and epoch >= 0", "0 < loss < 3", '"loss" > 1', "metric('step') = 7", '"step" = 7', "save_seconds >= 0"),
)
CONDITIONS = [
    *(
        f"{name} {op} {value}"
        for name, values in NUMBERS.items()
        for op, value in product(ORDER, values)
        if name not in ("age", "time") or op[0] in "<>"
    ),
    *(f"{name} {op} {value}" for name, values in TEXTS.items() for op, value in product(("=", "!="), values)),
    *(f"{name} {op} {value}" for name, op, value in product(TEXTS, ("like", "not like"), LIKES)),
    *OTHERS,
]


class Searched(NamedTuple):
    """A store, and a catalog of it."""

    store: tsck.Store
    catalog: Catalog


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    clock = Clock(2_000_000_000_000_000_000)
    with (
        open_store(MemoryBackend(clock=clock), clock=clock) as store,
        Catalog(tmp_path_factory.mktemp("c") / "c.sqlite", clock=clock) as catalog,
    ):
        losses = [{"loss": value} for value in (1.0, 2.0, NAN, float("inf"), -3.0)]
        for number in range(8):
            metrics: dict[str, float] = {**losses[number % 5], "both": 1} if number % 4 else {"step": 7}
            metadata = {
                "config": {"layers": number % 3 + 1, "name": ("x1", "X1", "100%", "x2")[number % 4], "flag": number % 2 == 0},
                "both": 0,
                "note": NAN,
                "list": [1],
            }
            store.put_snapshot(
                {"bytes": np.zeros(1000 * number, np.uint8)},
                ref=("runs/a", "b")[number % 2],
                step=None if number == 6 else number,
                metrics=metrics,
                metadata=metadata if number % 5 else None,
                attributes={"lr": 10.0**-number} if number % 3 else None,
                triggers=["first", "at_steps"][: number % 3],
                epoch=number / 2 if number % 2 else None,
                unchanged="ok",
            )
            clock.advance(DAY)
        store.mark("b", reason="?")
        catalog.sync(store)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tensorstore_ck.log.snapshot_log.time", SimpleNamespace(time_ns=clock))
            yield Searched(store, catalog)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_log_finds_what_a_catalog_finds(searched: Searched, condition: str) -> None:
    found = {snapshot.id for snapshot in searched.catalog.find(condition)}
    assert {snapshot.id for snapshot in searched.store.log().where(condition)} == found


def test_each_kind_of_condition_finds_some_and_not_all(searched: Searched) -> None:
    counts = {condition: len(searched.store.log().where(condition)) for condition in CONDITIONS}
    for name in (*NUMBERS, *TEXTS):
        assert any(0 < count < 8 for condition, count in counts.items() if condition.startswith(f"{name} ")), name


@pytest.mark.parametrize("name", ["loss", "lr", "both", "step", "size", "new_bytes", "config.layers", "age", "time"])
@pytest.mark.parametrize("descending", [False, True])
def test_a_log_sorts_as_a_catalog_does(searched: Searched, name: str, *, descending: bool) -> None:
    ordered = [snapshot.id for snapshot in searched.store.log().sorted_by(name, descending=descending)]
    assert ordered == [snapshot.id for snapshot in searched.catalog.find(order_by=name, descending=descending)]


def test_what_is_left_is_still_a_log(searched: Searched) -> None:
    log = searched.store.log("b").where("step >= 5")
    assert [snapshot.step for snapshot in log] == [7, 5]
    assert log.heads == {log[0].id: ["b"]}
    assert log[:1].heads == log.heads


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("los < 1", "did you mean loss"),
        ("zzz = 1", "there are both"),
        ("loss = 'x'", "compared with a number"),
        ("loss < true", "compared with a number"),
        ("config.name < 'x'", "a text here"),
        ("pinned", "`tsck find` tests it"),
        ("age = 3d", "age is an age"),
        ("root like 'a'", "root is a root"),
        ("step = '1'", "compared with a number"),
        ("loss", "not with nothing"),
        ("loss <", "ends too early"),
        ("not " * 50 + "loss < 1", "nested 40 deep"),
    ],
)
def test_what_makes_no_sense(searched: Searched, condition: str, message: str) -> None:
    with pytest.raises((InvalidOptionError, NotFoundError), match=message):
        searched.store.log().where(condition)


def test_what_cannot_be_sorted_by(searched: Searched) -> None:
    with pytest.raises(InvalidOptionError, match="cannot sort by ref"):
        searched.store.log().sorted_by("ref")
    with pytest.raises(NotFoundError, match="'nope'"):
        searched.store.log().sorted_by("nope")
    assert searched.store.log("b", limit=1)[:0].where("nope = 1").sorted_by("nope") == []


# --- attributes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[tsck.Store]:
    with open_store(MemoryBackend()) as opened:
        yield opened


def test_attributes_are_what_is_passed_and_scalars_of_the_metadata(store: tsck.Store) -> None:
    metadata = {"a": {"b": {"c": 1}}, "lr": 5, "on": True, "text": "x" * MAX_TEXT_CHARS, "long": "x" * (MAX_TEXT_CHARS + 1), "none": None}
    put = store.put_snapshot({}, ref="r", step=1, metadata=metadata, attributes={"lr": 3, "who": "ada"})
    assert put.attributes == {"lr": 3.0, "who": "ada", "on": 1.0, "text": "x" * MAX_TEXT_CHARS, "a.b.c": 1.0}
    assert store.log("r") == [put]
    assert store.metadata("r") == metadata
    assert store.show("r").snapshot.root == put.root


def test_the_root_does_not_cover_attributes(store: tsck.Store) -> None:
    roots = [store.put_snapshot({}, ref=name, attributes={"lr": number}).root for number, name in enumerate("ab")]
    assert roots[0] == roots[1]


def test_more_metadata_than_fits_is_kept_and_not_searched(store: tsck.Store) -> None:
    metadata = {f"{number:03}": number for number in range(MAX_ATTRIBUTES + 5)}
    put = store.put_snapshot({}, ref="r", metadata=metadata, attributes={"lr": 1})
    assert [*put.attributes] == ["lr", *[*metadata][: MAX_ATTRIBUTES - 1]]
    assert store.metadata("r") == metadata


@pytest.mark.parametrize(
    "attributes",
    [
        *({"a": None}, {"a": [1]}, {"a": {"b": 1}}, {"a": 1j}, {"a": 1 << 64}, {"a": "x" * (MAX_TEXT_CHARS + 1)}, {"a": "\0"}),
        *({"a": "\udcff"}, {"": 1}, {"n" * (MAX_NAME_CHARS + 1): 1}, [1], "lr", {str(number): 1 for number in range(MAX_ATTRIBUTES + 1)}),
    ],
)
def test_what_is_no_attribute(store: tsck.Store, attributes: object) -> None:
    with pytest.raises(InvalidOptionError, match="attribute"):
        store.put_snapshot({}, ref="r", attributes=attributes)  # type: ignore[arg-type]
    assert store.branches() == {}


@pytest.mark.parametrize("invalid", [7, {"a": 1}, {"a": "x" * 300}, {str(number): 1.0 for number in range(65)}, {"a": b"x"}])
def test_attributes_of_another_program_that_are_not_valid_count_as_absent(store: tsck.Store, invalid: object) -> None:
    put = store.put_snapshot({}, ref="r", attributes={"lr": 1})
    entry = next(store.engine.log.entries(put.entry))
    fields = {
        **next(op for op in entry.ops if op.name == "put").fields,
        "attributes": invalid,
        "ref": "other",
        "txn": b"t" * 16,
        "snapshot": b"s" * 16,
    }
    store.engine.log.append(lambda _: [Op(fields)])
    assert store.resolve("other").attributes == {}


def test_copies_and_reopened_stores_have_them(store: tsck.Store, tmp_path: Path) -> None:
    put = store.put_snapshot({"a": 1}, ref="r", step=1, attributes={"lr": 0.5})
    with tsck.open(tmp_path / "other", create=True) as other:
        copy(store, other)
        assert other.resolve("r").attributes == put.attributes


# --- the best snapshot ------------------------------------------------------------------------------------------------


def test_the_best_of_a_branch(store: tsck.Store) -> None:
    for step, loss in enumerate((3.0, 1.0, NAN, 1.0, 2.0)):
        store.put_snapshot({}, ref="runs/a", step=step, metrics={"val/loss": loss, "a:b": -loss}, unchanged="ok")
    store.put_snapshot({}, ref="runs/a", step=5, unchanged="ok")
    steps = {address: store.resolve(f"runs/a^best:{address}").step for address in ("val/loss", "val/loss:min", "val/loss:max", "a:b")}
    assert steps == {"val/loss": 3, "val/loss:min": 3, "val/loss:max": 0, "a:b": 0}
    store.mark("runs/a@3", reason="?")
    assert store.resolve("runs/a^best:val/loss").step == 1
    assert store.checkout("runs/a^best:val/loss") == {}


def test_there_is_no_best_without_the_metric_or_the_branch(store: tsck.Store) -> None:
    store.put_snapshot({}, ref="runs/a", metrics={"loss": NAN, "acc": 1})
    store.tag("v1", "runs/a")
    with pytest.raises(NotFoundError, match=r"has a metric 'loss' \(metrics: acc, loss\)"):
        store.resolve("runs/a^best:loss")
    for address in ("nope^best:acc", "v1^best:acc"):
        with pytest.raises(NotFoundError, match="needs a branch"):
            store.resolve(address)
    others: tuple[Any, ...] = ("runs/a^", "runs/a^1", "runs/a^best", store.resolve("runs/a"))
    for address in others:
        with pytest.raises(InvalidNameError, match=r"use a ref, ref@step, ref~n, ref\^best:metric, .*`snapshot\.root`"):
            store.resolve(address)
    with pytest.raises(InvalidNameError):
        store.resolve("^best:acc")


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_text_that_almost_fits_a_pattern_many_times_takes_no_time(store: tsck.Store) -> None:
    store.put_snapshot({}, ref="runs/a", attributes={"name": "a" * MAX_TEXT_CHARS})
    assert list(store.log().where("name like '%a%a%a%a%a%a%a%a%b'")) == []
    assert len(store.log().where("name like '%a%a%a%a%a%a%a%a%a'")) == 1
