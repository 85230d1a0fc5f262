"""The application: the routes of all pages, and error pages."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tensorstore_ck.common.prices import NO_PRICES, Prices
from tensorstore_ck.errors import StoreError
from tensorstore_ck.ui import (
    actions,
    activity,
    catalog_snapshots,
    compare_runs,
    compare_snapshots,
    find,
    health,
    overview,
    ref,
    series,
    snapshot,
    snapshot_tensors,
    space,
    tensor_statistics,
)
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.security import Access, Guard
from tensorstore_ck.ui.sources import Sources

if TYPE_CHECKING:
    from tensorstore_ck.store import OpenOptions

Page = Callable[[Pages, Request], Response]

OF_ALL: Final[dict[str, Page]] = {
    "": overview.page,
    "runs": compare_runs.page,
    "find": find.page,
    "activity": activity.page,
}
"""Path -> page."""
OF_A_STORE: Final[dict[str, Page]] = {
    "ref": ref.page,
    "ref/series": series.answer,
    "addresses": catalog_snapshots.addresses_page,
    "compare": compare_snapshots.page,
    "compare/changes": compare_snapshots.changes_page,
    "compare/tensors": compare_snapshots.tensors_page,
    "snapshot": snapshot.page,
    "snapshot/kept": snapshot.kept_page,
    "snapshot/statistics": tensor_statistics.page,
    "snapshot/tensors": snapshot_tensors.page,
    "snapshot/values": snapshot_tensors.values_page,
    "snapshot/value": snapshot_tensors.value_page,
    "space": space.page,
    "health": health.page,
    "forgotten": space.forgotten_page,
}
"""Path below ``/stores/UUID/`` -> page."""


def make_app(
    sources: Sources,
    access: Access,
    complete: Callable[[str], str] = str,
    open_options: "OpenOptions | None" = None,
    prices: Prices = NO_PRICES,
) -> ASGIApp:
    """The pages of `sources`, for users with the token of `access`. `complete`, `open_options`, `prices`: see `Pages`."""
    pages = Pages(sources, access, complete, open_options, prices=prices)

    def route(path: str, page: Page) -> BaseRoute:
        def answer(request: Request) -> Response:  # not a coroutine: Starlette runs it in a thread
            with pages.notices.showing(request):
                return page(pages, request)

        return Route(path, answer)

    routes = [
        *(route(f"/{path}", page) for path, page in OF_ALL.items()),
        *(route(f"/stores/{{store}}/{path}", page) for path, page in OF_A_STORE.items()),
        *(Route(f"/stores/{{store}}/do/{verb}", actions.answer(pages, verb), methods=["POST"]) for verb in sorted(access.allow)),
        Mount("/static", StaticFiles(packages=[("tensorstore_ck.ui", "static")])),
    ]
    handlers: dict[Any, Callable[[Request, Exception], Response]] = {StoreError: pages.error, HTTPException: pages.error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # it does not know the part of the path that a proxy adds
    return Guard(app, access)  # outermost: Starlette answers unexpected errors outside of its middleware


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Answers requests until the process is interrupted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])
