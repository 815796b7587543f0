"""Who may look, where the page has a token: as ``Authorization: Bearer``, or once by the form, then by a cookie.

The cookie is not the token: it says until when it holds, signed with the token. The package's own files (``/assets/``)
have nothing in them that is anybody's, and the form needs them.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from whyspan.page.answer import problem
from whyspan.page.assets import FOLDER

COOKIE: Final = "whyspan"
LOGIN: Final = "/login"
_DAYS: Final = 7
_LONGEST_BODY: Final = 4096


class TokenAuth:
    """Lets in who knows the token."""

    def __init__(self, app: ASGIApp, token: str, *, tls: bool, now: Callable[[], float] = time.time) -> None:
        """Wrap *app*; *now* is the wall clock, in s."""
        self._app, self._token, self._tls, self._now = app, token.encode(), tls, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        path = scope["path"]
        response: ASGIApp
        if path == LOGIN and scope["method"] == "POST":
            response = await self._login(Request(scope, receive))
        elif path.startswith("/assets/") or self._known(HTTPConnection(scope)):
            response = self._app
        elif path == "/":
            response = FileResponse(FOLDER / "login.html", 401, {"cache-control": "no-store"})
        else:
            response = problem(401, "a token is needed", {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _known(self, connection: HTTPConnection) -> bool:
        kind, _, given = connection.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._same(given.strip())
        until, _, signature = connection.cookies.get(COOKIE, "").partition(".")
        good = hmac.compare_digest(self._sign(until).encode(), signature.encode(errors="replace"))
        return good and until.isascii() and until.isdigit() and int(until) > self._now()

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_BODY:
                return problem(413, "too long for a token")
        try:
            given = parse_qs(body.decode(errors="replace"), max_num_fields=4).get("token", [""])[0].strip()
        except ValueError as exc:
            return problem(400, str(exc))
        if not self._same(given):
            # Relative, as every address here: the page need not know what a proxy has put before it.
            return RedirectResponse("./#wrong", 303)
        until = str(int(self._now()) + _DAYS * 86400)
        response = RedirectResponse("./", 303)
        response.set_cookie(
            COOKIE,
            f"{until}.{self._sign(until)}",
            max_age=_DAYS * 86400,
            path=None,  # the folder of this address, by default
            secure=self._tls,
            httponly=True,
            samesite="lax",  # strict: who follows a link to the page would have to log in again
        )
        return response

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _sign(self, until: str) -> str:
        return hmac.new(self._token, b"whyspan page " + until.encode(errors="replace"), "sha256").hexdigest()
