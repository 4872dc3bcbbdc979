"""Who may ask: before anything else is looked at, requests of other pages, names and people are refused.

A page of somebody else in the same browser can send requests to this machine. What tells them from our own
page's is the name they were sent to (Host), the page they come from (Origin, Sec-Fetch-Site) and the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs

from preimage.errors import PreimageError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = ("GET", "POST", "DELETE")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class RequestError(PreimageError):
    """A request that is refused, with the status it is refused by."""

    code = "bad_request"

    def __init__(self, message: str, hint: str = "", *, status: int = 400) -> None:
        super().__init__(message, hint)
        self.status = status


class Door(NamedTuple):
    """Where a server listens and what it asks for."""

    host: str
    port: int
    token: str | None

    def allows(self, host: str) -> bool:
        """Whether a Host header names this server: by its own name or address, and by its port."""
        name, colon, port = host.lower().rpartition(":")
        if not colon or not port.isdecimal() or (name.startswith("[") and not name.endswith("]")):
            name, port = host.lower(), "80"
        if port != str(self.port):
            return False
        own = f"[{self.host}]" if ":" in self.host else self.host.lower()
        if name in (*_LOOPBACK, own):
            return True
        if self.host not in ("0.0.0.0", "::"):
            return False
        try:  # every address of this machine; a name that somebody points here is none
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token; servers on other ports have their own."""
        return f"preimage-{self.port}"


class Guard:
    """In front of an application: refuses what its own page did not ask, and sets every answer's headers."""

    def __init__(self, app: App, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name.decode("latin-1").lower() for name, _ in message.get("headers", ())}
                more = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k not in there]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        try:
            self._check_source(scope["method"], headers)
            if self._brings_token(scope):
                await _answer(guarded, 303, None, ("location", "/"), ("set-cookie", self._set_cookie()))
                return
            self._check_token(headers)
        except RequestError as error:
            allow = [("allow", ", ".join(METHODS))] if error.status == 405 else []
            await _answer(guarded, error.status, error, *allow)
            return
        await self._app(scope, receive, guarded)

    def _check_source(self, method: str, headers: dict[str, list[str]]) -> None:
        """Refuse methods that are not listed, other names than ours, and other pages than ours."""
        if method not in METHODS:
            raise RequestError("This method is not allowed.", f"Use {', '.join(METHODS)}.", status=405)
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not self._door.allows(hosts[0]):
            raise RequestError(
                "The request names another host than this server.",
                "Open the address that `preimage serve` prints.",
                status=421 if hosts else 400,
            )
        navigates = method == "GET" and headers.get("sec-fetch-mode") == ["navigate"]
        sites = headers.get("sec-fetch-site", [])
        allowed = ("same-origin", "none", "same-site") if navigates else ("same-origin", "none")
        if len(sites) > 1 or any(site not in allowed for site in sites):
            raise RequestError("The request comes from another site.", "Type the address.", status=403)
        own = (f"http://{hosts[0].lower()}",)
        if not navigates and any(origin.lower() not in own for origin in headers.get("origin", [])):
            raise RequestError("The request comes from another page.", "Use this server's own.", status=403)

    def _brings_token(self, scope: Scope) -> bool:
        """Whether the address of the page carries the right token: a browser then keeps it as a cookie."""
        if self._door.token is None or scope["method"] != "GET" or scope["path"] != "/":
            return False
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return len(given) == 1 and self._is_token(given[0])

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._door.token or "").encode())

    def _set_cookie(self) -> str:
        return f"{self._door.cookie}={self._door.token}; HttpOnly; SameSite=Strict; Path=/"

    def _check_token(self, headers: dict[str, list[str]]) -> None:
        if self._door.token is None:
            return
        given = [value[7:] for value in headers.get("authorization", []) if value[:7].lower() == "bearer "]
        for line in headers.get("cookie", []):
            try:
                morsel = SimpleCookie(line).get(self._door.cookie)
            except CookieError:
                continue
            given += [] if morsel is None else [morsel.value]
        if not any(self._is_token(one) for one in given):
            raise RequestError(
                "This server needs its token.", "Open /?token=… with the one it was started with.", status=401
            )


async def _answer(send: Send, status: int, error: PreimageError | None, *headers: tuple[str, str]) -> None:
    """A short answer of the guard's own."""
    body = b"" if error is None else json.dumps({"error": error.to_dict()}).encode()
    every = (("content-type", "application/json"), ("content-length", str(len(body))), *headers)
    raw = [(name.encode(), value.encode()) for name, value in every]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
