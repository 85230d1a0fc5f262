"""A trainer with DeepSpeed under torchrun: ``trainer_kills_job FOLDER transformers|accelerate,KIND [RANK AT TORN]``.

It trains from the newest snapshot on. The process of RANK is killed with -9 at call AT of the backend in the second save; with TORN=1 in
the middle of that call. Each rank says its losses, and how many calls that save took.
"""

import sys
from pathlib import Path

from tests.integrations.deepspeed.engines import join
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.deepspeed.trainers_job import TRAINERS
from tests.integrations.kill_at import KillAt, open_killable
from tests.integrations.rank_runs import say


def main(folder: Path, option: str, killed: int, at: int, torn: int) -> None:
    trainer, _, kind = option.partition(",")
    faults = KillAt(at if join() == killed else 0, torn=bool(torn))
    with open_killable(folder / "store", faults) as store:
        say(losses=TRAINERS[trainer].train_struck(parse(kind), folder / "out", store, faults), calls=faults.calls)


if __name__ == "__main__":
    folder, option, *kill = sys.argv[1:]
    main(Path(folder), option, *(int(each) for each in kill or ("-1", "0", "0")))
