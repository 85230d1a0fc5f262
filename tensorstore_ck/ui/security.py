"""Access control: every request needs a known host, a reading method, and the token's cookie.

The first request has the token in its path; its answer sets the cookie and redirects to a URL without the token.
"""

import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorstore_ck.errors import InvalidOptionError

LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_NAMES: Final = frozenset({LOOPBACK, "localhost", "[::1]"})
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_DEFAULT_PORT: Final = {"http": ":80", "https": ":443"}
"""Browsers leave it out."""
_PATH: Final = re.compile(r"(/[A-Za-z0-9._~%@-]+)*")
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # without any, browsers leave the origin out of our own forms, too
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Access:
    """The conditions that a request must fulfil."""

    base: str = ""
    """The path under which a proxy offers the pages, without a slash at its end."""
    host: str = ""
    """A host that is allowed in addition to the loopback names: that of a proxy."""
    is_https: bool = False
    cookie: str = "tsck_ui"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    allow: frozenset[str] = frozenset()
    """The changes that pages may make; see `actions`. Empty: none, so only reading methods are answered."""
    folder: str = ""
    """A secret first part of all paths: a browser sends the cookies of a path to every port of the host, but to no other path."""

    @classmethod
    def of(cls, base_url: str, port: int, allow: frozenset[str] = frozenset()) -> "Access":
        """`base_url`: a path, or the URL under which a proxy offers the pages; `port` keeps the cookies of two servers apart.

        Raises:
            InvalidOptionError: neither a path nor an http URL.
        """
        parts = urlsplit(base_url)
        base, host = parts.path.rstrip("/"), parts.netloc.lower().removesuffix(_DEFAULT_PORT.get(parts.scheme, ""))
        if (
            parts.scheme not in ("", "http", "https")
            or bool(parts.scheme) != bool(parts.netloc)
            or (host and not _HOST.fullmatch(host))
            or parts.query
            or not _PATH.fullmatch(base)
        ):
            raise InvalidOptionError(
                f"base-url must be a path like /user/me/proxy/8080, or an http URL, not {base_url!r}", object_id="base-url"
            )
        folder = secrets.token_hex(8)
        return cls(base, host, parts.scheme == "https", f"tsck_ui_{port}", allow=allow, folder=folder)

    @property
    def prefix(self) -> str:
        """The path in front of all pages, without a slash at its end."""
        return f"{self.base}/{self.folder}" if self.folder else self.base

    def page_path(self, path: str) -> str:
        """A request's path without the prefix of all pages. Some proxies remove the prefix, others do not."""
        for front in (self.prefix, self.prefix.removeprefix(self.base)):
            if front and (path == front or path.startswith(f"{front}/")):
                return path[len(front) :] or "/"
        return path

    def url(self, port: int) -> str:
        """The URL that a browser opens first, if this server listens on `port` of this machine."""
        origin = f"{'https' if self.is_https else 'http'}://{self.host}" if self.host else f"http://{LOOPBACK}:{port}"
        return f"{origin}{self.entrance}"

    @property
    def entrance(self) -> str:
        """The path that a browser opens first."""
        return f"{self.prefix}/open/{self.token}"

    def allows_host(self, host: str) -> bool:
        """Whether the Host header is one of ours: a page of another site that resolves its name to this host is refused."""
        match = _HOST.fullmatch(host)
        return match is not None and (match[1].lower() in _LOOPBACK_NAMES or (self.host != "" and host.lower() == self.host))

    def is_token(self, text: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    @property
    def csrf(self) -> str:
        """The token in each form. It is derived from the cookie's value, which pages of other sites do not know."""
        return hmac.digest(self.token.encode(), b"a form of tsck ui", "sha256").hex()

    def is_csrf(self, text: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(text.encode(), self.csrf.encode())

    def is_own_form(self, request: Request) -> bool:
        """Whether a page of this server sent the form, by its headers. Other servers of the same host count as the same site."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site not in (None, "same-origin") or (site is None and origin is None):
            return False
        if origin is None:
            return True
        scheme, _, host = origin.lower().partition("://")
        known = {(scheme, request.headers["host"].lower()) for scheme in ("http", "https")} if not self.is_https else set()
        return (scheme, host) in known | ({("https" if self.is_https else "http", self.host)} if self.host else set())


class Guard:
    """The ASGI middleware that applies an `Access`."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        scope = {**scope, "path": self._access.page_path(scope["path"])}
        answer = self._answer(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request that does not reach a page; None for others."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._access.allows_host(hosts[0]):
            return PlainTextResponse("This server answers under its own address only: open the URL that `tsck ui` printed.\n", 421)
        is_form = request.method == "POST" and bool(self._access.allow)
        if request.method not in ("GET", "HEAD") and not is_form:
            return PlainTextResponse("These pages change nothing.\n", 405, {"allow": "GET, HEAD"})
        if is_form and not self._access.is_own_form(request):
            return PlainTextResponse("This form was not sent by a page of this server.\n", 403)
        path = request.scope["path"]
        if path.startswith("/open/") and self._access.is_token(path.removeprefix("/open/")):
            response = RedirectResponse(f"{self._access.prefix}/", 303)
            response.set_cookie(
                self._access.cookie,
                self._access.token,
                path=f"{self._access.prefix}/",
                httponly=True,
                samesite="strict",
                secure=self._access.is_https,
            )
            return response
        if not self._access.is_token(request.cookies.get(self._access.cookie, "")):
            return PlainTextResponse("No valid token: open the URL that `tsck ui` printed.\n", 403)
        return None
