"""Logs of random operations that pass every check of their fields, with extreme values: each call raises this package's errors only."""

import random
from typing import Any, Final

import pytest
import torch

from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.log import Op
from tensorstore_ck.log.operations import op_problem
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.gc.forged import forge
from tests.gc.stores import open_store, stay_in_one_thread
from tests.store.hostile_calls import require_only_our_errors

STORES: Final = effort(60, 1000)
FLOATS: Final = [0.0, -0.0, 1e-300, 5e-324, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"), -1.0, 0.5, 1e18, 1e10]
INTEGERS: Final = [0, 1, 2, -1, (1 << 63) - 1, 1 << 62, 1 << 53, 10**18, -(1 << 63), 1 << 31, 86400]
DURATIONS: Final = ("keep_every_seconds", "keep_younger", "expire_after", "recode_after")
COUNTS: Final = ("keep_last", "keep_every", "max_bytes")
RULES: Final = (*DURATIONS, *COUNTS, "keep_best", "keep_steps", "keep_first", "move_after", "zzz")
KINDS: Final = (
    *(["policy"] * 12),
    *("quota", "report", "pin", "unpin", "tag", "untag", "reset", "branch", "annotate", "mark", "expire", "undo", "purge", "abort"),
    *("staged", "put", "settle", "condemn", "rescue", "sweep", "relocate", "place"),
)


class Forger:
    """Draws operations on one store."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        view = store.engine.log.newest_view()
        self._chance = chance
        self._n = view.head().n  # type: ignore[union-attr]
        self._infos = [*view.snapshots()]
        self._packs = [ulid for info in store.engine.backend.list("packs/") if (ulid := parse_ulid(info.name[-26:])) is not None]

    def _rule(self) -> tuple[str, object]:
        chance, name = self._chance, self._chance.choice(RULES)
        number = chance.choice([*FLOATS, *INTEGERS])
        if name in DURATIONS and chance.random() < 0.7:
            return name, chance.choice(FLOATS)
        if name in COUNTS and chance.random() < 0.7:
            return name, chance.choice(INTEGERS)
        best = [[number, chance.choice(["loss", "x", ""]), chance.choice(["min", "max", "?"])]]
        places = [[number, chance.choice(["/tmp/x", "s3://b/x", "http://h/x", "", "memory://q"])]]
        return name, chance.choice([number, [number, 1], best, places, True, "x", []])

    def operation(self) -> dict[str, Any]:
        """One that may be invalid."""
        chance, kind = self._chance, self._chance.choice(KINDS)
        name, big = chance.choice(["runs/a", "runs/b", "t", "zz", "runs/c"]), chance.choice([0, 1, self._n, (1 << 63) - 1])
        root = chance.choice([*(info.root for info in self._infos), bytes(32)])
        ulid = chance.choice([*(info.ulid for info in self._infos), Ulid(bytes(16)), Ulid(b"\xff" * 16)])
        packs = chance.choice([b"", chance.choice(self._packs)])
        objects = {"packs": packs, "parts": b"", "snapshots": chance.choice([b"", ulid]), "moved": chance.choice([b"", ulid])}
        snapshot = {
            "ref": name,
            "snapshot": chance.choice([ulid, chance.randbytes(16)]),
            "root": chance.choice([root, chance.randbytes(32)]),
            "record": bytes(32),
            "parent": chance.choice([None, root]),
            "step": chance.choice([None, 0, -(1 << 63), (1 << 63) - 1, 5]),
            "txn": chance.choice([ulid, chance.randbytes(16)]),
            "metrics": {"loss": chance.choice(FLOATS)},
            "anchor": big,
            "logical_bytes": big,
            "new_bytes": big,
            "duration_ns": chance.choice([-1, "x", 1 << 62]),
        }
        fields: dict[str, dict[str, Any]] = {
            "policy": {"glob": chance.choice(["*", "runs/*", "[!z]*"]), "rules": dict(self._rule() for _ in range(chance.randrange(1, 4)))},
            "quota": {"glob": "*", "warn_bytes": chance.choice([None, big]), "refuse_bytes": chance.choice([None, 1 << 40, (1 << 63) - 1])},
            "report": {"run": "gc", "outcome": "", "duration_ns": big, "counts": {chance.choice(["freed_bytes", ""]): big}, "message": "m"},
            "pin": {"root": root, "owner": "o", "reason": "r", "expires_ns": chance.choice([None, big])},
            "unpin": {"snapshot": ulid, "owner": "o"},
            "annotate": {"root": root, "metrics": {chance.choice(["loss", "", "x" * 200]): chance.choice(FLOATS)}},
            "mark": {"root": root, "mark": chance.choice(["bad", "damaged", "drift", ""]), "reason": "r"},
            "expire": {"name": name, "snapshots": chance.choice([None, ulid])},
            "undo": {"n": big, "name": name, "snapshots": ulid},
            **dict.fromkeys(("condemn", "rescue", "sweep"), objects),
            **dict.fromkeys(("put", "staged"), snapshot),
            "relocate": {"pack": chance.choice([*self._packs, ulid]), "moved": ulid, "hash": bytes(32), "targets": packs},
            "place": {"packs": packs, "url": chance.choice(["/x/y", "s3://b/c", "http://h/x", "x", "memory://z"])},
        }
        other = {"name": name, "root": root, "n": big, "txn": ulid}
        return {"op": kind, "critical": kind not in {"annotate", "mark", "quota", "report", "staged"}, **fields.get(kind, other)}


@pytest.mark.slow
def test_no_call_meets_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)
    for seed in range(STORES):
        store, chance = open_store(), random.Random(seed)
        for step in (1, 2):
            store.put_snapshot({"w": torch.full((3000,), float(step))}, ref="runs/a", step=step, metrics={"loss": 1.0 / step})
        store.put_snapshot({"w": torch.ones(3000)}, ref="runs/b", step=1)
        store.tag("t", "runs/a@1")
        forger = Forger(store, chance)
        for _ in range(chance.randrange(1, 4)):
            drawn = [forger.operation() for _ in range(chance.randrange(1, 4))]
            if valid := [Op(fields) for fields in drawn if op_problem(fields) is None]:
                forge(store.engine, lambda _, valid=valid: valid, age_days=0)  # type: ignore[misc]
        require_only_our_errors(lambda store=store: store, "runs/a", f"store {seed}")  # type: ignore[misc]
