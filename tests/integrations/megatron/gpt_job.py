"""A GPT under torchrun: ``gpt_job FOLDER save|load TP PP LAYOUT sync|async BRANCH [FROM]``.

``save`` trains 2 steps, saves to BRANCH, and trains 2 more. ``load`` loads what was saved to FROM, saves it as it is to BRANCH, in the
layout ``fully_reshardable``, and trains 2 steps. Each rank says its numbers.
"""

import sys
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

import tensorstore_ck as tsck
from tests.integrations.megatron import on_cpu  # noqa: F401 - it replaces what asks CUDA
from tests.integrations.megatron.gpt import Job, join, leave, newest
from tests.integrations.rank_runs import say


def main(folder: Path, what: str, degrees: tuple[int, int], layout: str, *names: str) -> None:
    saving, branch, source = names[0], names[1], names[-1]
    tensor, pipeline = degrees
    join(tensor, pipeline)
    job, queue = Job(tensor, pipeline, layout), AsyncCallsQueue()
    numbers = []
    with tsck.megatron.register(folder / "store", ref=branch) as registered:
        registered.changed_by(job.optimizer)
        if what == "save":
            numbers += [job.train(), job.train()]
        else:
            found = newest(folder / source)
            assert found is not None
            loaded = job.load(found, with_generators=branch == f"{source}-again")
            assert (loaded["iteration"], loaded["checkpoint_version"]) == (2, 3.0)
            job.metadata = {**job.metadata, "distrib_optim_sharding_type": "fully_reshardable"}
        request = job.save(folder / branch, registered.save, async_sharded_save=saving == "async")
        if request is not None:
            queue.schedule_async_request(request)
        numbers += [job.train(), job.train()]
        if request is not None:
            assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        say(numbers=numbers)
        leave()


if __name__ == "__main__":
    folder, what, tensor, pipeline, layout, *names = sys.argv[1:]
    main(Path(folder), what, (int(tensor), int(pipeline)), layout, *names)
