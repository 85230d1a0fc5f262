"""Branches, tags and histories as one call returns them."""

from typing import Any

import pytest

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.table_rows import BRANCHES
from tests.gc.forged import forge
from tests.gc.stores import open_store, state


def test_thousands_of_names_of_one_snapshot_cost_one_copy_of_its_metrics() -> None:
    """A writer makes them with one entry, and a thousand long metrics for each would be gigabytes."""
    store = open_store()
    root = Digest(
        bytes.fromhex(store.put_snapshot(state(1), ref="r", step=1, metrics={f"{'m' * 240}{number}": 1.0 for number in range(100)}).root)
    )
    forge(
        store.engine,
        lambda _: [*(Op.branch(f"b{number}", root) for number in range(50)), *(Op.tag(f"t{number}", root) for number in range(50))],
    )
    assert len({id(found.metrics) for found in store.branches().values()}) == 1
    assert len({id(found.metrics) for found in store.tags().values()}) == 1
    assert (len(store.branches()), len(store.tags())) == (51, 50)


def test_the_last_snapshots_of_a_branch_need_no_other_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    store, scanned = open_store(), list[object]()
    first, second = (store.put_snapshot(state(number), ref="r", step=number) for number in (1, 2))
    store.branch("beside", first.root)
    scan = RefTable.scan

    def noted(view: RefTable, kind: Any, *args: Any, **options: Any) -> Any:
        scanned.append(kind)
        return scan(view, kind, *args, **options)

    monkeypatch.setattr(RefTable, "scan", noted)
    assert store.log("r", limit=1).heads == {second.id: ["r"]}
    assert BRANCHES not in scanned
    assert store.log("r", limit=2).heads == {second.id: ["r"], first.id: ["beside"]}
    store.branch("also", second.root)
    assert store.log("r", limit=1).heads == {second.id: ["also", "r"]}


def test_a_log_of_all_with_a_limit_reads_the_branches_that_moved_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    looked: list[bytes] = []
    look = RefTable.snapshot

    def noted(view: RefTable, ulid: bytes) -> SnapshotRow | None:
        looked.append(ulid)
        return look(view, ulid)

    monkeypatch.setattr(RefTable, "snapshot", noted)
    counts = []
    for branches in (range(8), range(8, 40)):
        for branch in branches:
            for step in range(3):
                store.put_snapshot({"n": 100 * branch + step}, ref=f"runs/{branch}", step=step)
        looked.clear()
        store.log(limit=4)
        counts.append(len(looked))
    assert counts[0] == counts[1]


def test_a_log_of_all_with_a_limit_is_the_first_rows_of_all() -> None:
    store = open_store()
    for branch in ("a", "b", "c"):
        for step in range(4):
            store.put_snapshot({"n": f"{branch}{step}"}, ref=branch, step=step)
    store.branch("d", "a~2")
    store.reset("b", "b~3")
    store.reset("a", "a~1")
    everything = store.log()
    with pytest.raises(InvalidOptionError, match="limit"):
        store.log(limit=-1)
    for limit in range(14):
        log = store.log(limit=limit)
        assert [*log] == [*everything][:limit]
        shown = {snapshot.id for snapshot in log}
        assert log.abandoned & shown == everything.abandoned & shown
