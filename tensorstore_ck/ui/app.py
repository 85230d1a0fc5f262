"""The application: routes, templates, and what an error looks like."""

import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import NotFoundError, StoreError
from tensorstore_ck.ui.overview import read_overview
from tensorstore_ck.ui.security import Access, Guard
from tensorstore_ck.ui.sources import Sources
from tensorstore_ck.ui.text import duration_text, time_text


def make_app(sources: Sources, access: Access) -> Starlette:
    """The pages of `sources`, for who has the token of `access`."""
    environment = Environment(loader=PackageLoader("tensorstore_ck.ui"), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"bytes": human_bytes, "time": time_text, "duration": duration_text}
    environment.globals["prefix"] = access.prefix

    def page(name: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(environment.get_template(name).render(values), status)

    def overview(_: Request) -> Response:
        failed = sources.refresh()
        try:
            with sources.catalog.reading() as connection:
                found = read_overview(connection)
        except NotFoundError:  # no store could be read yet, so there is no catalog
            if not failed:
                raise
            found = ()
        return page("overview.html", stores=found, failed=failed)

    def error(_: Request, exc: Exception) -> Response:
        if isinstance(exc, HTTPException):
            return page("error.html", exc.status_code, title=HTTPStatus(exc.status_code).phrase, message=exc.detail)
        return page("error.html", 404 if isinstance(exc, NotFoundError) else 503, title="This page cannot be shown", message=str(exc))

    handlers: dict[Any, Callable[[Request, Exception], Response]] = {StoreError: error, HTTPException: error}
    routes = [Route("/", overview), Mount("/static", StaticFiles(packages=[("tensorstore_ck.ui", "static")]))]
    return Starlette(routes=routes, middleware=[Middleware(Guard, access=access)], exception_handlers=handlers)


def serve(app: Starlette, listening: socket.socket) -> None:
    """Answers requests until the process is interrupted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])
