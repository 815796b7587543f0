"""What a request must be before the application sees it, and the headers that every answer carries.

A page on the loopback interface is reached by every web site that a local browser shows. Against that: only known names
in the Host header (a name that a stranger points at 127.0.0.1 is refused), no CORS, nothing from another site's pages,
and only reading. The content security policy lets nothing run that is not a file of this package.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whyspan.page.answer import problem

#: No script or style but this package's own files, nothing from elsewhere, in no frame.
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer a form would have no origin
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::\d{1,5})?", re.ASCII)
_READING: Final = frozenset({"GET", "HEAD"})


class SecurityHeaders:
    """Adds the headers to every answer, refusals and errors included."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap *app*."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers)


class Gate:
    """Refuses what does not come from the page itself or a program that means this server."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], posts: frozenset[str]) -> None:
        """Wrap *app*; *hosts* are the names by which it may be called, *posts* the paths that take a POST."""
        self._app, self._hosts, self._posts = app, hosts, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        refusal = self._refusal(scope)
        await (self._app if refusal is None else problem(*refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        named = headers.getlist("host")
        match = _HOST.fullmatch(named[0].lower()) if len(named) == 1 else None
        if match is None:
            return 400, "one Host header is needed, with a name and at most a port"
        host = match[1] or match[2].rstrip(".")
        if host not in self._hosts:
            return 421, "this name is not known here: add it to hosts in [page] of the configuration"
        path, method = scope["path"], scope["method"]
        if method not in _READING and not (method == "POST" and path in self._posts):
            return 405, "only GET and HEAD are answered"
        # Sent by browsers alone. A link from another site may open the page, nothing else may come from there.
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        opened = method == "GET" and path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if site is not None:
            foreign = site not in ("none", "same-origin") and not opened
        else:
            foreign = origin is not None and _host_of(origin) != named[0].lower()
        return (403, "asked by another site's page") if foreign else None


class Prefix:
    """Takes *prefix* off the path; what does not begin with it is not here."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """Wrap *app*."""
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        prefix, path = self._prefix, scope["path"]
        if path.startswith(prefix + "/"):
            await self._app({**scope, "path": path[len(prefix) :], "root_path": ""}, receive, send)
        elif path == prefix:
            # Relative, so that it holds whatever a proxy has put before it.
            leaf = prefix.rsplit("/", 1)[1]
            await problem(307, "the page is below this", {"location": f"{leaf}/"})(scope, receive, send)
        else:
            await problem(404, f"everything here is below {prefix}/")(scope, receive, send)


def _host_of(origin: str) -> str:
    return origin.lower().partition("://")[2]
