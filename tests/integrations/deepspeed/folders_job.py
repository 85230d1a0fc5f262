"""DeepSpeed's own folders: ``folders_job FOLDER save KIND...``, ``folders_job FOLDER load KIND@PATH...``, and ``... resume KIND@REF...``.

``save``: one engine of each kind trains; DeepSpeed saves it to ``FOLDER/KIND``, tensorstore_ck to the branch KIND of ``FOLDER/store``, and
it trains on. ``load``: DeepSpeed loads the folder PATH into an engine of each kind, tensorstore_ck saves that to the branch
``loaded/KIND/NAME`` with the name of PATH, and it trains on. ``resume``: tensorstore_ck loads a branch, and it trains on. The last two draw
the same random numbers, which DeepSpeed does not load. Each rank says what it did in lines of JSON.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import tensorstore_ck as tsck
from tests.integrations.deepspeed.engines import join, make, train
from tests.integrations.deepspeed.stages_job import SAVED_AFTER, STEPS, parse
from tests.integrations.rank_runs import say


def _mend_zero_3(engine: Any, decays: list[float]) -> None:
    """From a universal checkpoint ZeRO 3 gives all groups the options of the first, and one counter of steps, which each then counts up."""
    groups = engine.optimizer.param_groups
    for group, decay in zip(groups, decays, strict=True):
        group.update(lr=groups[0]["lr"], weight_decay=decay)
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


def train_on(engine: Any, rank: int) -> list[float]:
    torch.manual_seed(rank)
    return train(engine, rank, range(SAVED_AFTER, STEPS))


def main(folder: Path, what: str, arguments: list[str]) -> None:
    rank = join()
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        for text in arguments if what == "save" else ():
            kind = parse(text)
            engine = make(kind)
            train(engine, rank, range(SAVED_AFTER))
            if kind.ep_size:
                engine.module.write_numbers()
            engine.save_checkpoint(folder / kind.ref, client_state={"epoch": 7, "rank": rank})
            tsck.deepspeed.attach(engine, store, ref=kind.ref, asynchronous=False)
            assert engine.save_checkpoint(folder / "light", client_state={"epoch": 7, "rank": rank})
            say(ref=kind.ref, losses=train(engine, rank, range(SAVED_AFTER, STEPS)))
            engine.destroy()
        for at, text in enumerate(arguments if what == "load" else ()):
            left, _, path = text.rpartition("@")
            kind = parse(left)
            engine = make(kind)
            decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
            found, _ = engine.load_checkpoint(path)
            assert found is not None
            if kind.stage == 3:
                _mend_zero_3(engine, decays)
            ref = f"loaded/{kind.ref}/{Path(path).name}"
            tsck.deepspeed.attach(engine, store, ref=ref, asynchronous=False)
            assert engine.save_checkpoint(folder / "light")
            say(ref=ref, at=at, step=engine.global_steps, losses=train_on(engine, rank))
            engine.destroy()
        for at, text in enumerate(arguments if what == "resume" else ()):
            left, _, ref = text.rpartition("@")
            engine = make(parse(left))
            tsck.deepspeed.attach(engine, store, ref=f"resumed/{at}", asynchronous=False)
            engine.load_checkpoint(folder / "light", tag=f"{ref}@{SAVED_AFTER}")
            say(at=at, losses=train_on(engine, rank))
            engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
