"""Ray Train, native and over a store, side by side: `python -m benches.trainers_ray --folder /tmp/bench`, in some five minutes.

As `benches.trainers`: 10 checkpoints of a GPT-2 (AdamW, nothing deleted) in a TorchTrainer of one worker. The native loop saves the three
files of Ray's guide: model, optimizer, counters. Both loops take samples by the number of the step, so no state of a sampler is needed.
The kill -9 strikes the worker in the fifth save: natively when the first file has been uploaded, else when the store is written to.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from transformers import GPT2Config, GPT2LMHeadModel

import tensorstore_ck as tsck

STEPS: Final = 30
EACH: Final = 3
CUT: Final = 20
"""A run that ends here, after the save of step 18, is resumed."""
KILLED_SAVE: Final = 15
VOCABULARY, LENGTH, SAMPLES = 2048, 32, 40
FILES: Final = ("model.pt", "optimizer.pt", "extra_state.pt")
Report = dict[str, Any]


def _model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def _batch(step: int) -> torch.Tensor:
    rows = [
        torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed((2 * step + each) % SAMPLES)) for each in range(2)
    ]
    return torch.stack(rows)


class _Native:
    """As in Ray's guide "Saving and Loading Checkpoints"."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def restore(self) -> int:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return 0
        with checkpoint.as_directory() as folder:
            model, optimizer, extra = (torch.load(Path(folder) / name) for name in FILES)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        return int(extra["step"])

    def save(self, step: int, loss: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, state in zip(FILES, (self._model.state_dict(), self._optimizer.state_dict(), {"step": step}), strict=True):
                torch.save(state, Path(folder) / name)
            ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    def close(self) -> None:
        """Nothing is open."""


class _Ours:
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._store = tsck.open(folder / "store", create=True, cache_dir=folder / "cache")
        self._training = tsck.TrainingState(model=model, optimizer=optimizer)

    def restore(self) -> int:
        found = tsck.ray.restore(self._training, store=self._store, ref="runs/bench")
        return (found.step or 0) if found else 0

    def save(self, step: int, loss: float) -> None:
        tsck.ray.report({"loss": loss}, self._training, store=self._store, ref="runs/bench", step=step)

    def close(self) -> None:
        self._store.close()


def _arm(*, native: bool) -> None:
    """The next save kills this process."""
    if native:
        from ray.train.v2._internal.execution import storage  # noqa: PLC0415 - what copies the files of a report

        def half(*, source: str, destination: str, **_: Any) -> None:
            shutil.copy(Path(source) / FILES[0], destination)
            os.kill(os.getpid(), signal.SIGKILL)

        storage._pyarrow_fs_copy_files = half
        return
    from tensorstore_ck.backend.local import LocalBackend  # noqa: PLC0415 - only here

    def strike(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for name in ("create", "put", "open_writer"):
        setattr(LocalBackend, name, strike)


def train(config: dict[str, Any]) -> None:
    """Runs in the worker; writes what was measured into a file."""
    folder, native = Path(config["folder"]), config["native"]
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    stalls, losses = list[float](), list[tuple[int, float]]()
    began = time.perf_counter()
    saves: _Native | _Ours = _Native(model, optimizer) if native else _Ours(model, optimizer, folder)
    step = saves.restore()
    until_first_step = time.perf_counter() - began
    while step < config["end"]:
        tokens = _batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        losses.append((step, loss.item()))
        time.sleep(config["pause"])  # Ray's controller takes reports now and then: a loop this fast would wait for it
        if config["kill"] and step == KILLED_SAVE and not (folder / "killed").exists():
            (folder / "killed").touch()
            _arm(native=native)
        if step % EACH == 0:
            saving = time.perf_counter()
            saves.save(step, loss.item())
            stalls.append(time.perf_counter() - saving)
    saves.close()
    weights = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
    said = {"stalls": stalls, "until_first_step": until_first_step, "losses": losses, "weights": weights, "step": step}
    (folder / "report.json").write_text(json.dumps(said))


def run(folder: Path, *, native: bool, end: int = STEPS, kill: bool = False, pause: float = 0.0) -> Report | str:
    """What was measured of a run up to `end`; or its error."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").unlink(missing_ok=True)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "native": native, "end": end, "kill": kill, "pause": pause},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    try:
        trainer.fit()
    except Exception as exc:  # noqa: BLE001 - a row of the table
        return f"{type(exc).__name__}: {exc}"
    report: Report = json.loads((folder / "report.json").read_text())
    return report


def _expect(report: Report | str) -> Report:
    if isinstance(report, str):
        raise SystemExit(report)
    return report


def _files(folder: Path) -> list[Path]:
    return [each for part in ("ray", "store") for each in (folder / part).rglob("*") if each.is_file()]


def _left_over(folder: Path) -> int:
    """Bytes of checkpoint folders that Ray's list does not have."""
    listed = (folder / "ray" / "run" / "checkpoint_manager_snapshot.json").read_text()
    unknown = [each for each in (folder / "ray" / "run").iterdir() if each.name.startswith("checkpoint_") and each.is_dir()]
    return sum(path.stat().st_size for each in unknown if each.name not in listed for path in each.rglob("*") if path.is_file())


def row(folder: Path, *, native: bool, pause: float) -> str:
    """A row of the table."""
    whole = _expect(run(folder / "whole", native=native, pause=pause))
    kept = _files(folder / "whole")
    stored = sum(each.stat().st_size for each in kept)
    _expect(run(folder / "cut", native=native, end=CUT))
    resumed = _expect(run(folder / "cut", native=native))
    equal = [f"{each}: {'yes' if resumed[each] == whole[each][-len(resumed[each]) :] else 'no'}" for each in ("weights", "losses")]
    survived = run(folder / "killed", native=native, kill=True)
    assert (folder / "killed" / "killed").exists()
    after = f"yes, ends at step {survived['step']}" if isinstance(survived, dict) else f"no: {survived.partition(':')[0]}"
    cells = [
        "Ray Train" if native else "tensorstore_ck.ray",
        f"{len(kept)}",
        f"{stored / 1e6:.0f} MB",
        f"{statistics.median(whole['stalls']) * 1e3:.0f} ms",
        f"{resumed['until_first_step'] * 1e3:.0f} ms",
        ", ".join(equal),
        f"{after}; {_left_over(folder / 'killed') / 1e6:.0f} MB left in Ray's folder",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--pause", type=float, default=0.9, help="seconds of each step, beside its work, where stalls are measured")
    given = options.parse_args()
    folder = given.folder.resolve() / "trainers-ray"
    shutil.rmtree(folder, ignore_errors=True)
    root = Path(__file__).parents[1]
    settings = {"PYTHONPATH": str(root), "XDG_STATE_HOME": str(folder / "state")}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": settings},
    )
    try:
        print(
            "| | files | bytes of 10 checkpoints | stall per save, median | resume to first step | exact | resumes after a kill in a save |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for native in (True, False):
            print(row(folder / ("native" if native else "ours"), native=native, pause=given.pause), flush=True)
    finally:
        ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
