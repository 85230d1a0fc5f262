"""The page of what was forgotten, and can come back."""

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
    """What one log entry removed from one branch or tag."""

    what: Forgotten
    is_next: bool
    """Whether undo of this branch or tag restores it: older ones come after it."""


def page(pages: Pages, request: Request) -> Response:
    """The page; ``name`` in the query: of this branch or tag alone."""
    store = pages.store_of(request)
    name = request.query_params.get("name", "")
    found = [each for each in pages.sources.open(store).forgotten() if name in ("", each.ref)]
    newest: dict[str, int] = {}
    for each in found:
        newest.setdefault(each.ref, each.entry)
    windows = [Window(each, newest[each.ref] == each.entry) for each in found]
    return pages.render(
        "forgotten.html",
        "space",
        store=store,
        name=name,
        back="ref" if request.query_params.get("back") == "ref" else "forgotten",
        windows=windows[:MAX_WINDOWS],
        more=len(windows[MAX_WINDOWS:]),
    )
