"""The host's share of a save of tensors on a device that have not changed: `python -m benches.unchanged_on_device FOLDER`.

The CPU plays the device, which knows all ids. FOLDER should lie in memory: it gets 64 KiB for each block.
"""

import argparse
import statistics
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.engine.write import sampled_checks
from tensorstore_ck.state import byte_sources
from tensorstore_ck.state.device.device_blocks import DeviceBlocks
from tensorstore_ck.state.device.kernel import Ids, Numbers
from tensorstore_ck.state.tensor_table import TensorTable
from tests.session.group.pool import make_store

BLOCK_BYTES: Final = 64 << 10
SAVES: Final = 15


class Known:
    """`StartedHash` of ids that are known."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def wait(self) -> Ids:
        return self._ids

    def hold_stream(self) -> None:
        pass


class Hasher:
    """`BlockHasher` that hashes each table of blocks once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Ids] = {}

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> Known:
        key = addresses.tobytes()
        if key not in self._known:
            blocks = zip(addresses.tolist(), sizes_bytes.tolist(), strict=True)
            ids = b"".join(block_id(byte_sources.memory_at(address, size)) for address, size in blocks)
            self._known[key] = np.frombuffer(ids, np.uint8).reshape(len(addresses), -1)
        return Known(self._known[key])


def play_device() -> None:
    """Every tensor is on the device from now on, and a sampled piece is looked at for each block, as in blocks of 4 MiB."""
    hasher, capture = Hasher(), import_module("tensorstore_ck.state.capture")
    patches: list[tuple[Any, str, Any]] = [
        (capture, "device_blocks", lambda: DeviceBlocks(lambda _: hasher, lambda _: hasher)),
        (DeviceBlocks, "is_finite", lambda *_: True),
        (TensorTable, "add_run", lambda _self, _items, start: start),
        (byte_sources, "is_dense", lambda _: False),
        (sampled_checks, "STRIDE_BYTES", BLOCK_BYTES),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("blocks", type=int, nargs="?", default=25_000)
    parser.add_argument("tensors", type=int, nargs="?", default=40)
    args = parser.parse_args()
    play_device()
    memory = torch.randint(0, 1 << 20, (args.blocks * BLOCK_BYTES // 4,), dtype=torch.int32).view(torch.float32)
    state = {f"layers.{number}.weight": part for number, part in enumerate(memory.chunk(args.tensors))}
    make_store(args.folder, block_bytes=BLOCK_BYTES)
    seconds = []
    with tsck.open(args.folder / "store", cache_dir=args.folder / "cache", codec="raw") as store:
        for step in range(2 + SAVES):
            begin = time.process_time()
            store.put_snapshot(state, ref="bench", step=step, unchanged="ok")
            seconds.append((time.process_time() - begin) / args.blocks * 1e6)
    print(f"us of CPU time per block: median {statistics.median(seconds[2:]):.1f}, least {min(seconds[2:]):.1f}")


if __name__ == "__main__":
    main()
