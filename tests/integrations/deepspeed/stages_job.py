"""Engines of several kinds under torchrun: ``stages_job FOLDER save|load KIND...``; a kind is ``STAGE,DTYPE[,OPTION=VALUE]``.

``save``: one of each kind trains, saves, and trains on. ``load``: one of each kind resumes what each of them saved; it is saved as it is,
so that the two can be compared, and trains on. Each rank says what it did in lines of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.integrations.deepspeed.engines import Kind, join, make, train
from tests.integrations.rank_runs import say

SAVED_AFTER, STEPS = 3, 6


def parse(text: str) -> Kind:
    stage, dtype, *rest = text.split(",")
    options = {name: json.loads(value) for name, value in (each.split("=") for each in rest)}
    ep_size, stages = options.pop("ep_size", 0), options.pop("stages", 0)
    return Kind(int(stage), dtype, tuple(options.items()), ep_size, stages)


def attached(kind: Kind, store: Store, ref: str) -> Any:
    engine = make(kind)
    tsck.deepspeed.attach(engine, store, ref=ref, asynchronous=False)
    return engine


def optimizer_tensors(store: Store, ref: str) -> dict[str, torch.Tensor]:
    """Masters and moments, by name."""
    with store.open_snapshot(ref) as found:
        return {name: found[name][...] for name in found if name.startswith("optimizer.")}


def lost_weights(engine: Any, store: Store, ref: str) -> list[str]:
    """The parameters of this rank that are not those of the snapshot."""
    with store.open_snapshot(ref) as found:
        return [name for name, each in engine.module.named_parameters() if not torch.equal(each, found[f"model.{name}"][...])]


def differing(store: Store, ref: str, copy: str) -> dict[str, Any]:
    """The first rank compares masters and moments of two snapshots."""
    one, other = (optimizer_tensors(store, each) if os.environ["RANK"] == "0" else {} for each in (ref, copy))
    differ = sorted(one.keys() ^ other.keys()) + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]
    return {"differ": differ, "compared": len(one)}


def resume(kind: Kind, store: Store, folder: Path, ref: str, copy: str) -> None:
    """Loads a snapshot of another branch, and saves it as it is."""
    engine = attached(kind, store, copy)
    rank = int(os.environ["RANK"])
    path, client = engine.load_checkpoint(folder / ref, tag=f"{ref}@{SAVED_AFTER}")
    step, groups = engine.global_steps, [group["weight_decay"] for group in engine.optimizer.param_groups]
    assert engine.save_checkpoint(folder / copy)
    compared = differing(store, ref, copy)
    seen = engine.module.seen.tolist() if not kind.stages else [each.tolist() for each in engine.module.buffers()]
    lost = lost_weights(engine, store, ref) if kind.stages else []
    micro_batches = getattr(engine.module, "micro_offset", None)
    experts = [int(each.number) for each in engine.module.experts] if kind.ep_size else []
    losses = train(engine, rank, range(SAVED_AFTER, STEPS))
    say(
        ref=ref,
        kind=kind.ref,
        path=path,
        client=client,
        step=step,
        seen=seen,
        lost=lost,
        micro_batches=micro_batches,
        experts=experts,
        groups=groups,
        losses=losses,
        **compared,
    )
    engine.destroy()


def main(folder: Path, what: str, kinds: list[Kind]) -> None:
    rank = join()
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        for kind in kinds if what == "save" else ():
            engine = attached(kind, store, kind.ref)
            before = train(engine, rank, range(SAVED_AFTER))
            if kind.ep_size:
                engine.module.write_numbers()
            assert engine.save_checkpoint(folder / kind.ref, client_state={"epoch": 7, "rank": rank})
            say(ref=kind.ref, losses=before + train(engine, rank, range(SAVED_AFTER, STEPS)))
            engine.destroy()
        saved = sorted(name for name in store.branches() if name.startswith("runs/"))
        for kind in kinds if what == "load" else ():
            for ref in (name for name in saved if name.startswith(kind.family)):
                resume(kind, store, folder, ref, f"{os.environ['WORLD_SIZE']}-ranks/{kind.ref}/{ref}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [parse(each) for each in sys.argv[3:]])
