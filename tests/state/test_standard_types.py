"""What torch.save takes of the standard library, dataclasses and enums: stored without pickle, and no class is called by a stored name."""

import sys
from argparse import Namespace
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, auto
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, UnsupportedValueError
from tensorstore_ck.state import capture, restore
from tensorstore_ck.state.registered_types import registered_name
from tests.state.fake import FakeContent, round_trip

STANDARD: dict[str, Any] = {
    "Namespace": Namespace(lr=1e-3, layers=[1, 2]),
    "SimpleNamespace": SimpleNamespace(lr=1e-3, nested=SimpleNamespace(a=1)),
    "Path": Path("/data/../run 1"),
    "PurePosixPath": PurePosixPath("a/b"),
    "datetime": datetime(2026, 11, 27, 10, 0, 0, 123456),
    "datetime in UTC": datetime(2026, 11, 27, 10, tzinfo=UTC),
    "datetime with an offset": datetime(2026, 11, 27, 10, tzinfo=timezone(timedelta(hours=-3, minutes=-30), "NST")),
    "fold": datetime(2026, 10, 25, 2, 30, fold=1),
    "date": date(2026, 2, 28),
    "time": time(23, 59, 59, 999999, tzinfo=UTC),
    "timedelta": timedelta(days=-1, microseconds=3),
    "timezone": timezone(timedelta(hours=5), "X"),
    "UUID": UUID(int=7),
    "Decimal": Decimal("1.10"),
    "Decimal NaN": Decimal("-0"),
    "Fraction": Fraction(-3, 7),
    "range": range(10, 0, -3),
    "deque": deque([1.5, "x", (2,)], maxlen=5),
    "deque without an end": deque(),
}


NAMES = [
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "datetime.datetime",
    "datetime.date",
    "datetime.time",
    "datetime.timedelta",
]
NAMES += [
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "uuid.UUID",
    "decimal.Decimal",
    "fractions.Fraction",
    "range",
    "collections.deque",
]
WRONG: list[Any] = [None, 7, "x", [1], {"a": 1}, [1, 0], ["x", "y", "z", "w"], {1: 2}, {"items": 3, "maxlen": "x"}, [10**30] * 3]


class Phase(Enum):
    WARM_UP = "warm-up"
    MAIN = 2


class Order(IntEnum):
    FIRST = 1


class Parts(Flag):
    A = auto()
    B = auto()


@dataclass
class Config:
    lr: float
    phase: Phase = Phase.MAIN
    weights: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


@pytest.mark.parametrize("name", STANDARD)
def test_comes_back_as_what_it_is(name: str) -> None:
    value = STANDARD[name]
    (got, inner) = round_trip((value, {"inside": [value]}))
    for restored in (got, inner["inside"][0]):
        assert type(restored) is type(value)
        assert restored == value
        assert repr(restored) == repr(value)


def test_a_deque_and_a_namespace_hold_tensors(tmp_path: Any) -> None:
    state = {"losses": deque([torch.ones(3)], maxlen=2), "args": Namespace(mask=torch.arange(4))}
    with tsck.open(tmp_path / "ck", create=True) as store:
        store.put_snapshot(state, ref="x")
        assert {row[0] for row in store.show("x").tensors} == {"losses.items.0", "args.mask"}
        got = store.checkout("x")
        into: dict[str, Any] = {"losses": deque([torch.zeros(3)], maxlen=2), "args": Namespace(mask=torch.zeros(4, dtype=torch.int64))}
        mask = into["args"].mask
        filled = store.checkout("x", into=into)
    assert got["losses"].maxlen == 2
    assert torch.equal(got["losses"][0], torch.ones(3))
    assert torch.equal(filled["args"].mask, torch.arange(4))
    assert mask is filled["args"].mask, "in place"


def test_dataclasses_and_enums_are_plain_values_unless_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"config": Config(1e-3, Phase.WARM_UP, torch.ones(2)), "point": Point(1), "order": Order.FIRST, "parts": Parts.A | Parts.B}
    got = round_trip(state)
    assert got["config"] | {"weights": 0} == {"lr": 1e-3, "phase": "warm-up", "weights": 0, "names": []}
    assert torch.equal(got["config"]["weights"], torch.ones(2))
    assert got["point"] == {"x": 1, "y": 2}
    assert (got["order"], got["parts"]) == (1, 3)
    for names in ("_registered_classes", "_registered_names"):
        monkeypatch.setattr(f"tensorstore_ck.state.registered_types.{names}", {})
    plain = FakeContent(capture(state))
    for cls in (Config, Point, Phase, Order, Parts):
        tsck.register_type(cls, cls.__name__)
    for stored in (plain, FakeContent(capture(state))):
        restored = restore(stored)
        assert type(restored["config"]) is Config
        assert restored["config"].phase is Phase.WARM_UP
        assert restored["point"] == Point(1)
        assert restored["order"] is Order.FIRST
        assert restored["parts"] == Parts.A | Parts.B


def test_the_class_of_the_target_is_restored(tmp_path: Any) -> None:
    with tsck.open(tmp_path / "ck", create=True) as store:
        store.put_snapshot({"config": Config(0.5, Phase.WARM_UP, torch.ones(2))}, ref="x")
        got = store.checkout("x", into={"config": Config(0.0, Phase.MAIN, torch.zeros(2))})
    assert type(got["config"]) is Config
    assert (got["config"].lr, got["config"].phase) == (0.5, Phase.WARM_UP)
    assert dict(vars(got["config"]))["weights"].tolist() == [1.0, 1.0]


def test_a_target_value_is_replaced_by_what_is_stored(tmp_path: Any) -> None:
    """What is None or text in one run and a time, a path or an enum in the next is no damage, and is not read as one."""
    holders = (Namespace, SimpleNamespace, deque)
    values = [*(value for value in STANDARD.values() if not isinstance(value, holders)), Phase.MAIN, Parts.A]
    stored = [None, "x", 1, [1, 2], {1}, *values[:-2]]
    with tsck.open(tmp_path / "ck", create=True) as store:
        for number, value in enumerate(stored):
            store.put_snapshot({"values": [value] * len(values), "t": torch.ones(1)}, ref=f"x{number}", step=number)
            got = store.checkout(f"x{number}", into={"values": list(values), "t": torch.zeros(1)})
            assert repr(got["values"]) == repr([value] * len(values))


def test_a_stored_name_imports_and_calls_nothing() -> None:
    for name in ("dataclass:os:system", "enum:subprocess:Popen", "dataclass:not_loaded_yet:X"):
        registered_name(name).from_state({"value": "true", "name": "x"})
    assert "not_loaded_yet" not in sys.modules
    with pytest.raises(UnsupportedValueError, match="register_type"):
        registered_name("os.system")


@pytest.mark.parametrize("name", [*NAMES, "enum:a:B", "dataclass:a:B"])
@pytest.mark.parametrize("state", WRONG, ids=repr)
def test_what_cannot_be_rebuilt_is_damage(name: str, state: Any) -> None:
    with suppress(CorruptObjectError):
        registered_name(name).from_state(state)


def test_a_time_zone_with_rules_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="astimezone"):
        round_trip({"when": datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))})


def test_what_is_no_dataclass_needs_functions() -> None:
    with pytest.raises(InvalidOptionError, match="no dataclass, enum or tensor"):
        tsck.register_type(type("Other", (), {}), "other")
