"""Wrapper subclasses of tensors: torchao's optimizers and weights come back as the bits they are, and nothing is imported to read them."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import tensorstore_ck as tsck
from tensorstore_ck.state.wrapper_subclasses import OUTER_KEY
from tests.effort import PATIENCE_SECONDS

CONFIGS = (
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
)
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


class Pair(TwoTensor):
    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> "Pair":
        return Pair(inner["a"], inner["b"])  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def torchao() -> Any:
    """Quietly: what it says is what of it needs a GPU."""
    logging.disable(logging.WARNING)
    import torchao.optim
    import torchao.quantization

    logging.disable(logging.NOTSET)
    return torchao


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True) as store:
        yield store


def stepped(torchao: Any, name: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[torch.nn.Module, Any]:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes longer than all else here
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 128)
    optimizer = getattr(torchao.optim, name)(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    return model, optimizer


def quantised(torchao: Any, config: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, dtype=torch.bfloat16))
    torchao.quantization.quantize_(model, getattr(torchao.quantization, config)())
    return model


def require_same(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key, value in one.items():
            require_same(value, other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        for item, same in zip(one, other, strict=True):
            require_same(item, same, path)
    elif isinstance(one, torch.Tensor):
        assert (one.shape, one.stride(), one.dtype, one.requires_grad) == (other.shape, other.stride(), other.dtype, other.requires_grad), (
            path
        )
        assert isinstance(one, torch.nn.Parameter) == isinstance(other, torch.nn.Parameter), path
        if hasattr(one, "__tensor_flatten__"):
            (names, context), (same_names, same_context) = one.__tensor_flatten__(), other.__tensor_flatten__()
            assert names == same_names, path
            require_same(context, same_context, path)
            for name in names:
                require_same(getattr(one, name), getattr(other, name), f"{path}.{name}")
        else:
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), path
    else:
        assert one == other, path


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_low_bit_optimizer_is_restored_bit_by_bit_new_and_in_place(
    store: tsck.Store, torchao: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = stepped(torchao, name, monkeypatch, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    store.put_snapshot(state, ref="main")
    require_same(store.checkout("main"), state)
    require_same(
        store.checkout("main", dtype=torch.bfloat16)["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"]
    )
    other, other_optimizer = stepped(torchao, name, monkeypatch, 2)
    store.checkout("main", into={"model": other.state_dict(), "optimizer": other_optimizer.state_dict()})
    require_same(other_optimizer.state_dict(), state["optimizer"])


@pytest.mark.parametrize("config", CONFIGS)
def test_quantised_weights_come_back_bit_by_bit(store: tsck.Store, torchao: Any, config: str) -> None:
    model = quantised(torchao, config)
    state = {"state": model.state_dict(), "parameters": dict(model.named_parameters())}
    store.put_snapshot(state, ref="main")
    require_same(store.checkout("main"), state)
    other = quantised(torchao, config, seed=1)
    store.checkout("main", into={"state": other.state_dict()}, select="state.*")
    require_same(other.state_dict(), state["state"])


def test_the_inner_tensors_have_names_of_their_own(store: tsck.Store, torchao: Any) -> None:
    store.put_snapshot(quantised(torchao, CONFIGS[0]).state_dict(), ref="main")
    with store.open_snapshot("main") as snapshot:
        assert {"0.weight.qdata", "0.weight.scale"} <= set(snapshot.names())
        assert snapshot.state_values[f"0.weight.{OUTER_KEY}.size"] == torch.Size([128, 256])
        assert snapshot["0.weight.qdata"].dtype is torch.int8


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(
    store: tsck.Store, torchao: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moment(name: str) -> Any:
        return stepped(torchao, name, monkeypatch, 1)[1].state_dict()["state"][0]["exp_avg"]

    store.put_snapshot({"m": moment("AdamW8bit")}, ref="main")
    store.put_snapshot({"m": torch.zeros(128, 256)}, ref="plain")
    plain = torch.ones(128, 256)
    for ref, target, words in (
        ("main", moment("AdamW4bit"), ("OptimState4bit here", "OptimState8bit in the snapshot")),
        ("main", plain, ("something else here", "OptimState8bit in the snapshot")),
        ("plain", moment("AdamW8bit"), ("OptimState8bit here", "something else in the snapshot")),
        ("main", type(moment("AdamW8bit")).zeros((64, 256)), ("[64, 256]", "[128, 256]")),
    ):
        with pytest.raises(tsck.MismatchError) as caught:
            store.checkout(ref, into={"m": target})
        assert all(word in str(caught.value) for word in ("m: ", *words)), str(caught.value)
    assert bool((plain == 1).all())


def test_a_users_traceable_subclass_needs_a_name_alone(store: tsck.Store) -> None:
    state = {"w": Pair(torch.rand(8, 4), torch.rand(8, 4))}  # type: ignore[no-untyped-call]
    with pytest.raises(tsck.UnsupportedValueError, match="register_type"):
        store.put_snapshot(state, ref="main")
    tsck.register_type(Pair, "tests.TwoTensorPair")
    store.put_snapshot(state, ref="main")
    require_same(store.checkout("main"), state)
    with pytest.raises(tsck.InvalidOptionError, match="to_state"):
        tsck.register_type(Path, "tests.Path")


def test_what_rename_leaves_out_of_a_tensor_stays(store: tsck.Store, torchao: Any) -> None:
    weight, target = (quantised(torchao, CONFIGS[0], seed).state_dict()["0.weight"] for seed in (0, 1))
    store.put_snapshot({"m": {"w": weight}}, ref="main")
    for top in ("m", "n"):
        target.qdata.zero_()
        report, scale = tsck.LoadReport(), target.scale.clone()

        def rename(name: str, top: str = top) -> str | None:
            return None if name.endswith("scale") else name.replace("m.", f"{top}.")

        store.checkout("main", into={top: {"w": target}}, rename=rename, strict=False, report=report)
        assert torch.equal(target.qdata, weight.qdata)
        assert torch.equal(target.scale, scale)
        assert (report.missing, report.unexpected) == ([f"{top}.w.scale"], [])


def test_a_mismatch_hides_no_key_that_is_spelled_alike(store: tsck.Store, torchao: Any) -> None:
    store.put_snapshot({"m": {"0": 5, 0: quantised(torchao, CONFIGS[0]).state_dict()["0.weight"]}}, ref="main")
    report = tsck.LoadReport()
    store.checkout("main", into={"m": {0: torch.zeros(128, 256)}}, strict=False, report=report)
    assert (report.missing, report.unexpected, len(report.mismatched)) == ([], ["m.0"], 1)


def test_tied_weights_share_memory_again(store: tsck.Store, torchao: Any) -> None:
    weight = dict(quantised(torchao, CONFIGS[0]).named_parameters())["0.weight"]
    store.put_snapshot({"a": weight, "b": weight}, ref="main")
    restored = store.checkout("main")
    assert restored["a"].qdata.data_ptr() == restored["b"].qdata.data_ptr()


def test_reading_imports_neither_torchao_nor_dtensor_and_says_what_to_import(store: tsck.Store, torchao: Any) -> None:
    store.put_snapshot(quantised(torchao, CONFIGS[0]).state_dict(), ref="main")
    program = f"""
import sys
import tensorstore_ck as tsck
with tsck.open({store.url!r}) as store:
    with store.open_snapshot("main") as snapshot:
        print(snapshot["0.weight.qdata"][:].shape)
    try:
        store.checkout("main")
    except tsck.UnsupportedValueError as exc:
        print(exc)
print("torchao" in sys.modules, "torch.distributed.tensor" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert "torch.Size([128, 256])" in done.stdout, done.stderr
    assert "import torchao.quantization first" in done.stdout
    assert done.stdout.endswith("False False\n")
