"""One rank: what `save_checkpoint` and `load_checkpoint` mean over a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidNameError, InvalidOptionError, MismatchError, NotFoundError, UnsupportedValueError
from tensorstore_ck.integrations.deepspeed.fragments import base_optimizer
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer, write_pointer
from tensorstore_ck.store import Store
from tests.integrations.conformance import AdapterConformance, Trained
from tests.integrations.deepspeed.engines import Kind, Net, make, train
from tests.integrations.deepspeed.on_cpu import deepspeed
from tests.long_errors import long_errors_of_adapter
from tests.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # DeepSpeed's warnings of torch

BF16, FP32 = Kind(2, "bf16"), Kind(1, "fp32")


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    """Makes this process the only rank."""
    from tests.integrations.deepspeed.engines import join

    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, str(value))
        join()
        yield
        torch.distributed.destroy_process_group()


def attached(store: Store, kind: Kind = BF16, ref: str = "runs/a", **options: Any) -> Any:
    engine = make(kind)
    tsck.deepspeed.attach(engine, store, ref=ref, **options)
    return engine


def reopened(store: Store) -> Store:
    """The store as another process has it, which knows nothing of the saves of this one."""
    return tsck.open(store.url, no_sync=True, cache_dir=Path(store.url).parent / "other-cache")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resume_is_exact_and_folders_name_snapshots(store: Store, tmp_path: Path, asynchronous: bool) -> None:
    engine = attached(store, asynchronous=asynchronous)
    train(engine, 0, range(2))
    assert engine.save_checkpoint(tmp_path / "out", client_state={"epoch": 1})
    train(engine, 0, range(2, 4))
    assert engine.save_checkpoint(tmp_path / "out", tag="mine", client_state={"epoch": 2})
    rest = train(engine, 0, range(4, 6))
    engine.destroy()
    assert (tmp_path / "out" / "latest").read_text() == "mine"
    assert [each.step for each in store.log("runs/a")] == [4, 2]
    for tag in (None, "mine", "runs/a@4", store.resolve("runs/a").root):
        with reopened(store) as other:
            resumed = attached(other)
            path, client = resumed.load_checkpoint(tmp_path / "out", tag=tag)
            assert (path, client, resumed.global_steps) == (str(tmp_path / "out" / "mine"), {"epoch": 2}, 4)
            assert train(resumed, 0, range(4, 6)) == rest
            resumed.destroy()
    with reopened(store) as other:
        earlier = attached(other)
        assert earlier.load_checkpoint(tmp_path / "elsewhere", tag="global_step2")[1] == {"epoch": 1}
        assert earlier.lr_scheduler.last_epoch == 2
        earlier.destroy()


def test_weights_alone(store: Store, tmp_path: Path) -> None:
    engine = attached(store)
    train(engine, 0, range(3))
    engine.save_checkpoint(tmp_path, save_latest=False)
    weights = {name: each.clone() for name, each in engine.module.named_parameters()}
    engine.destroy()
    assert not (tmp_path / "latest").exists()
    for options, step in (({"load_module_only": True}, 0), ({"load_optimizer_states": False}, 3)):
        other = attached(store, ref="runs/b")
        other.load_checkpoint(tmp_path, tag="runs/a", **options)
        assert other.global_steps == step
        assert all(torch.equal(each, weights[name]) for name, each in other.module.named_parameters())
        master = other.optimizer.single_partition_of_fp32_groups[0]
        assert torch.equal(master[: weights["words.weight"].numel()], weights["words.weight"].float().view(-1))
        assert not other.optimizer.state[master].get("exp_avg", torch.zeros(1)).any()
        other.destroy()


def test_a_script_without_deepspeed_restores_what_it_saved(store: Store, tmp_path: Path) -> None:
    engine = attached(store, FP32)
    train(engine, 0, range(3))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    net = Net()
    trained = [each for each in net.parameters() if each.requires_grad]
    groups = [[each for each in trained if each.ndim > 1], [each for each in trained if each.ndim == 1]]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups])
    tsck.TrainingState(model=net, optimizer=optimizer).restore(store, "runs/a", parts=["model", "optimizer"])
    stored = store.checkout("runs/a")
    assert all(torch.equal(each, stored["model"][name]) for name, each in net.state_dict().items())
    assert torch.equal(optimizer.state[net.inner.weight]["exp_avg"], stored["optimizer"]["state"]["inner.weight"]["exp_avg"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    steps = [optimizer.state[each]["step"] for each in trained]
    assert {each.item() for each in steps} == {3.0}
    assert len({each.data_ptr() for each in steps}) == len(steps)


class Counting(torch.optim.Optimizer):
    """SGD with momentum, which counts its steps in tensors without and with a dimension."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            if each.grad is None:
                continue
            state = self.state[each]
            if not state:
                state.update(step=torch.zeros(()), one=torch.zeros(1), momentum=torch.zeros_like(each))
            state["step"] += 1
            state["one"] += 1
            state["momentum"].mul_(0.5 + 0.1 * state["one"].item()).add_(each.grad)
            each.data.add_(state["momentum"], alpha=-0.1)


