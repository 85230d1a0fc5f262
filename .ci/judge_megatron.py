"""Runs Megatron's own tests of dist_checkpointing on CPUs: ``torchrun --nproc-per-node N judge_megatron.py CHECKOUT stock|stored FILE...``.

It needs the environment of `make test-apart`. CHECKOUT: the sources of Megatron-LM core_v0.16.1, since the package has no tests. ``stored``
puts the strategies of tensorstore_ck in place of torch_dist's, with a ref for each folder. The first rank prints how each test ended, and
the error of those that failed; docs/trainers.md has the table.

What Megatron asks of CUDA is done on the CPU over gloo (tests/integrations/megatron/on_cpu.py).
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
RANK = int(os.environ["RANK"])


def on_cpu() -> None:
    """Before the tests import anything."""
    place = HERE.parent / "tests" / "integrations" / "megatron" / "on_cpu.py"
    spec = importlib.util.spec_from_file_location("on_cpu", place)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    torch.cuda.device_count = lambda: 8
    torch.cuda.set_device = lambda device: None
    torch.cuda.memory_allocated = lambda device=None: 0
    torch.cuda.manual_seed = lambda seed: None  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_, **__: None
    original = dist.init_process_group
    dist.init_process_group = lambda backend=None, **options: original(backend="gloo", **options)
    dataset: Any = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    dataset.download_and_extract_asset = lambda **_: None  # nothing is downloaded
    sys.modules[dataset.__name__] = dataset


def stored() -> None:
    """The strategies of tensorstore_ck in place of torch_dist's."""
    from megatron.core.dist_checkpointing.strategies import torch as native  # noqa: PLC0415 - after `on_cpu`
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy  # noqa: PLC0415

    import tensorstore_ck as tsck  # noqa: PLC0415

    registered = tsck.megatron.register(Path(tempfile.gettempdir()) / f"judged-{os.environ['MASTER_PORT']}", ref="runs/judged")

    class Save(tsck.megatron.SaveStrategy):  # type: ignore[misc]
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(registered.store, "runs/judged")

        def _options(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> dict[str, Any]:
            options = super()._options(sharded_state_dict, checkpoint_dir)
            name = hashlib.sha256(str(checkpoint_dir).encode()).hexdigest()[:16]
            return {**options, "ref": f"runs/{name}", "step": None, "expect": tsck.ANY}

    class Load(tsck.megatron.LoadStrategy):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(registered.store)

    def register() -> None:
        register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, Save())
        register_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1, registered.load)

    native.register_default_torch_strategies = register
    native.TorchDistSaveShardedStrategy, native.TorchDistLoadShardedStrategy = Save, Load


class Report:
    """Prints the ending of each test, on the first rank."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest."""
        if report.when == "call" or report.outcome != "passed":
            print(f"\n[{RANK}] {report.outcome} {report.nodeid}: {_last_line(report)}", flush=True)


def _last_line(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr[-1] if crash is None else crash.message).strip().replace("\n", " ")[:300]


def main() -> int:
    """See the module."""
    if len(sys.argv) < 4 or sys.argv[2] not in ("stock", "stored"):
        sys.exit(__doc__)
    checkout = Path(sys.argv[1]).resolve()
    on_cpu()
    if sys.argv[2] == "stored":
        stored()
    sys.path[:0] = [str(checkout)]
    os.chdir(checkout)
    import megatron  # noqa: PLC0415 - after `on_cpu`
    import megatron.core.utils  # noqa: PLC0415

    megatron.core.utils.is_te_min_version = lambda *_, **__: False  # it fails where there is no Transformer Engine

    megatron.__path__ = [*megatron.__path__, str(checkout / "megatron")]  # for megatron.training, which the package lacks
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(checkout), "--timeout=120"]
    return pytest.main([*options, f"--basetemp={tempfile.mkdtemp()}", *sys.argv[3:]], plugins=[Report()])


if __name__ == "__main__":
    sys.exit(main())
