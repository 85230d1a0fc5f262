"""The best snapshot of all jobs, found in a catalog: ``python -m examples.find_the_best FOLDER``. It needs `pip install sqlalchemy`."""

import argparse
from pathlib import Path

import torch

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog


def main(folder: Path) -> tuple[str, int]:
    """Saves two jobs; returns the branch and the step of the best snapshot."""
    torch.manual_seed(1)
    with tsck.open(folder / "store", create=True) as store, Catalog(str(folder / "catalog.sqlite")) as catalog:
        for job, worst in (("gpt-small", 3.0), ("gpt-large", 2.5)):
            for step in (10, 20, 30):
                state = {"w": torch.randn(1000)}
                store.put_snapshot(state, ref=f"runs/{job}", step=step, metrics={"val_loss": worst - step / 100})
        catalog.sync(store)  # reads the log entries since the last sync
        (best,) = catalog.find("val_loss < 2.4 and job like 'gpt%'", order_by="val_loss", limit=1)
        store.tag("best", best.root)
        return best.ref, best.step or 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print(*main(given.folder))
