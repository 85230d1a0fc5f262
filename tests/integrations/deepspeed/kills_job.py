"""An engine under torchrun: ``kills_job FOLDER KIND [RANK AT TORN]`` trains 6 steps, from the newest snapshot on, and saves after 2 and 4.

The process of RANK is killed with -9 at call AT of the backend in the save after step 4; with TORN=1 in the middle of that call. Each rank
says its losses, and how many calls that save took.
"""

import sys
from pathlib import Path

import tensorstore_ck as tsck
from tests.integrations.deepspeed.engines import join, make, train
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.kill_at import KillAt, open_killable
from tests.integrations.rank_runs import say

SAVED_AFTER, STEPS = (2, 4), 6


def main(folder: Path, kind: str, killed: int, at: int, torn: int) -> None:
    rank = join()
    faults = KillAt(at if rank == killed else 0, torn=bool(torn))
    with open_killable(folder / "store", faults) as store:
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
    folder, kind, *kill = sys.argv[1:]
    main(Path(folder), kind, *(int(each) for each in kill or ("-1", "0", "0")))
