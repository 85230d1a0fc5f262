"""DeepSpeed's own folders, under torchrun: ``folders_job FOLDER save KIND...`` and ``folders_job FOLDER load KIND@PATH...``.

``save``: one engine of each kind trains; DeepSpeed saves it to ``FOLDER/KIND``, tensorstore_ck to the branch KIND of ``FOLDER/store``, and
it trains on. ``load``: DeepSpeed loads the folder PATH into an engine of each kind, tensorstore_ck saves that to the branch
``loaded/KIND/NAME`` with the name of PATH, and it trains on. Each rank says what it did in lines of JSON.
"""

import sys
from pathlib import Path

import tensorstore_ck as tsck
from tests.integrations.deepspeed.engines import join, make, train
from tests.integrations.deepspeed.stages_job import SAVED_AFTER, STEPS, parse
from tests.integrations.rank_runs import say


def main(folder: Path, what: str, arguments: list[str]) -> None:
    rank = join()
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        for text in arguments if what == "save" else ():
            kind = parse(text)
            engine = make(kind)
            train(engine, rank, range(SAVED_AFTER))
            if kind.ep_size:
                engine.module.write_numbers()
            engine.save_checkpoint(folder / kind.ref, client_state={"epoch": 7, "rank": rank})
            tsck.deepspeed.attach(engine, store, ref=kind.ref, asynchronous=False)
            assert engine.save_checkpoint(folder / "light", client_state={"epoch": 7, "rank": rank})
            say(ref=kind.ref, losses=train(engine, rank, range(SAVED_AFTER, STEPS)))
            engine.destroy()
        for text in arguments if what == "load" else ():
            left, _, path = text.rpartition("@")
            kind = parse(left)
            engine = make(kind)
            found, _ = engine.load_checkpoint(path)
            assert found is not None
            ref = f"loaded/{kind.ref}/{Path(path).name}"
            tsck.deepspeed.attach(engine, store, ref=ref, asynchronous=False)
            assert engine.save_checkpoint(folder / "light")
            say(ref=ref, step=engine.global_steps, losses=train(engine, rank, range(SAVED_AFTER, STEPS)))
            engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
