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

import tensorstore_ck as tsck


class Follower:
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any

    def follow(self, url: str, ref: str, prefix: str = "", storage_options: dict[str, Any] | None = None) -> None:
        """Reads the newest snapshot of the branch into host memory; weights are the tensors whose names begin with `prefix`."""
        self.store = tsck.open(url, read_only=True, storage_options=storage_options)
        with self.store.open_snapshot(ref) as snapshot:
            names = [name for name in snapshot if name.startswith(prefix)]
            self.held = {name.removeprefix(prefix): snapshot[name][...] for name in names}
        rename = {f"{prefix}{name}": name for name in self.held}
        self.feed = self.store.follow(ref, into=self.held, select=names, rename=rename.get)
        self.loaded: str | None = None

    def stage(self, root: str) -> None:
        """Stages the snapshot with that root."""
        self.feed.poll(root)

    def swap(self) -> int | None:
        """Loads the staged version into the model; returns its step."""
        self.feed.swap()
        version = self.feed.version
        if version is not None and version.root != self.loaded:
            self.model_runner.reload_weights(weights_iterator=iter(self.held.items()))
            self.loaded = version.root
        return None if version is None else version.step
