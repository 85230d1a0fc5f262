"""Runs a script of Megatron-LM as it is, with its saves in a store: flags in place of lines in the script.

    torchrun --nproc-per-node 8 -m tensorstore_ck.integrations.megatron.run_script --store s3://bucket/ckpt --ref runs/gpt \
        pretrain_gpt.py --save out --load out ...

Megatron-LM has no flag and no entry point for a strategy: `save_checkpoint` takes one from ``checkpointing_context``, which `pretrain`
makes itself, or makes its own (``--dist-ckpt-format`` has no effect). So `training.save_checkpoint` is replaced in this process.
"""

import argparse
import functools
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from tensorstore_ck.integrations.megatron.register import Strategies, register


def main(arguments: Sequence[str]) -> None:
    """Runs the script; see the module. Its end without an error ends the run in the store, too."""
    parser = argparse.ArgumentParser(prog="python -m tensorstore_ck.integrations.megatron.run_script", allow_abbrev=False)
    parser.add_argument("--store", required=True, help="URL or path; created if there is none")
    parser.add_argument("--ref", required=True, help="the branch of this job's snapshots")
    parser.add_argument("script", help="of Megatron-LM, such as pretrain_gpt.py; what follows is passed to it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    given = parser.parse_args(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(given.script))  # as Python does for a script
    sys.argv = [given.script, *given.rest]
    with register(given.store, ref=given.ref) as registered:
        training: Any = importlib.import_module("megatron.training.training")
        training.save_checkpoint = saving_to(registered, training.save_checkpoint)
        runpy.run_path(given.script, run_name="__main__")


def saving_to(registered: Strategies, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's `save_checkpoint` with the strategy that saves to the store."""
    signature = inspect.signature(save_checkpoint)
    options = importlib.import_module("megatron.training").get_args

    @functools.wraps(save_checkpoint)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        registered.changed_by(given.arguments["optimizer"])
        context = given.arguments.get("checkpointing_context")
        given.arguments["checkpointing_context"] = context = {} if context is None else context
        context["save_strategy"] = _as_asked(registered, options())
        return save_checkpoint(*given.args, **given.kwargs)

    return save


def _as_asked(registered: Strategies, options: Any) -> Any:
    """The strategy, in the wrapper that Megatron-LM puts around its own one for ``--ckpt-fully-parallel-save``."""
    if not options.ckpt_fully_parallel_save:
        return registered.save
    is_of_experts = getattr(options, "ckpt_fully_parallel_save_process_group", "dp") == "ep_dp"
    group = (
        parallel_state.get_expert_data_parallel_group()
        if is_of_experts
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return FullyParallelSaveStrategyWrapper(registered.save, group)


if __name__ == "__main__":
    main(sys.argv[1:])
