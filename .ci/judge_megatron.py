"""Runs Megatron's own tests of dist_checkpointing on CPUs: ``judge_megatron.py CHECKOUT stock|stored RANKS FILE...``.

It needs the environment of `make test-apart`. CHECKOUT: the sources of Megatron-LM core_v0.16.1, since the package has no tests; or of
core_v0.19.0, with the absolute path of .venv-apart/newest-megatron in PYTHONPATH. FILE: as tests/unit_tests/dist_checkpointing/test_msc.py,
or a test of it. ``stored`` puts the strategies of tensorstore_ck in place of torch_dist's, with a ref for each folder. RANKS: most tests
need 8. The ranks are forked from one process that has imported Megatron, since 8 imports take a minute on two cores. New ranks are forked
after a test that failed on one of them, for which the others might wait, and after every few tests, since the tests leave their process
groups open. The script prints how each test ended, with the error of the first rank that failed; docs/trainers/megatron.md has the table.
"""

import contextlib
import copy
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import on_cpu

HERE = Path(__file__).resolve().parent
SECONDS = 120
"""A test that takes longer has failed."""
GRACE_SECONDS = 15
"""How long the other ranks may go on with a test that has failed on one."""
TESTS_OF_RANKS = 12
"""So many tests run in the same ranks; then new ones are forked."""


def prepare() -> None:
    """Before the tests import anything."""
    for name in ("c10d-NullHandler-dcp_logger", "tensorstore_ck"):  # the tests want empty logs
        logging.getLogger(name).setLevel(logging.WARNING)
    on_cpu(patience_seconds=SECONDS)
    keep_groups()
    dataset: Any = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    dataset.download_and_extract_asset = lambda **_: None  # nothing is downloaded
    sys.modules[dataset.__name__] = dataset


def without_transformer_engine() -> None:
    """Megatron's own layers in place of the Transformer Engine's, which are built for CUDA."""
    from megatron.core.models.backends import LocalSpecProvider  # noqa: PLC0415 - after `prepare`
    from megatron.core.models.bert import bert_layer_specs  # noqa: PLC0415
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: PLC0415
    from megatron.core.models.T5 import t5_spec  # noqa: PLC0415
    from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: PLC0415

    def layer_spec(*args: Any, use_te_op_fuser: bool = False, use_te_activation_func: bool = False, **options: Any) -> Any:
        return gpt_layer_specs.get_gpt_layer_local_spec(*args, **options)

    gpt: Any = gpt_layer_specs
    gpt.get_gpt_layer_with_transformer_engine_spec = layer_spec
    gpt.TESpecProvider, gpt.TENorm = LocalSpecProvider, LocalSpecProvider().layer_norm()
    with contextlib.suppress(ImportError):  # 0.19 has none
        from megatron.core.transformer.moe import grouped_gemm_util  # noqa: PLC0415

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # no experts are multiplied
    engine: Any = types.ModuleType("transformer_engine.pytorch.fp8")  # what test_moe_experts.py imports
    engine.check_fp8_support, engine.fp8_autocast = lambda: (False, "there is no Transformer Engine"), None
    sys.modules.update(dict.fromkeys(("transformer_engine", "transformer_engine.pytorch", engine.__name__), engine))
    make_norm = WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **options: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = False  # torch's refuses it, for the gradients
        return make_norm(cls, config, *args, **options)

    WrappedTorchNorm.__new__ = norm
    bert_layer_specs.get_bert_layer_with_transformer_engine_spec = lambda: bert_layer_specs.bert_layer_local_spec
    t5_spec.encoder_model_with_transformer_engine_default_spec = t5_spec.encoder_model_with_local_spec
    t5_spec.decoder_model_with_transformer_engine_default_spec = t5_spec.decoder_model_with_local_spec


