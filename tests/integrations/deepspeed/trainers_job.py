"""Trainers with DeepSpeed under torchrun: ``trainers_job FOLDER transformers|accelerate WHAT KIND...``; a kind is as in stages_job.

``train``: for each kind a run that nothing disturbs, and one that is cut and resumed. ``load``: each kind resumes a snapshot of each of
them; the engine then saves itself as it is.

``save-natively``: a run of the trainer itself writes folders, and one over the store snapshots of the branch KIND. ``resume-imported``: the
trainer resumes from the folder, and the one over the store from the branch ``imported/KIND``; at the end the engines of both are saved, and
compared. Each rank says what it did in lines of JSON.
"""

import sys
from pathlib import Path
from typing import Any, Final

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.integrations.deepspeed import with_accelerate, with_transformers
from tests.integrations.deepspeed.engines import Kind, join
from tests.integrations.deepspeed.stages_job import differing, parse
from tests.integrations.rank_runs import say

TRAINERS: Final[dict[str, Any]] = {"transformers": with_transformers, "accelerate": with_accelerate}


def resume_imported(runs: Any, kind: Kind, folder: Path, store: Store) -> None:
    (native,) = folder.glob(f"{kind.ref}/native/**/{runs.SAVED_NAME}")
    done = {}
    for name in ("natively", "imported"):
        place = folder / kind.ref / name
        if name == "natively":
            engine, done[name] = runs.resume_natively(kind, place, native)
        else:
            engine, done[name] = runs.resume_imported(kind, place, store, f"imported/{kind.ref}")
        tsck.deepspeed.attach(engine, store, ref=f"end/{name}/{kind.ref}", asynchronous=False)
        engine.save_checkpoint(place / "engine")
    say(kind=kind.ref, **done, **differing(store, *(f"end/{name}/{kind.ref}" for name in done)))


def main(folder: Path, trainer: str, what: str, kinds: list[Kind]) -> None:
    rank, runs = join(), TRAINERS[trainer]
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        saved = [name for name in sorted(store.branches()) if name.startswith("runs/") and not name.endswith("/whole")]
        for kind in kinds:
            match what:
                case "train":
                    runs.train(kind, folder, store)
                case "load":
                    for ref in (each for each in saved if each.startswith(f"runs/{kind.dtype}-")):
                        runs.load(kind, folder, store, ref)
                case "save-natively":
                    say(kind=kind.ref, path=str(runs.save_natively(kind, folder, store)))
                case "resume-imported":
                    resume_imported(runs, kind, folder, store)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [parse(each) for each in sys.argv[4:]])