def counting(stage: int) -> Any:
    torch.manual_seed(stage)
    line = torch.nn.Linear(5, 1)  # its bias has the shape of a counter
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config |= {"zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}
    return deepspeed.initialize(model=line, optimizer=Counting(line.parameters()), config=config)[0]


def count(engine: Any) -> float:
    loss = engine(torch.arange(10.0).view(2, 5) / 10).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())


@pytest.mark.parametrize(("stage", "other"), [(0, 3), (2, 0), (3, 2)])
def test_counters_of_one_element(store: Store, tmp_path: Path, stage: int, other: int) -> None:
    engine = counting(stage)
    tsck.deepspeed.attach(engine, store, ref="runs/a")
    for _ in range(2):
        count(engine)
    engine.save_checkpoint(tmp_path)
    rest = [count(engine), count(engine)]
    engine.destroy()
    for steps in (0, 1):  # without states, and with some
        resumed = counting(other)
        tsck.deepspeed.attach(resumed, store, ref=f"runs/{steps}")
        for _ in range(steps):
            count(resumed)
        resumed.load_checkpoint(tmp_path, tag="runs/a")
        states = base_optimizer(resumed.optimizer).state
        assert {(float(each["step"]), tuple(each["one"].shape), each["one"].item()) for each in states.values()} == {(2.0, (1,), 2.0)}
        assert {each["momentum"].shape == flat.shape for flat, each in states.items()} == {True}
        assert [count(resumed), count(resumed)] == pytest.approx(rest, rel=1e-6)
        resumed.destroy()


def test_an_optimizer_with_other_states_is_refused(store: Store, tmp_path: Path) -> None:
    engine = counting(0)
    tsck.deepspeed.attach(engine, store, ref="runs/a", asynchronous=False)
    count(engine)
    states = base_optimizer(engine.optimizer).state
    for wrong in (torch.zeros(5), torch.full((1,), 0.5)):
        states[engine.module.weight]["one"] = wrong
        with pytest.raises(UnsupportedValueError, match=r"'one' of weight"):
            engine.save_checkpoint(tmp_path)
    engine.destroy()


def test_frozen_parameters_may_be_left_out(store: Store, tmp_path: Path) -> None:
    engine = attached(store)
    train(engine, 0, range(1))
    engine.save_checkpoint(tmp_path, tag="whole")
    train(engine, 0, range(1, 2))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    engine.load_checkpoint(tmp_path, tag="whole")
    engine.destroy()
    assert not [name for name, *_ in store.show("runs/a").tensors if "fixed" in name]
    other = attached(store, ref="runs/b")
    with pytest.warns(UserWarning, match=r"fixed\.weight"):
        other.load_checkpoint(tmp_path, tag="runs/a")
    other.destroy()


def test_weights_that_the_model_lacks_are_left_out_of_a_load_that_is_not_strict(store: Store, tmp_path: Path) -> None:
    engine = attached(store)
    train(engine, 0, range(1))
    engine.save_checkpoint(tmp_path, tag="t")
    trained = engine.module.inner.weight.detach().clone()
    engine.destroy()
    other = attached(store, ref="runs/b")
    del other.module.seen
    with pytest.raises(MismatchError, match=r"model\.seen"):
        other.load_checkpoint(tmp_path, tag="t")
    other.load_checkpoint(tmp_path, tag="t", load_module_strict=False)
    assert torch.equal(other.module.inner.weight, trained)
    other.destroy()