def keep_folders() -> None:
    """All ranks leave a test's folder before the first one deletes it, and none deletes the folder of the next test.

    Megatron's tests rely on loads that end on all ranks together, and on folders that are deleted fast.
    """
    from tests.unit_tests import dist_checkpointing  # noqa: PLC0415 - reads the rank from the environment

    original = dist_checkpointing.TempNamedDir.cleanup

    def cleanup(self: Any, override_sync: bool | None = None) -> None:
        together = override_sync is None and Path(self.name).name != "tmp_dist_ckpt"  # which the first rank alone has
        original(self, together)
        self._finalizer.detach()
        if together:
            dist.barrier()

    dist_checkpointing.TempNamedDir.cleanup = cleanup


def keep_groups() -> None:
    """Each set of ranks has one group, for all tests: they make some dozens of groups for each test, and close none."""
    new = dist.new_group
    groups: dict[tuple[int, ...] | None, Any] = {}

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new(ranks, backend="gloo")
        return groups[key]

    dist.new_group, dist.destroy_process_group = new_group, lambda group=None: None
    torch.distributed.distributed_c10d.new_group = new_group


def stored(folder: Path) -> None:
    """The strategies of tensorstore_ck in place of torch_dist's."""
    from megatron.core.dist_checkpointing import serialization  # noqa: PLC0415 - after `on_cpu`
    from megatron.core.dist_checkpointing.strategies import torch as native  # noqa: PLC0415

    import tensorstore_ck as tsck  # noqa: PLC0415
    from tensorstore_ck.integrations.megatron.version import has_registry  # noqa: PLC0415

    registered = tsck.megatron.register(folder / "store", ref="runs/judged")

    class Save(tsck.megatron.SaveStrategy):  # type: ignore[misc]
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(registered.store, "runs/judged")

        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            super().save(sharded_state_dict, checkpoint_dir)
            if has_registry():
                Path(checkpoint_dir, ".metadata").touch()  # test_pipeline_parallel_layout.py wants one

        def _options(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> dict[str, Any]:
            options = super()._options(sharded_state_dict, checkpoint_dir)
            name = hashlib.sha256(str(checkpoint_dir).encode()).hexdigest()[:16]
            return {**options, "ref": f"runs/{name}", "step": None, "expect": tsck.ANY}

    class Load(tsck.megatron.LoadStrategy):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(registered.store)

    if not has_registry():
        serialization.TorchDistSaveShardedStrategy = native.TorchDistSaveShardedStrategy = Save
        return

    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy  # noqa: PLC0415

    def register() -> None:
        register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, Save())
        register_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1, registered.load)

    native.register_default_torch_strategies = register
    native.TorchDistSaveShardedStrategy, native.TorchDistLoadShardedStrategy = Save, Load


class Report:
    """Appends the ending of each test to a file of this rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest."""
        if report.when == "call" or report.outcome != "passed":
            with self.path.open("a") as file:
                print(json.dumps([report.nodeid, report.outcome, _last_line(report)]), file=file)


class Collect:
    """Writes the ids of the tests to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_collection_finish(self, session: Any) -> None:
        """Called by pytest."""
        self.path.write_text(json.dumps([each.nodeid for each in session.items]))


def _last_line(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr[-1] if crash is None else crash.message).strip().replace("\n", " ")[:300]


def fork_rank(rank: int, folder: Path, checkout: Path, which: str, tests: list[str], *more: str, plugin: Any) -> int:
    """The id of a process that runs tests as one of the ranks."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)  # Megatron's writer starts processes, which end with the rank
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        keep_folders()
        if which == "stored":
            stored(folder)
        if "--collect-only" not in more:
            dist.init_process_group("gloo")  # some tests rely on one that ran before them
        options = ["-q", "--tb=long", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(checkout), f"--timeout={SECONDS}"]
        code = int(pytest.main([*options, f"--basetemp={folder / str(rank)}", *more, *tests], plugins=[plugin]))
        if "--collect-only" not in more:
            (folder / f"rank-{rank}.ended").touch()
            time.sleep(GRACE_SECONDS)  # others may still be in a collective of the last test
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


Endings = dict[str, dict[int, tuple[str, str]]]
"""Test -> rank -> how it ended, and its error."""


