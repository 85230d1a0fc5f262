"""A GPT under torchrun, saved and loaded with Megatron's wrappers, which share the work of replicas among the ranks.

``parallel_job FOLDER sync|async`` trains 2 steps, saves twice, without a wrapper and with it, and trains 2 more; then a new job loads what
the wrapper saved, and trains 2. Each rank says its numbers, and of how many tensors of the model it has stored a part in each save.
"""

import sys
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from megatron.core.parallel_state import get_data_parallel_group

import tensorstore_ck as tsck
from tests.integrations.megatron import on_cpu  # noqa: F401 - it replaces what asks CUDA
from tests.integrations.megatron.gpt import Job, join, leave
from tests.integrations.rank_runs import say


def counting(strategy: Any, stored: list[int]) -> Any:
    """The strategy, which counts this rank's tensors of the model in each save."""
    original = strategy._options

    def options(sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        mine = [each for each in nested_values(sharded_state_dict["model"]) if isinstance(each, ShardedTensor)]
        stored.append(sum(is_main_replica(each.replica_id) for each in mine))
        return original(sharded_state_dict, checkpoint_dir)

    strategy._options = options
    return strategy


def main(folder: Path, saving: str) -> None:
    join(1, 1)
    job, queue, stored = Job(1, 1, "fully_reshardable"), AsyncCallsQueue(), list[int]()
    numbers = [job.train(), job.train()]
    group = get_data_parallel_group(with_context_parallel=True)
    for branch in ("plain", "shared"):
        with tsck.megatron.register(folder / "store", ref=branch) as registered:
            strategy = counting(registered.save, stored)
            if branch == "shared":
                strategy = FullyParallelSaveStrategyWrapper(strategy, group)
            request = job.save(folder / branch, strategy, async_sharded_save=saving == "async")
            if request is not None:
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
    numbers += [job.train(), job.train()]
    with tsck.megatron.register(folder / "store", ref="shared") as registered:
        again = Job(1, 1, "fully_reshardable")
        again.load(folder / "shared" / "iter_0000002", FullyParallelLoadStrategyWrapper(registered.load, group))
        say(numbers=numbers, again=[again.train(), again.train()], stored=stored)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
