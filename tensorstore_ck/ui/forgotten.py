"""The page of forgotten snapshots that can be restored."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.maintenance.forget import Forgotten
from tensorstore_ck.ui.pages import Pages

MAX_WINDOWS: Final = 100
MAX_NAMED: Final = 5
"""Snapshots of an undo window that are shown."""


@dataclass(frozen=True, slots=True)
class Window:
    """The snapshots that one log entry removed from one branch or tag."""

    what: Forgotten
    is_next: bool
    """Whether the next undo of this branch or tag restores it; older windows follow."""


def page(pages: Pages, request: Request) -> Response:
    """The page; with ``name`` in the query, of one branch or tag."""
    store = pages.store_of(request)
    name = request.query_params.get("name", "")
    removals = [removal for removal in pages.sources.open(store).forgotten() if name in ("", removal.ref)]
    newest: dict[str, int] = {}
    for removal in removals:
        newest.setdefault(removal.ref, removal.entry)
    windows = [Window(removal, newest[removal.ref] == removal.entry) for removal in removals]
    return pages.render(
        "forgotten.html",
        "space",
        store=store,
        name=name,
        back="ref" if request.query_params.get("back") == "ref" else "forgotten",
        windows=windows[:MAX_WINDOWS],
        more=len(windows[MAX_WINDOWS:]),
    )