def read_endings(folder: Path, ranks: int) -> Endings:
    """What the ranks have reported so far."""
    found: Endings = {}
    for rank in range(ranks):
        path = folder / f"rank-{rank}.json"
        for name, outcome, said in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if found.setdefault(name, {}).get(rank, ("", ""))[0] != "failed":
                found[name][rank] = outcome, said
    return found


def run(folder: Path, checkout: Path, which: str, ranks: int, tests: list[str]) -> Endings:
    """Runs tests up to the first that fails; returns how they ended."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    pids = [fork_rank(rank, folder, checkout, which, tests, plugin=Report(folder / f"rank-{rank}.json")) for rank in range(ranks)]
    running = pids
    kill_at = None
    while running:
        running = [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.2)
        if len(list(folder.glob("*.ended"))) == ranks:
            kill_at = 0.0
        found = read_endings(folder, ranks)
        failed = [name for name, by_rank in found.items() if any(outcome == "failed" for outcome, _ in by_rank.values())]
        if failed and kill_at is None:
            kill_at = time.monotonic() + GRACE_SECONDS
        if kill_at is not None and (time.monotonic() > kill_at or (failed and len(found[failed[0]]) == ranks)):
            running = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    found = read_endings(folder, ranks)
    ended = {}
    for name in tests:
        ended[name] = found.get(name, {})
        if len(ended[name]) < ranks or any(outcome == "failed" for outcome, _ in ended[name].values()):
            break
    return ended


def ending(by_rank: dict[int, tuple[str, str]], ranks: int) -> tuple[str, str]:
    """How a test ended on all ranks, and why."""
    failed = [f"rank {rank}: {said}" for rank, (outcome, said) in by_rank.items() if outcome == "failed"]
    skipped = [said for outcome, said in by_rank.values() if outcome == "skipped"]
    missing = [str(rank) for rank in range(ranks) if rank not in by_rank]
    if failed or missing:
        where = f"(on {len(failed)} ranks) " if len(failed) < ranks else ""
        return "failed", where + (failed or [f"it did not end on the ranks {', '.join(missing)}"])[0]
    return ("skipped", skipped[0]) if skipped else ("passed", "")


def main() -> int:
    """See the module."""
    if len(sys.argv) < 5 or sys.argv[2] not in ("stock", "stored"):
        sys.exit(__doc__)
    checkout, which, ranks, files = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(OMP_NUM_THREADS="1", RES_OPTIONS="timeout:1 attempts:1")
    torch.set_num_threads(1)
    prepare()
    sys.path[:0] = [str(checkout)]
    os.chdir(checkout)
    import megatron  # noqa: PLC0415 - after `on_cpu`
    import megatron.core.utils  # noqa: PLC0415

    megatron.core.utils.is_te_min_version = lambda *_, **__: False  # it fails where there is no Transformer Engine
    megatron.__path__ = [*megatron.__path__, str(checkout / "megatron")]  # for megatron.training, which the package lacks
    import megatron.training.checkpointing  # noqa: PLC0415 - once for all ranks

    without_transformer_engine()
    import tensorstore_ck.integrations.megatron  # noqa: F401, PLC0415

    folder = Path(tempfile.mkdtemp(prefix="judged-"))
    os.waitpid(fork_rank(0, folder, checkout, "stock", files, "--collect-only", plugin=Collect(folder / "tests.json")), 0)
    left: list[str] = json.loads((folder / "tests.json").read_text())
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for turn in range(len(left)):
        if not left:
            break
        begun = time.monotonic()
        found = run(folder / str(turn), checkout, which, ranks, left[:TESTS_OF_RANKS])
        for name, by_rank in found.items():
            outcome, said = ending(by_rank, ranks)
            counts[outcome] += 1
            print(outcome, name, said, flush=True)
        print(f"({time.monotonic() - begun:.0f} s; logs in {folder / str(turn)})", flush=True)
        shutil.rmtree(folder / str(turn) / "store", ignore_errors=True)
        left = left[len(found) :]
    print(", ".join(f"{number} {what}" for what, number in counts.items()), "of", sum(counts.values()), "tests")
    return int(bool(counts["failed"]))


if __name__ == "__main__":
    sys.exit(main())
