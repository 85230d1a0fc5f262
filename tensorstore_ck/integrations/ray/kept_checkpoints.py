"""Pins for what Ray keeps: a snapshot that one of Ray's checkpoints names stays, whatever the policies of its ref say.

Ray alone decides which checkpoints it keeps: by nested scores, missing ones, and those that validations add later. Its list is followed,
one report later. A pin's owner is the folder of the experiment, its reason the name of the checkpoint.
"""

import warnings
from pathlib import PurePath

from ray.train import Checkpoint

from tensorstore_ck.errors import StoreError
from tensorstore_ck.integrations.ray.compatibility import reported_checkpoints
from tensorstore_ck.integrations.trainer.pointers import is_there, read_pointer
from tensorstore_ck.store import Store


def pin_reported(store: Store, checkpoint: Checkpoint, address: str) -> None:
    """Pins the snapshot at `address` for as long as Ray has the checkpoint. A failure is a warning: `follow_ray` tries again."""
    path = PurePath(checkpoint.path)
    try:
        store.pin(address, owner=_owner(path), reason=path.name)
    except StoreError as exc:
        warnings.warn(f"the snapshot {address[:16]} of {path} is not pinned: {exc}; the next report tries again", stacklevel=3)


def follow_ray(store: Store, ref: str) -> None:
    """Unpins the snapshots of `ref` whose checkpoints Ray has deleted; pins those of checkpoints that have no pin.

    Ray takes reports in their order, up to two later than a worker makes them. So a pin that is older than one of a checkpoint in Ray's
    list, and not in the list, is one that Ray has deleted, or never took since the worker died; a younger one may be on its way.
    """
    reported = reported_checkpoints()
    listed = {PurePath(report.checkpoint.path).name: report.checkpoint for report in reported}
    if not listed:
        return
    owner = _owner(PurePath(reported[0].checkpoint.path))
    try:
        pinned = {pin.reason: pin for pin in store.pins() if pin.owner == owner}
        newest = max((pin.time_ns for name, pin in pinned.items() if name in listed), default=0)
        for name, pin in pinned.items():
            if name not in listed and pin.time_ns < newest and pin.snapshot.ref == ref:
                store.unpin(pin.snapshot.root, owner=owner)
    except StoreError as exc:
        warnings.warn(f"snapshots that Ray deleted may stay pinned: {exc}; the next report tries again", stacklevel=3)
        return
    for name in listed.keys() - pinned.keys():
        with listed[name].as_directory() as folder:
            pointer = read_pointer(folder)
        if pointer is not None and is_there(store, pointer.address):
            pin_reported(store, listed[name], pointer.address)


def _owner(checkpoint: PurePath) -> str:
    return f"ray {checkpoint.parent}"
