"""A GPT under torchrun: ``kills_job FOLDER sync|async [RANK AT TORN]`` trains 5 steps, from the newest snapshot on; it saves after 2 and 4.

The process of RANK is killed with -9 at call AT of the backend in the save after step 4; with TORN=1 in the middle of that call. Each rank
says its numbers, and how many calls that save took.
"""

import sys
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

import tensorstore_ck as tsck
from tests.integrations.kill_at import KillAt, open_killable
from tests.integrations.megatron import on_cpu  # noqa: F401 - it replaces what asks CUDA
from tests.integrations.megatron.gpt import Job, join, leave
from tests.integrations.rank_runs import say

SAVED_AFTER, STEPS = (2, 4), 5


def main(folder: Path, saving: str, killed: int, at: int, torn: int) -> None:
    rank = join(1, 1)
    faults = KillAt(at if rank == killed else 0, torn=bool(torn))
    with open_killable(folder / "store", faults) as store:
        job, queue = Job(1, 1, "fully_reshardable"), AsyncCallsQueue()
        registered = tsck.megatron.register(store, ref="runs/gpt")
        found = registered.write_folder(folder / "out")
        if found is not None:
            job.load(found)
        numbers = {}
        while job.step < STEPS:
            numbers[job.step] = job.train()
            if job.step in SAVED_AFTER:
                faults.is_counting = job.step == SAVED_AFTER[-1]
                request = job.save(folder / "out", registered.save, async_sharded_save=saving == "async")
                if request is not None:
                    queue.schedule_async_request(request)
                    queue.maybe_finalize_async_calls(blocking=True)
                faults.is_counting = False
        say(numbers=numbers, calls=faults.calls)
        leave()


if __name__ == "__main__":
    folder, saving, *kill = sys.argv[1:]
    main(Path(folder), saving, *(int(each) for each in kill or ("-1", "0", "0")))
