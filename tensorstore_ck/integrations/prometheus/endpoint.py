"""The HTTP server: ``GET /metrics``."""

import logging
import socket
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

PATH: Final = "/metrics"
_REQUEST_SECONDS: Final = 30
_HOME: Final = f"The exporter of tensorstore_ck: its metrics are at {PATH}.\n"

_logger = logging.getLogger(__name__)
StartResponse = Callable[[str, list[tuple[str, str]]], object]


class Endpoint:
    """Listens from the beginning, and answers during `serve`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, *, on_error: Callable[[], object]) -> None:
        """Binds the address; port 0: a free one. `on_error` is called after each scrape that failed.

        Raises:
            OSError: the address cannot be used.
        """
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._server = _Server(address, family, _Application(registry, on_error))
        host, port = self._server.socket.getsockname()[:2]
        self.url: Final = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def serve(self) -> None:
        """Answers requests until `stop` is called in another thread, or the process is interrupted."""
        self._server.serve_forever()

    def stop(self) -> None:
        """Ends `serve`."""
        self._server.shutdown()

    def close(self) -> None:
        """Gives the address up."""
        self._server.server_close()


class _Application:
    """The requests as WSGI."""

    def __init__(self, registry: CollectorRegistry, on_error: Callable[[], object]) -> None:
        self._metrics = make_wsgi_app(registry)
        self._on_error = on_error

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""
        if environ["PATH_INFO"] == "/":
            return _text(start_response, "200 OK", _HOME)
        if environ["PATH_INFO"] != PATH:
            return _text(start_response, "404 Not Found", _HOME)
        try:
            answer: Iterable[bytes] = self._metrics(environ, start_response)
        except Exception:
            self._on_error()
            _logger.exception("a scrape failed")
            return _text(start_response, "500 Internal Server Error", "The exporter failed: see its log.\n")
        return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: Any, family: socket.AddressFamily, application: _Application) -> None:
        self.address_family = family
        super().__init__(address, _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Binds without asking the name service for this host's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Logs no requests."""


def _text(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])  # a list of its own, since the server adds to it
    return [text.encode()]
