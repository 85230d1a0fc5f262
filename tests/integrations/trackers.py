"""A store with snapshots, for the tests of trackers."""

import torch

import tensorstore_ck as tsck
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import ReadOnlyStore, Store

REF = "runs/gpt"
FREE_ALL = tsck.GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1)


def save(store: Store, step: int | None) -> Snapshot:
    return store.put_snapshot(state(step), ref=REF, step=step, metrics={"loss": 1 / ((step or 0) + 1), "bad": float("nan")})


def state(step: int | None) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step or 0))}


def restored(store: Store | ReadOnlyStore, address: str) -> float:
    return float(store.checkout(address)["weight"][999])
