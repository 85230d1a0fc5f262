"""Saves of one handle whose structures are equal, or almost: what is kept of the last layouts must not leak into a snapshot."""

import gc
import random
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS


def states(number: int) -> dict[str, Any]:
    """States that differ in one thing only; their values are of save `number`."""
    tensor = torch.arange(6.0).reshape(2, 3) + number
    large = torch.arange(4096.0) + number  # larger than what lies inside a part
    parameter = torch.nn.Parameter(tensor)
    base = torch.cat([tensor.flatten(), tensor.flatten()])
    return {
        "plain": {"w": tensor, "x": {1: "value"}},
        "a large tensor": {"w": large, "x": {1: "value"}},
        "another name": {"v": tensor, "x": {1: "value"}},
        "a bool as key": {"w": tensor, "x": {True: "value"}},
        "a float as key": {"w": tensor, "x": {1.0: "value"}},
        "another shape": {"w": tensor.flatten(), "x": {1: "value"}},
        "another dtype": {"w": tensor.int(), "x": {1: "value"}},
        "another order in memory": {"w": tensor.t().contiguous().t(), "x": {1: "value"}},
        "a parameter": {"w": parameter, "x": {1: "value"}},
        "another container": OrderedDict(w=tensor, x={1: "value"}),
        "another place": {"w": tensor, "x": ["value"]},
        "a value more": {"w": tensor, "x": {1: "value"}, "step": number},
        "one tensor twice": {"w": tensor, "x": {1: "value"}, "y": tensor},
        "two tensors": {"w": tensor, "x": {1: "value"}, "y": tensor.clone()},
        "rows of one storage": {"w": base[:6].view(2, 3), "x": {1: "value"}, "y": base[6:].view(2, 3)},
    }


def described(value: Any) -> object:
    """What must be equal, types included."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.stride(), value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return type(value), [(type(key), key, described(item)) for key, item in value.items()]
    return (list, [described(item) for item in value]) if isinstance(value, list) else (type(value), value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_almost_equal_structures_in_turns(tmp_path: Path, asynchronous: bool) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        turns = [turn for other in states(0) for turn in (other, "plain", other)]  # each with a layout that is kept, and a new one
        for number, name in enumerate(turns):
            state = states(number)[name]
            if asynchronous:
                store.put_snapshot_async(state, ref="main").wait(PATIENCE_SECONDS)
            else:
                store.put_snapshot(state, ref="main")
            restored: Any = store.checkout("main")
            assert described(restored) == described(state), name
            if name in ("one tensor twice", "two tensors"):
                assert (restored["w"] is restored["y"]) == (name == "one tensor twice")
            if name == "rows of one storage":
                assert restored["w"].untyped_storage().data_ptr() == restored["y"].untyped_storage().data_ptr()


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_a_later_save_makes_no_objects_for_each_small_tensor(tmp_path: Path, codec: Literal["raw", "auto"]) -> None:
    """Objects for each of 4,000 tensors start the collector of garbage dozens of times, which walks all objects of the process."""
    few, many = ({f"layers.{number}": torch.zeros(8) for number in range(count)} for count in (4, 4000))
    begun: list[str] = []
    with tsck.open(tmp_path / "store", create=True) as store:
        collections = {}
        for name, state in {"few": few, "many": many}.items():
            for number in range(3):
                for tensor in state.values():
                    tensor += 1
                gc.callbacks.append(lambda phase, _: begun.append(phase))
                try:
                    begun.clear()
                    store.put_snapshot(state, ref=name, step=number, codec=codec)
                    collections[name] = begun.count("start")
                finally:
                    gc.callbacks.pop()
    assert collections["many"] <= collections["few"] + 4


def test_a_handle_that_keeps_nothing_saves_the_same(tmp_path: Path) -> None:
    """A random history, saved by one handle and by a new one for each save: the same roots, so the same cuts, and the same warnings."""
    choose = random.Random(1)
    long_names = [f"{number:04}.{'x' * 240}" for number in range(5000)]  # a layout of more than one block
    tensors: dict[str, dict[str, Any]] = {
        "few": {"w": torch.zeros(8), "n": torch.zeros(8, dtype=torch.int32)},
        "whole numbers": {"w": torch.zeros(8, dtype=torch.int32), "n": torch.zeros(8, dtype=torch.int32)},
        "an optimizer": {"w": torch.zeros(8), "adam": {"state": {0: {"step": torch.zeros(1)}}}},
        "many": dict.fromkeys(long_names, torch.zeros(1)),
        "many others": dict.fromkeys([name[::-1] for name in long_names[:4900]], torch.zeros(1)),
    }

    def save(store: tsck.Store, name: str, step: int) -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            root = store.put_snapshot(tensors[name], ref=name.replace(" ", "-"), step=step, expect=tsck.ANY).root
        return root, [str(warning.message) for warning in caught]

    warned = 0
    with tsck.open(tmp_path / "kept", create=True) as kept:
        for step in range(20):
            name = choose.choice([*tensors, *[*tensors][:3]])
            moving = choose.choice(["w", "n", "adam", ""])
            for path, tensor in tensors[name].items():
                if path == moving:
                    tensor = tensor["state"][0]["step"] if isinstance(tensor, dict) else tensor
                    tensor += choose.randint(1, 3)
            with tsck.open(tmp_path / "new", create=True) as new:
                saved = save(kept, name, step)
                assert saved == save(new, name, step), name
            warned += len(saved[1])
    assert warned
