"""torchtitan's Trainer under torchrun: ``rank_job FOLDER LAYOUT``. Says each step, and at the end what it did."""

import sys
from pathlib import Path
from typing import Any

from tests.integrations.rank_runs import say
from tests.integrations.titan import runs

DTENSOR = {"spmd_backend": "partial_dtensor"}  # the default refuses this model on CPUs
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": DTENSOR,
    "replicas": DTENSOR | {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "pipeline": DTENSOR | {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "tensor": DTENSOR | {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
}


def main(folder: Path, layout: str) -> None:
    checkpoint = runs.snapshots(folder, last_save_model_only=False)
    config = runs.make_config(folder, checkpoint, **LAYOUTS[layout])
    run = runs.train(config, on_step=lambda step: say(step=step))
    digests = {name: tensor.double().sum().item() for name, tensor in (run.weights | run.moments).items()}
    say(batches=run.batches, losses=run.losses, digests=digests, drawn=run.drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
