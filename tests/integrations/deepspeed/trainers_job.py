"""Trainers with DeepSpeed under torchrun: ``trainers_job FOLDER transformers|accelerate train|load KIND...``; a kind is as in stages_job.

``train``: for each kind a run that nothing disturbs, and one that is cut and resumed. ``load``: each kind resumes a snapshot of each of
them; the engine then saves itself as it is. Each rank says what it did in lines of JSON.
"""

import sys
from pathlib import Path
from typing import Any, Final

import tensorstore_ck as tsck
from tests.integrations.deepspeed import with_accelerate, with_transformers
from tests.integrations.deepspeed.engines import Kind, join
from tests.integrations.deepspeed.stages_job import parse

TRAINERS: Final[dict[str, Any]] = {"transformers": with_transformers, "accelerate": with_accelerate}


def main(folder: Path, trainer: str, what: str, kinds: list[Kind]) -> None:
    rank, runs = join(), TRAINERS[trainer]
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        saved = [name for name in sorted(store.branches()) if name.startswith("runs/") and not name.endswith("/whole")]
        for kind in kinds:
            if what == "train":
                runs.train(kind, folder, store)
                continue
            for ref in (each for each in saved if each.startswith(f"runs/{kind.dtype}-")):
                runs.load(kind, folder, store, ref)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [parse(each) for each in sys.argv[4:]])
