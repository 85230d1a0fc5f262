"""An engine under torchrun: ``kills_job FOLDER [TRAINER:]KIND [RANK AT TORN]`` trains from the newest snapshot on.

The process of RANK is killed with -9 at call AT of the backend in the second save; with TORN=1 in the middle of that call. Each rank says
its losses, and how many calls that save took.
"""

import sys
from pathlib import Path

import tensorstore_ck as tsck
from tests.integrations.deepspeed.engines import join, make, train
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.deepspeed.trainers_job import TRAINERS
from tests.integrations.kill_at import KillAt, open_killable
from tests.integrations.rank_runs import say

SAVED_AFTER, STEPS = (2, 4), 6


def main(folder: Path, option: str, killed: int, at: int, torn: int) -> None:
    trainer, _, kind = option.rpartition(":")
    rank = join()
    faults = KillAt(at if rank == killed else 0, torn=bool(torn))
    with open_killable(folder / "store", faults) as store:
        if trainer:
            say(losses=TRAINERS[trainer].train_struck(parse(kind), folder / "out", store, faults), calls=faults.calls)
            return
        engine = make(parse(kind))
        tsck.deepspeed.attach(engine, store, ref="runs/a", asynchronous=False)
        engine.load_checkpoint(folder / "out")
        losses = {}
        for step in range(engine.global_steps, STEPS):
            losses[step] = train(engine, rank, range(step, step + 1))[0]
            if step + 1 in SAVED_AFTER:
                faults.is_counting = step + 1 == SAVED_AFTER[-1]
                assert engine.save_checkpoint(folder / "out")
                faults.is_counting = False
        say(losses=losses, calls=faults.calls)
        engine.destroy()


if __name__ == "__main__":
    folder, option, *kill = sys.argv[1:]
    main(Path(folder), option, *(int(each) for each in kill or ("-1", "0", "0")))
