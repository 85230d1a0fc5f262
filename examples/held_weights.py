"""Weights in host memory under the names of the checkpoint, at a snapshot of a branch: for engines that fuse and shard their own."""

from typing import Any

import tensorstore_ck as tsck


class HeldWeights:
    """The tensors of a branch whose names begin with `prefix`, by the rest of the name."""

    def __init__(self, url: str, ref: str, prefix: str = "", *, host_cache: str | None = None, **options: Any) -> None:
        self.store = tsck.open(url, read_only=True, **options)
        with self.store.open_snapshot(ref) as snapshot:
            names = [name for name in snapshot if name.startswith(prefix)]
            self.tensors = {name.removeprefix(prefix): snapshot[name][...] for name in names}
        rename = {f"{prefix}{name}": name for name in self.tensors}
        self.feed = self.store.follow(ref, into=self.tensors, select=names, rename=rename.get, host_cache=host_cache)
        self.loaded: str | None = None
        """The root that the engine has."""

    def stage(self, root: str) -> None:
        """Stages the snapshot with that root."""
        self.feed.poll(root)

    def load(self, load_weights: Any) -> int | None:
        """Swaps, and passes (name, tensor) of all to the engine unless it has them; returns the step. After an error, call it again."""
        self.feed.swap()
        version = self.feed.version
        if version is not None and version.root != self.loaded:
            self.loaded = None  # the engine may have some of them
            load_weights(iter(self.tensors.items()))
            self.loaded = version.root
        return None if version is None else version.step
