"""Blocks that snapshots of different ZeRO stages have in common: `python -m benches.zero_dedup --folder /tmp/bench`.

In the environment of `make test-apart`. One state of bfloat16 weights, float32 masters and both moments is cut by each stage and number of
ranks; blocks are counted without contents, from where each parameter's elements lie and the grid. `--prove`: also saves one state with
DeepSpeed's own engines, in which blocks are of 64 KiB, and compares the blocks that the snapshots have in common.
"""
# ruff: noqa: I001 - on_cpu comes before anything that imports DeepSpeed

import argparse
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, Final

from tests.integrations.deepspeed.on_cpu import deepspeed

import torch

import tensorstore_ck as tsck
from benches._rank_kills import run_ranks
from benches._model import llama_shapes
from benches._zero_ranks import MODELS, Rank, Shapes, given_ranks, zero_engine
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.format.block_assignment import Region
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES, TensorSpec
from tensorstore_ck.format.store_config import BLOCK_BYTES, CONFIG_NAME, new_config
from tensorstore_ck.integrations.deepspeed.fragments import fragments_of
from tensorstore_ck.training.parameter_names import ParameterNames
from tests.integrations.deepspeed.engines import join

KINDS: Final = {"weights": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
"""Bytes of an element."""
SMALL: Final = llama_shapes(256, 3, 704, 64, 1000)
SMALL_BLOCK_BYTES: Final = 64 << 10
Blocks = dict[tuple[str, str, int, int], int]
"""Kind, parameter, and where a block begins and ends in its bytes -> its size."""


def blocks_of(shapes: Shapes, stage: int, ranks: int, block_bytes: int = BLOCK_BYTES) -> Blocks:
    """The blocks of a snapshot; without what lies in the parts themselves."""
    found: Blocks = {}
    for rank in range(ranks):
        engine = zero_engine(shapes, stage, Rank(rank, ranks), "meta")
        for each in fragments_of(engine.optimizer, ParameterNames({"": engine.module})):
            for kind, item_bytes in KINDS.items():
                region = Region(0, (each.start,), (each.weights.numel(),), True, (rank,))
                spec = TensorSpec(each.name, "", item_bytes, each.shape)
                if region.size_bytes(spec) <= INLINE_TENSOR_BYTES:
                    continue
                at = each.start * item_bytes
                for length in region.block_lengths(spec, block_bytes):
                    found[kind, each.name, at, at + length] = length
                    at += length
    return found


def share(one: Blocks, other: Blocks) -> float:
    """Of the bytes of the other."""
    return sum(size for key, size in other.items() if key in one) / sum(other.values())


def table() -> None:
    print("| | ranks | ZeRO 1 and 2 | ZeRO 3 after ZeRO 2 | ZeRO 2 after 4 ranks | ZeRO 3 after 4 ranks | median block of ZeRO 2, ZeRO 3 |")
    print("|---|---|---|---|---|---|---|")
    for name, shapes in MODELS.items():
        two_on_4, three_on_4 = blocks_of(shapes, 2, 4), blocks_of(shapes, 3, 4)
        for ranks in (4, 64):
            one, two, three = (blocks_of(shapes, stage, ranks) for stage in (1, 2, 3))
            shares = [share(one, two), share(two, three), share(two_on_4, two), share(three_on_4, three)]
            sizes = [sorted(each.values())[len(each) // 2] / 2**20 for each in (two, three)]
            print(f"| {name} | {ranks} | {' | '.join(f'{each:.1%}' for each in shares)} | {sizes[0]:.2f}, {sizes[1]:.2f} MiB |", flush=True)


# --- with DeepSpeed's own engines ------------------------------------------------------------------------------------


def _real_engine(stage: int) -> Any:
    model = zero_engine(SMALL, 1, Rank(0, 1)).module
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(number)))
    model.forward = lambda: sum(each.float().square().sum() for each in model.parameters())
    groups = [[each for each in model.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _save(folder: Path, stage: int, ref: str, source: str) -> dict[str, Any]:
    """Saves the state of `source`; or trains and saves one, twice, if there is none."""
    join()
    engine = _real_engine(stage)
    tsck.deepspeed.attach(engine, tsck.open(folder / "store", cache_dir=folder / f"cache-{os.environ['RANK']}-{ref}"), ref=ref)
    if source:
        engine.load_checkpoint(folder / "out", tag=source)
    for step in range(0 if source else 2):
        engine.backward(engine() * (step + 1))
        engine.step()
        engine.save_checkpoint(folder / "out", tag=f"step-{step}")
    if source:
        engine.save_checkpoint(folder / "out")
    engine.destroy()
    return {"done": True}


def _stored(folder: Path, address: str, ranks: int) -> dict[bytes, int]:
    """Id -> bytes of the blocks of tensors."""
    engine = open_engine(folder / "store")
    engine.log.sync()
    with tsck.open(folder / "store", read_only=True, cache_dir=folder / "cache-test") as store:
        root = bytes.fromhex(store.resolve(address).root)
    record = engine.read_record(next(info for info in engine.log.view().snapshots() if info.root == root))
    found: dict[bytes, int] = {}
    for rank in range(ranks):
        part = engine.read_part(record, rank)
        rows = range(int(part.blobs["blocks"].sum()), part.block_count)
        found |= {bytes(part.block_id(row)): int(part.extents["raw"][row]) for row in rows}
    engine.close()
    return found


def prove(folder: Path, ranks: int) -> None:
    """One state, saved by ZeRO 2, 1 and 3 on real ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = dataclasses.replace(new_config(exclusive_create=True), block_bytes=SMALL_BLOCK_BYTES)
    LocalBackend(str(folder / "store")).create(CONFIG_NAME, config.encode())
    for stage, ref, source in ((2, "two", ""), (1, "one", "two"), (3, "three", "two")):
        said = run_ranks(folder / ref, lambda _, job=(stage, ref, source): _save(folder, *job), ranks)  # type: ignore[misc]
        if any("error" in each for each in said):
            raise SystemExit(f"{said}; see {folder / ref}")
    two = _stored(folder, "two", ranks)
    print(f"\n{ranks} real ranks, blocks of 64 KiB\n| | counted | in the store |\n|---|---|---|")
    for ref, stage in (("one", 1), ("three", 3)):
        with given_ranks():
            counted = share(blocks_of(SMALL, 2, ranks, SMALL_BLOCK_BYTES), blocks_of(SMALL, stage, ranks, SMALL_BLOCK_BYTES))
        other = _stored(folder, ref, ranks)
        real = sum(size for key, size in other.items() if key in two) / sum(other.values())
        print(f"| ZeRO {stage} after ZeRO 2 | {counted:.2%} | {real:.2%} |", flush=True)
    before = _stored(folder, "two~1", ranks)
    real = sum(size for key, size in two.items() if key in before) / sum(two.values())
    print(f"| the next step of AdamW, all parameters trained | | {real:.2%} |", flush=True)
    shutil.rmtree(folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--prove", action="store_true")
    given = options.parse_args()
    for ranks in (2, 4) if given.prove else ():
        prove(given.folder / "zero-dedup", ranks)
    with given_ranks():
        table()


if __name__ == "__main__":
    main()
