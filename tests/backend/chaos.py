"""An HTTP proxy on loopback that does, request by request, what networks and servers do on bad days."""

import contextlib
import http.client
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Fault(Enum):
    """What happens to one request."""

    NONE = "forward it, and its reply"
    LOSE_REPLY = "forward it, then hang up instead of replying"
    LOSE_REQUEST = "hang up without forwarding it"
    RESET = "reset the connection without forwarding it"
    REPLY_412 = "forward it, then 412: as to the second of two that a library sent"
    HANG = "never answer it, and do not forward it"
    HANG_AFTER = "forward it, but never answer"
    CUT_HEADERS = "forward it, then hang up in the middle of the reply's headers"
    CUT_BODY = "forward it, then hang up in the middle of the reply's body"
    HANG_IN_BODY = "forward it, then fall silent in the middle of the reply's body"
    SHORT_BODY = "forward it, and half of the reply's body, as if that were all"
    WHOLE_BODY = "forward it without its range"
    REPLY_THEN_HANG = "forward it, and its reply, but serve this connection no more"
    CUT_404 = "hang up in the middle of a 404's body"
    CUT_503 = "hang up in the middle of a 503's body"
    BAD_503 = "503 with a body that is no XML"
    ERROR_IN_200 = "200 with an error in the body"
    BAD_200 = "forward it, then 200 with a body that is no XML"
    ANSWER = "reply with `ChaosProxy.answer`"
    STATUS_403 = "403"
    STATUS_409 = "409"
    STATUS_412 = "412"
    STATUS_429 = "429"
    STATUS_500 = "500"
    STATUS_501 = "501"
    STATUS_503 = "503"


@dataclass(frozen=True)
class Request:
    """What a plan decides on."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    body: bytes = field(default=b"", compare=False, repr=False)
    """Of requests on the bucket, which tell there what is deleted; kept of no others."""


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


_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>Said by the proxy.</Message></Error>"


class ChaosProxy:
    """Forwards to `port` as `plan` says; `seen` has every request that arrived."""

    def __init__(self, port: int) -> None:
        self.upstream_port = port
        self.plan: Plan = lambda _: Fault.NONE
        self.seen: list[Request] = []
        self.url = ""
        self.answer: tuple[int, bytes] = (200, b"")
        self.silence_ends = threading.Event()
        self.hanging = threading.Event()
        """Set while a client waits for an answer that does not come."""

    def hang_up(self) -> None:
        """Closes all connections that hang."""
        self.hanging.clear()
        self.silence_ends.set()
        self.silence_ends = threading.Event()

    def hang(self, connection: socket.socket) -> None:
        """Returns when the client has left, or the test ends."""
        leaves = select.poll()
        leaves.register(connection, select.POLLRDHUP)
        self.hanging.set()
        ends = self.silence_ends
        while not ends.wait(0.01) and not leaves.poll(0):
            pass
        self.hanging.clear()


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
            proxy.hang_up()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes connections, and neither reads nor answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Handler(BaseHTTPRequestHandler):
    chaos: ChaosProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Silent."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers.items()), body if "?delete" in self.path else b"")
        self.chaos.seen.append(request)
        fault = self.chaos.plan(request)
        if fault.value.isdigit():
            self._reply(int(fault.value), {}, b"")
            return
        if fault is Fault.NONE:
            self._reply(*self._forward(body))
        else:
            self.close_connection = True
            self._disturb(fault, body)

    def _disturb(self, fault: Fault, body: bytes) -> None:
        match fault:
            case Fault.LOSE_REQUEST:
                pass
            case Fault.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            case Fault.LOSE_REPLY:
                self._forward(body)
            case Fault.REPLY_412:
                self._forward(body)
                self._reply(412, {}, _ERROR % b"PreconditionFailed")
            case Fault.HANG:
                self.chaos.hang(self.connection)
            case Fault.HANG_AFTER:
                self._forward(body)
                self.chaos.hang(self.connection)
            case Fault.CUT_HEADERS:
                self._forward(body)
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            case Fault.CUT_BODY | Fault.HANG_IN_BODY:
                status, headers, reply = self._forward(body)
                self._reply(status, headers, reply[: len(reply) // 2])
                if fault is Fault.HANG_IN_BODY and reply:
                    self.wfile.flush()
                    self.chaos.hang(self.connection)
            case Fault.SHORT_BODY:
                status, headers, reply = self._forward(body)
                self._reply(status, {**headers, "Content-Length": str(len(reply) // 2)}, reply[: len(reply) // 2])
            case Fault.WHOLE_BODY:
                del self.headers["Range"]
                self._reply(*self._forward(body))
            case Fault.REPLY_THEN_HANG:
                self._reply(*self._forward(body))
                self.wfile.flush()
                select.select([self.connection], [], [])  # the next request, or the end
                self.chaos.hang(self.connection)
            case Fault.CUT_404:
                self._cut_error(404, b"NoSuchKey")
            case Fault.CUT_503:
                self._cut_error(503, b"SlowDown")
            case Fault.BAD_503:
                self._reply(503, {}, b"<html>busy<br></html>")
            case Fault.ERROR_IN_200:
                self._reply(200, {}, _ERROR % b"InternalError")
            case Fault.BAD_200:
                self._forward(body)
                self._reply(200, {}, b"<html>busy<br></html>")
            case Fault.ANSWER:
                status, text = self.chaos.answer
                self._reply(status, {}, text)
            case _:
                raise AssertionError(fault)

    def _cut_error(self, status: int, code: bytes) -> None:
        text = _ERROR % code
        self._reply(status, {"Content-Type": "application/xml", "Content-Length": str(len(text))}, text[: len(text) // 2])

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
