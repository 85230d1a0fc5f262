"""The HTTP server: ``GET /metrics``.

Many idle connections hold up no scrape: the oldest one is closed for a new one. A site that a user of this host visits cannot read the
metrics through the browser: on a loopback address only requests for a loopback host are answered.
"""

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

PATH: Final = "/metrics"
_REQUEST_SECONDS: Final = 30
_MAX_CONNECTIONS: Final = 64
_HOME: Final = f"The exporter of tensorstore_ck: its metrics are at {PATH}.\n"

_logger = logging.getLogger(__name__)
StartResponse = Callable[[str, list[tuple[str, str]]], object]


class Endpoint:
    """Listens from the beginning, and answers during `serve`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, *, on_error: Callable[[], object]) -> None:
        """Binds the address (port 0: a free one), or raises `OSError`. `on_error` is called after each scrape that failed."""
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        application = _Application(registry, on_error)
        self._server = _Server(address, family, application)
        host, port = self._server.socket.getsockname()[:2]
        application.is_local = _is_loopback(host)
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
    def __init__(self, registry: CollectorRegistry, on_error: Callable[[], object]) -> None:
        self._metrics = make_wsgi_app(registry)
        self._on_error = on_error
        self.is_local = False
        """Whether the server listens on a loopback address."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if self.is_local and not _is_loopback(_host_name(environ.get("HTTP_HOST", "localhost"))):
            return _text(start_response, "403 Forbidden", "This address answers requests for 127.0.0.1 or localhost alone.\n")
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
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, address: Any, family: socket.AddressFamily, application: _Application) -> None:
        self.address_family = family
        self._connections: dict[Any, None] = {}
        """The open ones, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread. A scrape takes milliseconds, so that the oldest of many connections is an idle one."""
        with self._lock:
            oldest = next(iter(self._connections)) if len(self._connections) >= _MAX_CONNECTIONS else None
            self._connections.pop(oldest, None)
            self._connections[request] = None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Binds without asking the name service for this host's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Logs no requests."""


def _host_name(host: str) -> str:
    """``HOST:PORT`` or ``[HOST]:PORT`` without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])  # a list of its own, since the server adds to it
    return [text.encode()]
