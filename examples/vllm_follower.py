"""vLLM's workers at the newest snapshot of a branch: an extension of the worker class (read against vLLM 0.33).

    llm = vllm.LLM(model, worker_extension_cls="examples.vllm_follower.Follower")
    llm.collective_rpc("follow", args=("s3://bucket/ckpt", "runs/rl", "model."))
    ...
    root = store.resolve("runs/rl").root                    # once, so that all workers take the same version
    llm.collective_rpc("stage", args=(root,), timeout=60)   # reads what changed, while requests run
    llm.collective_rpc("swap")                              # between two generations

A worker holds the weights in host memory under the names of the checkpoint, since vLLM fuses and shards those of the model.
`swap` loads all of them from there. A load that fails raises, and is repeated by the next `swap`, also without a new version.
"""

from typing import Any

from examples.held_weights import HeldWeights


class Follower:
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any

    def follow(self, url: str, ref: str, prefix: str = "", host_cache: str | None = None, **options: Any) -> None:
        """Reads the newest snapshot of the branch into host memory; `options` are those of `tsck.open`."""
        self.held = HeldWeights(url, ref, prefix, host_cache=host_cache, **options)

    def stage(self, root: str) -> None:
        """Stages the snapshot with that root."""
        self.held.stage(root)

    def swap(self) -> int | None:
        """Loads the staged version into the model; returns its step."""
        return self.held.load(lambda weights: self.model_runner.reload_weights(weights_iterator=weights))
