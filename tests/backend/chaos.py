"""An HTTP proxy on loopback that does, request by request, what networks and servers do on bad days."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Fault(Enum):
    """What happens to one request."""

    NONE = "forward it, and its reply"
    LOSE_REPLY = "forward it, then hang up instead of replying"
    LOSE_REQUEST = "hang up without forwarding it"
    CUT_BODY = "forward it, then hang up in the middle of the reply's body"
    STATUS_409 = "409"
    STATUS_412 = "412"
    STATUS_501 = "501"
    STATUS_503 = "503"


@dataclass(frozen=True)
class Request:
    """What a plan decides on."""

    method: str
    path: str


Plan = Callable[[Request], Fault]


def once(fault: Fault, method: str, marker: str = "") -> Plan:
    """`fault` for the first request of that method whose path has `marker` in it."""
    return first(1, fault, method, marker)


def first(count: int, fault: Fault, method: str, marker: str = "") -> Plan:
    """`fault` for the first `count` such requests."""
    lock = threading.Lock()
    left = count

    def plan(request: Request) -> Fault:
        nonlocal left
        with lock:
            if left and request.method == method and marker in request.path:
                left -= 1
                return fault
        return Fault.NONE

    return plan


class ChaosProxy:
    """Forwards to `port` as `plan` tells; `seen` has every request that came."""

    def __init__(self, port: int) -> None:
        self.upstream_port = port
        self.plan: Plan = lambda _: Fault.NONE
        self.seen: list[Request] = []
        self.url = ""


@contextlib.contextmanager
def chaos_proxy(port: int) -> Iterator[ChaosProxy]:
    """Runs a proxy in front of 127.0.0.1:`port`."""
    proxy = ChaosProxy(port)

    class Handler(_Handler):
        chaos = proxy

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    chaos: ChaosProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Silent."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path)
        self.chaos.seen.append(request)
        fault = self.chaos.plan(request)
        if fault.value.isdigit():
            self._reply(int(fault.value), {}, b"")
            return
        if fault is Fault.LOSE_REQUEST:
            self.close_connection = True
            return
        status, headers, reply = self._forward(body)
        if fault is Fault.LOSE_REPLY:
            self.close_connection = True
            return
        if fault is Fault.CUT_BODY:
            self._reply(status, headers, reply[: len(reply) // 2])
            self.close_connection = True
            return
        self._reply(status, headers, reply)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends the request on; the Host header stays, since the signature covers it."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.chaos.upstream_port)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
            upstream.request(self.command, self.path, body=body, headers=headers)
            reply = upstream.getresponse()
            data = reply.read()
            kept = {name: value for name, value in reply.getheaders() if name.lower() not in ("connection", "transfer-encoding")}
            if self.command != "HEAD":
                kept["Content-Length"] = str(len(data))
            return reply.status, kept, data
        finally:
            upstream.close()

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in (headers or {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle
