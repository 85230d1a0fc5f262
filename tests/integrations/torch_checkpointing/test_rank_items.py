"""Which leaves of a payload ranks have in common, without ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.integrations.torch_checkpointing.rank_items import ItemSpecs, digest, is_spread, is_wanted, put_back, without
from tensorstore_ck.state import FlatShard


def test_digests_are_equal_for_equal_leaves() -> None:
    leaves: list[Any] = [torch.zeros(2), torch.ones(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32), 0, 0.0, "0", [0], None]
    assert len({digest(("a",), leaf) for leaf in leaves}) == len(leaves)
    assert digest(("a",), torch.zeros(2)) == digest(("a",), torch.zeros(2))


def test_what_is_spread() -> None:
    shard = FlatShard(torch.ones(2), (4,), 0)
    assert is_spread(shard)
    assert is_spread([1, {"a": (shard,)}])
    assert not is_spread([torch.ones(2), torch.nn.Parameter(torch.ones(2)), "a"])


@pytest.mark.parametrize("key", ["model", "rng"])
@pytest.mark.parametrize("default", [None, object()])
def test_items_with_a_resharder_are_shared(key: str, default: object) -> None:
    items = {"model": SimpleNamespace(resharder=object()), "optimizer": SimpleNamespace(resharder=None)}
    specs = ItemSpecs.of(SimpleNamespace(items=items, default=SimpleNamespace(resharder=default), save=SimpleNamespace()))
    assert specs.is_shared(key) == (key == "model" or default is not None)
    assert not specs.is_shared("optimizer")


def test_what_is_wanted() -> None:
    wanted: list[Any] = [None, {}, {"a": None}, {"a": {}}, {"a": {"b": 1}}]
    assert all(is_wanted(target, ("a", "b")) for target in wanted)
    assert not is_wanted({"c": 1}, ("a", "b"))
    assert not is_wanted({"a": {"c": 1}}, ("a", "b"))
    with pytest.raises(MismatchError, match="a is a dict in the checkpoint"):
        is_wanted({"a": 1}, ("a", "b"))


def test_without_copies_only_what_changes() -> None:
    value = {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    left = without(value, [("a", "b")])
    assert left == {"a": {"c": 2}, "d": {"e": 3}}
    assert left["d"] is value["d"]
    assert without(value, [("x",)]) is value
    assert value["a"] == {"b": 1, "c": 2}


def test_own_leaves_are_filled_in_place() -> None:
    mine = torch.zeros(2)
    target = {"model": {"mean": mine, "weight": 1}, "rng": None}
    own = {("model", "mean"): torch.ones(2), ("rng",): torch.full((1,), 7)}
    found = put_back(target, {"model": {"weight": 2}}, own)
    assert found["model"]["mean"] is mine
    assert torch.equal(mine, torch.ones(2))
    assert (found["model"]["weight"], found["rng"].item()) == (2, 7)


@pytest.mark.parametrize("stored", [torch.ones(3), torch.ones(2, dtype=torch.int32), 1])
def test_own_leaves_that_do_not_fit(stored: object) -> None:
    with pytest.raises(MismatchError, match=r"model\.mean is another kind of tensor"):
        put_back({"model": {"mean": torch.zeros(2)}}, {}, {("model", "mean"): stored})
