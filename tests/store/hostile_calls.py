"""Public calls on a store that somebody else writes to: each may raise this package's errors, and no other. One call an entry."""

import warnings
from collections.abc import Callable
from typing import Final

import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import StoreError
from tensorstore_ck.store import Store
from tests.store.hostile_objects import state_at


def read_lazily(store: Store, ref: str) -> None:
    with store.open_snapshot(ref) as snapshot:
        for name in snapshot:
            snapshot[name]


def put_difference(store: Store, ref: str) -> None:
    """The structure of what the branch has: blocks are compared with those of its head."""
    store.put_snapshot(state_at(9), ref=ref, step=10, expect=tsck.ANY, delta=True)
    store.checkout(ref)


READING: Final[dict[str, Callable[[Store, str], object]]] = {
    "branches": lambda store, _: store.branches(),
    "tags": lambda store, _: store.tags(),
    "log": lambda store, ref: list(store.log(ref)),
    "log of all": lambda store, _: list(store.log()),
    "resolve": lambda store, ref: store.resolve(ref),
    "metadata": lambda store, ref: store.metadata(ref),
    "random streams": lambda store, ref: store.random_streams(ref),
    "checkout": lambda store, ref: store.checkout(ref),
    "checkout into": lambda store, ref: store.checkout(ref, into={"w": torch.zeros(3000)}, strict=False),
    "open": read_lazily,
    "show": lambda store, ref: store.show(ref),
    "diff": lambda store, ref: store.diff(f"{ref}~1", ref),
    "prove": lambda store, ref: store.prove(ref, "w"),
    "contains": lambda store, ref: store.contains(ref, f"{ref}~1"),
    "statistics": lambda store, ref: store.statistics(ref),
    "find NaN": lambda store, ref: store.find_nan(ref),
    "change statistics": lambda store, ref: store.change_statistics(f"{ref}~1", ref),
    "usage": lambda store, _: store.usage(per_snapshot=True),
    "fsck": lambda store, _: store.fsck(),
    "fsck data": lambda store, _: store.fsck(read_data=True),
    "policies": lambda store, _: {glob: str(policy) for glob, policy in store.policies().items()},
    "explain": lambda store, ref: store.explain_retention(ref),
    "apply dry": lambda store, _: store.apply_policies(dry_run=True),
    "quotas": lambda store, _: store.quotas(),
    "pins": lambda store, _: store.pins(),
    "forgotten": lambda store, _: store.forgotten(),
    "last runs": lambda store, _: store.last_runs(),
    "advise": lambda store, ref: store.advise(ref),
    "gc dry": lambda store, _: store.gc(dry_run=True),
    "tiers": lambda store, _: store.migrate_tiers(dry_run=True),
    "html": lambda store, ref: store.log(ref)._repr_html_(),
}
WRITING: Final[dict[str, Callable[[Store, str], object]]] = {
    "put": lambda store, ref: store.put_snapshot({"w": torch.ones(3000)}, ref=ref, step=9, expect=tsck.ANY),
    "put delta": put_difference,
    "put new": lambda store, _: store.put_snapshot({"w": torch.ones(3000)}, ref="runs/new", step=9, expect=tsck.ANY),
    "annotate": lambda store, ref: store.annotate(ref, {"loss": 1.0}),
    "gc": lambda store, _: store.gc(),
    "apply": lambda store, _: store.apply_policies(),
    "recode": lambda store, _: store.recode(),
    "repair": lambda store, _: store.repair(),
    "repair data": lambda store, _: store.repair(read_data=True),
    "forget": lambda store, _: store.forget("runs/b"),
    "undo": lambda store, _: store.undo(),
}
CALLS: Final = READING | WRITING


def require_only_our_errors(open_store: Callable[[], Store], ref: str, title: str) -> None:
    """Makes all calls, and fails with the name of one that raises another error; `title`: the store, for the message."""
    with warnings.catch_warnings(action="ignore"):
        try:
            store = open_store()
        except StoreError:
            return
        except Exception as exc:
            raise AssertionError(f"opening {title}") from exc
        for name, call in CALLS.items():
            try:
                call(store, ref)
            except StoreError:
                pass
            except Exception as exc:
                raise AssertionError(f"{name} of {title}") from exc
