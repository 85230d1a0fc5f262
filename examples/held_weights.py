"""Weights in host memory under the names of the checkpoint, at a snapshot of a branch: for engines that fuse and shard their own.

The workers of one engine hold them once together. Each follows a part of the tensors, and sends it to the others while the engine loads.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import tensorstore_ck as tsck

T = TypeVar("T")


class HeldWeights:
    """The tensors of a branch whose names begin with `prefix`, by the rest of the name."""

    def __init__(
        self,
        url: str,
        ref: str,
        prefix: str = "",
        *,
        host_cache: str | None = None,
        workers: Any = None,
        timeout_seconds: float = 600,
        **options: Any,
    ) -> None:
        """`workers`: vLLM's or SGLang's group of the workers that get the same calls at once; None: this one holds all tensors."""
        self.workers = None if workers is None or workers.world_size == 1 else workers
        self.timeout_seconds = timeout_seconds
        group = None if self.workers is None else workers.cpu_group
        rank = 0 if group is None else group.rank()
        self.store = self._on_all("open the store", lambda: tsck.open(url, read_only=True, **options))
        root = common_root(self.store, ref, self.workers, timeout_seconds)  # all divide the snapshot of the first one

        def read() -> None:
            with self.store.open_snapshot(root) as snapshot:
                stored: dict[str, Any] = {name.removeprefix(prefix): snapshot[name] for name in snapshot if name.startswith(prefix)}
                self.forms = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()}
                self.owners = self._divide({name: tensor.nbytes for name, tensor in stored.items()})
                self.tensors = {name: tensor[...] for name, tensor in stored.items() if self.owners[name] == rank}
                if not self.tensors:
                    raise ValueError(f"{ref} has {len(stored)} tensors that begin with {prefix!r}, too few for all workers")

        self._on_all("read its tensors", read)
        rename = {f"{prefix}{name}": name for name in self.tensors}
        how: Any = {"host_cache": host_cache, "group": group, "timeout_seconds": timeout_seconds}
        self.feed = self.store.follow(ref, into=self.tensors, select=[*rename], rename=rename.get, **how)
        self.loaded: str | None = None
        """The root that the engine has."""

    def stage(self, root: str) -> None:
        """Stages the snapshot with that root."""
        self.feed.poll(root)

    def load(self, load_weights: Any, *, again: bool = False) -> int | None:
        """Swaps, and passes (name, tensor) of all to the engine unless it has them, or `again`; returns the step.

        After an error, call it again. An error of one worker is an error of all; a worker that is lost is one at the latest after twice
        `timeout_seconds`.
        """
        self.feed.swap()
        version = self.feed.version
        root = "" if version is None else version.root
        if self._any(root != self._of_first(root)):
            raise RuntimeError("the workers hold different versions: stage one on all again")
        if root and (again or self._any(root != self.loaded)):
            self.loaded = None  # until the end the engine may have some of them
            weights = chain(self._shared())  # it has no close(), which a `yield from` of the engine would call

            def load() -> None:
                try:
                    load_weights(weights)
                finally:
                    deque(weights, maxlen=0)  # also where this engine needs no more, the others wait for this worker's tensors

            self._on_all(f"load {root}", load)
            self.loaded = root
        return None if version is None else version.step

    def close(self) -> None:
        """Frees what is staged, and closes the store."""
        self.feed.close()
        self.store.close()

    def _on_all(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, if it did not fail on any worker."""
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as exc:  # noqa: BLE001 - raised below; the others wait for this worker's word
            error = exc
        if self._any(error is not None):
            raise error or RuntimeError(f"another worker could not {what}: call it again on all")
        return result

    def _of_first(self, root: str) -> str:
        """The root that the first worker has."""
        return root if self.workers is None else _broadcast_root(root, self.workers, self.timeout_seconds)

    def _divide(self, sizes: dict[str, int]) -> dict[str, int]:
        """The rank that holds each tensor: the largest first, each to the one that has the fewest bytes."""
        held = [0] * (1 if self.workers is None else self.workers.world_size)
        owners = dict.fromkeys(sizes, 0)
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = held.index(min(held))
            held[owners[name]] += sizes[name]
        return owners

    def _shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, with `workers` on their device: the owner sends each when it is its turn. After an error there are no more."""
        if self.workers is None:
            yield from self.tensors.items()
            return
        group, device = self.workers.device_group, self.workers.device
        for name, owner in self.owners.items():
            own = self.tensors.get(name)
            tensor = torch.empty_like(self.forms[name], device=device) if own is None else own.to(device).contiguous()
            content = tensor.view(-1).view(torch.uint8)  # gloo and NCCL do not know all dtypes
            self._finish(dist.broadcast(content, group=group, group_src=owner, async_op=True))
            yield name, tensor

    def _any(self, here: bool) -> bool:
        """Whether it is so on one of the workers."""
        if self.workers is None:
            return here
        there = torch.tensor(int(here))
        self._finish(dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.workers.cpu_group, async_op=True))
        return bool(there)

    def _finish(self, work: Any) -> None:
        work.wait(timedelta(seconds=self.timeout_seconds))


def common_root(store: Any, address: str, workers: Any, timeout_seconds: float = 600) -> str:
    """The root of the snapshot at an address, as the first of the workers sees it; None: there is one worker."""
    if workers is None or workers.world_size == 1:
        return str(store.resolve(address).root)
    root = ""
    try:
        if workers.cpu_group.rank() == 0:
            root = store.resolve(address).root
    finally:  # the others wait for it
        root = _broadcast_root(root, workers, timeout_seconds)
    if not root:
        raise RuntimeError(f"the first worker could not resolve {address}")
    return root


def _broadcast_root(root: str, workers: Any, timeout_seconds: float) -> str:
    sent = torch.frombuffer(bytearray.fromhex(root or "00" * 32), dtype=torch.uint8)
    dist.broadcast(sent, group=workers.cpu_group, group_src=0, async_op=True).wait(timedelta(seconds=timeout_seconds))
    return bytes(sent.tolist()).hex() if sent.any() else ""