def test_a_tag_whose_newest_save_was_killed_is_the_save_before(store: Store, tmp_path: Path) -> None:
    engine = attached(store)
    train(engine, 0, range(1))
    engine.save_checkpoint(tmp_path, tag="last")
    engine.destroy()
    write_pointer(tmp_path / "last", SnapshotPointer(store.url, "runs/a@2"))  # as a save in the background does when it begins
    with reopened(store) as other:
        resumed = attached(other)
        assert resumed.load_checkpoint(tmp_path, tag="last")[0] == str(tmp_path / "last")
        assert resumed.global_steps == 1
        resumed.destroy()


class TestConformance(AdapterConformance):
    ref = "runs/a"
    continuing = r"load_checkpoint\(\)"

    def train(self, folder: Path, store: Store, steps: int, *, resume: str | bool) -> Trained:
        engine = attached(store, FP32, asynchronous=False)
        try:
            if resume:
                engine.load_checkpoint(folder, tag=resume if isinstance(resume, str) else None)
            begun = engine.global_steps
            for step in range(begun, steps):
                train(engine, 0, range(step, step + 1))
                engine.save_checkpoint(folder)
            return Trained(begun or None, {name: each.clone() for name, each in engine.module.state_dict().items()})
        finally:
            engine.destroy()


def test_deepspeeds_own_checkpoints_are_loaded_as_ever(store: Store, tmp_path: Path) -> None:
    native = make(BF16)
    train(native, 0, range(2))
    native.save_checkpoint(tmp_path / "old", client_state={"epoch": 5})
    rest = train(native, 0, range(2, 3))
    native.destroy()
    engine = attached(store)
    path, client = engine.load_checkpoint(tmp_path / "old")
    assert (path is not None, client["epoch"], engine.global_steps) == (True, 5, 2)
    engine.save_checkpoint(tmp_path / "new")
    assert train(engine, 0, range(2, 3)) == pytest.approx(rest, rel=0.2)  # DeepSpeed loses the generators
    engine.destroy()
    assert store.resolve("runs/a").step == 2
    assert attached(store, ref="runs/none").load_checkpoint(tmp_path / "nothing") == (None, None)


def test_what_does_not_fit(store: Store, tmp_path: Path) -> None:
    engine = attached(store)
    train(engine, 0, range(1))
    engine.save_checkpoint(tmp_path)
    with pytest.raises(InvalidOptionError, match="already"):
        tsck.deepspeed.attach(engine, store, ref="runs/b")
    with pytest.raises(NotFoundError, match="neither the tag nor the address"):
        engine.load_checkpoint(tmp_path, tag="no-such-tag")
    with pytest.raises(InvalidOptionError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    engine.destroy()
    with pytest.raises(InvalidOptionError, match=r"deepspeed\.initialize"):
        tsck.deepspeed.attach(Net(), store, ref="runs/b")
    native = make(BF16)
    with pytest.raises(InvalidNameError):
        tsck.deepspeed.attach(native, store, ref="no good name")
    native.module.head.weight.allreduce = False  # as DeepSpeed marks experts
    native.has_moe_layers = True
    with pytest.raises(InvalidOptionError, match="AutoEP"):
        tsck.deepspeed.attach(native, store, ref="runs/b")
    assert type(native).__name__ == "DeepSpeedEngine"
    assert not isinstance(native, tsck.deepspeed.SnapshotMixin)
    native.destroy()
    pipeline = make(Kind(0, "fp32", stages=1))
    words = pipeline.module.tied_modules["words"]  # as if another stage had it, too, and DeepSpeed did not add up its gradients
    pipeline.module.tied_comms = {"words": {"ranks": [0, 1], "weight_attr": [], "module": words}}
    with pytest.raises(InvalidOptionError, match=r"tied_modules\.words\.weight.*tied_weight_attr"):
        tsck.deepspeed.attach(pipeline, store, ref="runs/b")
    pipeline.module.tied_comms = {}
    pipeline.destroy()
    with reopened(store) as other:
        grouped = make(BF16, decays=lambda each: each.ndim == 1)
        tsck.deepspeed.attach(grouped, other, ref="runs/a")
        with pytest.raises(MismatchError, match="parameter groups"):
            grouped.load_checkpoint(tmp_path)
        grouped.destroy()


def test_the_example_continues(tmp_path: Path) -> None:
    from examples import deepspeed_loop

    whole = deepspeed_loop.main(tmp_path / "whole", 20)
    deepspeed_loop.main(tmp_path / "cut", 10)
    assert deepspeed_loop.main(tmp_path / "cut", 20) == whole


def test_errors_of_what_it_offers_are_short() -> None:
    assert long_errors_of_adapter("deepspeed") == []
