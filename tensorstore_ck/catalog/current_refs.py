"""Refs, tags, pins, policies, quotas and states of snapshots, as the fold has them now.

The fold may be ahead of the catalog: the next batch reads the changes of the entries in between again.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from tensorstore_ck.catalog.read_entries import Row, clean
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.log import RefTable

LIVE: Final = "live"
FORGOTTEN: Final = "forgotten"
GONE: Final = "gone"
STATES: Final = (LIVE, FORGOTTEN, GONE)


def states(view: RefTable, ulids: Iterable[Ulid]) -> dict[str, str]:
    """The state of each snapshot: live if a history, tag or pin holds it, forgotten if only undo windows do, else gone."""
    in_windows = Counter(move.ulid for window in view.windows() for move in window.moves)
    states_by_ulid = {}
    for ulid in ulids:
        holds = view.holds(ulid)
        states_by_ulid[ulid_text(ulid)] = LIVE if holds > in_windows[ulid] else FORGOTTEN if holds else GONE
    return states_by_ulid


def refs(view: RefTable) -> list[Row]:
    """Rows of the table `refs`: the branches."""
    heads = [head for name in view.branches() if (head := view.branch(name)) is not None]
    return [
        {
            "name": head.name,
            "ulid": ulid_text(head.ulid),
            "root": head.root.hex(),
            "step": head.step,
            "n": head.n,
            "time_ns": head.time_ns,
            "moves": head.length,
        }
        for head in heads
    ]


def tags(view: RefTable) -> list[Row]:
    """Rows of the table `tags`."""
    return [
        {"name": name, "ulid": ulid_text(row.ulid), "root": row.root.hex(), "n": row.n, "time_ns": row.time_ns}
        for name, row in view.tag_rows()
    ]


def pins(view: RefTable) -> list[Row]:
    """Rows of the table `pins`."""
    return [
        {
            "ulid": ulid_text(pin.ulid),
            "owner": clean(pin.owner),
            "reason": clean(pin.reason),
            "expires_ns": pin.expires_ns,
            "n": pin.n,
            "time_ns": pin.time_ns,
        }
        for pin in view.pins()
    ]


def policies(view: RefTable) -> list[Row]:
    """Rows of the table `policies`."""
    return [
        {"glob": glob, "rules": json.dumps(row.rules, ensure_ascii=False, sort_keys=True), "n": row.n, "time_ns": row.time_ns}
        for glob, row in view.policies().items()
    ]


def quotas(view: RefTable) -> list[Row]:
    """Rows of the table `quotas`."""
    return [{"glob": glob, **row._asdict()} for glob, row in view.quotas().items()]


TABLES: Final[Mapping[str, Callable[[RefTable], list[dict[str, Any]]]]] = {
    "refs": refs,
    "tags": tags,
    "pins": pins,
    "policies": policies,
    "quotas": quotas,
}
"""Table -> its rows."""
