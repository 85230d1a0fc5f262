"""vLLM's workers at the newest snapshot of a branch: an extension of the worker class (read against vLLM 0.33).

    llm = vllm.LLM(model, worker_extension_cls="examples.vllm_follower.Follower")
    llm.collective_rpc("follow", args=("s3://bucket/ckpt", "runs/rl", "model."))
    ...
    root = store.resolve("runs/rl").root           # once, so that all workers take the same version
    llm.collective_rpc("stage", args=(root,))      # reads what changed
    llm.collective_rpc("swap")                     # between two generations

The weights are held in host memory under the names of the checkpoint, since vLLM fuses and shards those of the model: each worker holds a
part of the tensors. `swap` loads all of them from there. A load that fails raises, and is repeated by the next `swap`, also without a new
version.
"""

import logging
from collections.abc import Callable
from typing import Any

from vllm.distributed.parallel_state import get_dp_group, get_tp_group, get_world_group

from examples.held_weights import HeldWeights


def engine_workers() -> Any:
    """The workers that get the same calls at once: with data parallelism the world has other engines, too."""
    return get_world_group() if get_dp_group().world_size == 1 else get_tp_group()


class Follower:
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any
    held: Any = None

    def follow(self, url: str, ref: str, prefix: str = "", host_cache: str | None = None, **options: Any) -> None:
        """Reads the newest snapshot of the branch into host memory; `options` are those of `tsck.open`."""
        if self.held is not None:
            self.held.close()
            self.held = None
        self.held = self._answer(lambda: HeldWeights(url, ref, prefix, host_cache=host_cache, workers=engine_workers(), **options))

    def stage(self, root: str) -> None:
        """Stages the snapshot with that root."""
        self._answer(lambda: self.held.stage(root))

    def swap(self, again: bool = False) -> int | None:
        """Loads the staged version into the model; returns its step. `again`: also the one that it has, as after `sleep(level=2)`."""
        load = lambda weights: self.model_runner.reload_weights(weights_iterator=weights)  # noqa: E731
        return self._answer(lambda: self.held.load(load, again=again))  # type: ignore[no-any-return]

    def _answer(self, call: Callable[[], Any]) -> Any:
        """The last worker raises for all. vLLM raises the first error, and would pass later workers' answers to its next call."""
        try:
            return call()
        except Exception:
            if engine_workers().is_last_rank:
                raise
            logging.getLogger(__name__).exception("this worker failed, and so does the last one")
            return None
