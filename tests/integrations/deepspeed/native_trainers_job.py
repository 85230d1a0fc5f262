"""The trainers' own folders, on ranks: ``native_trainers_job FOLDER transformers|accelerate save|resume KIND...``.

``save``: a run of the trainer itself writes folders, and one over the store snapshots of the branch KIND. ``resume``: the trainer resumes
from the folder, and the one over the store from the branch ``imported/KIND``; at the end the engines of both are saved, and compared.
"""

import sys
from pathlib import Path

import tensorstore_ck as tsck
from tests.integrations.deepspeed.engines import Kind, join
from tests.integrations.deepspeed.stages_job import differing, parse
from tests.integrations.deepspeed.trainers_job import TRAINERS
from tests.integrations.rank_runs import say


def main(folder: Path, trainer: str, what: str, kinds: list[Kind]) -> None:
    rank, runs = join(), TRAINERS[trainer]
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        for kind in kinds if what == "save" else ():
            say(kind=kind.ref, path=str(runs.save_natively(kind, folder, store)))
        for kind in kinds if what == "resume" else ():
            (native,) = folder.glob(f"{kind.ref}/native/**/{runs.SAVED_NAME}")
            imported, done = f"imported/{kind.ref}", {}
            for name in ("natively", "imported"):
                place = folder / kind.ref / name
                found = (
                    runs.resume_natively(kind, place, native) if name == "natively" else runs.resume_imported(kind, place, store, imported)
                )
                engine, done[name] = found
                tsck.deepspeed.attach(engine, store, ref=f"end/{name}/{kind.ref}", asynchronous=False)
                engine.save_checkpoint(place / "engine")
            compared = differing(store, *(f"end/{name}/{kind.ref}" for name in done))
            say(kind=kind.ref, **done, **compared)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [parse(each) for each in sys.argv[4:]])
