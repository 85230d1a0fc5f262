"""What is reported when a job continues elsewhere."""

import sys
import types
import warnings
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.training import EnvironmentChangedWarning, TrainingState, environment, random_generators


def training() -> TrainingState:
    return TrainingState(extra={"n": 1})


def test_nothing_is_reported_if_nothing_changed(store: tsck.Store) -> None:
    training().put(store, ref="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training().restore(store, "r")


def test_every_change_is_reported_in_one_warning(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    training().put(store, ref="r", step=7)
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with pytest.warns(EnvironmentChangedWarning) as warned:
        training().restore(store, "r")
    (message,) = (str(each.message) for each in warned)
    assert message.startswith("'r' (step 7) was saved in another environment, so the job may not resume bit for bit: torch 2.")
    for change in (" -> 9.9.0 (kernels", "cudnn benchmark False -> True (", "NCCL_ALGO Ring -> Tree (", "threads 2 -> 77 (sums"):
        assert change.replace("2 ->", f"{store.checkout('r')['rank']['environment']['threads']} ->") in message
    assert "CUBLAS_WORKSPACE_CONFIG none -> :4096:8 (" in message
    assert message.count(" -> ") == 5
    assert warned[0].filename == __file__


CUDNN: Any = torch.backends.cudnn
SWITCHES: dict[str, Any] = {
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolution_precision": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
    "reduced_precision_sums": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cudnn_deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_noticed(name: str) -> None:
    before = environment.describe(1)
    matmul = torch.backends.cuda.matmul
    conv = CUDNN.conv
    precisions = matmul.fp32_precision, conv.fp32_precision
    try:
        SWITCHES[name]()
        (told,) = environment.differences(before, environment.describe(1))
        assert told.startswith(f"{name.replace('_', ' ')} ")
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.fp32_precision, conv.fp32_precision = precisions
        matmul.allow_bf16_reduced_precision_reduction = True
        CUDNN.deterministic = False


def test_it_is_small_and_plain_and_reveals_nothing_of_the_host() -> None:
    import getpass
    import socket

    found = environment.describe(4)
    assert found.keys() == environment.REASONS.keys()
    assert all(each is None or type(each) in (str, int, bool) for each in found.values())
    text = repr(found)
    assert len(text) < 3000
    assert socket.gethostname() not in text
    assert getpass.getuser() not in text


def test_hosts_and_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    mesh: Any = types.SimpleNamespace(shape=(4, 2), mesh_dim_names=("dp", "tp"))
    found = environment.describe(16, [mesh, mesh])
    assert (found["hosts"], found["mesh"]) == ("2 x 8 ranks", "4x2 (dp, tp)")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "nonsense")
    assert environment.describe(16)["hosts"] is None


def test_what_one_side_does_not_know_is_no_change() -> None:
    assert environment.differences({"torch": "1", "of a newer build": 2}, {"torch": "1", "cuda": "13"}) == []


# --- DTensor's tracker, and CUDA ----------------------------------------------------------------------------------------


def test_the_tracker_of_dtensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists for devices only: its module is stood in for."""

    class Tracker:
        def __init__(self) -> None:
            self.distribute_region_enabled = True
            self.rng_states = {"parallel-rng": torch.arange(16, dtype=torch.uint8)}

    module = types.ModuleType("torch.distributed.tensor._random")
    module._rng_tracker = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._random", module)
    assert "dtensor" not in random_generators.get_process_states()
    module._rng_tracker = tracker = Tracker()  # type: ignore[attr-defined]
    states = random_generators.get_process_states()
    tracker.distribute_region_enabled, tracker.rng_states = False, {}
    random_generators.set_process_states(states, None)
    assert tracker.distribute_region_enabled
    assert tracker.rng_states["parallel-rng"].tolist() == list(range(16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_cuda_device(store: tsck.Store) -> None:
    devices = range(torch.cuda.device_count())
    drawn = [torch.rand(3, device=f"cuda:{number}") for number in devices]
    training().put(store, ref="r")
    expected = [torch.rand(3, device=f"cuda:{number}") for number in devices]
    training().restore(store, "r")
    for number, each in enumerate(expected):
        assert torch.equal(torch.rand(3, device=f"cuda:{number}"), each)
    assert len(drawn) == len(expected)
    assert store.checkout("r")["rank"]["environment"]["gpus"]
