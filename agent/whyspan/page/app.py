"""The application: routes, and around them what a request must pass."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from whyspan.page import api, openapi
from whyspan.page.answer import answer, problem
from whyspan.page.assets import FOLDER, Assets
from whyspan.page.auth import LOGIN, TokenAuth
from whyspan.page.live import Live
from whyspan.page.security import Gate, Prefix, SecurityHeaders
from whyspan.page.settings import Settings


def build(settings: Settings, ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Return the application; *ending* says that the server is about to stop, and its streams shall end."""
    document = openapi.describe(token=bool(settings.token))

    async def index(_request: Request) -> Response:
        return FileResponse(FOLDER / "index.html")

    async def description(_request: Request) -> Response:
        return answer(document)

    inner = Starlette(
        routes=[
            Route("/", index),
            Route("/openapi.json", description),
            Route("/api/live", Live(settings.store, ending).__call__),
            *api.routes(settings),
            Mount("/assets", Assets()),
        ],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    # It would name this server as it is called in the Host header, without what a proxy has put before the path.
    inner.router.redirect_slashes = False
    app: ASGIApp = inner
    if settings.token:
        app = TokenAuth(app, settings.token, tls=settings.tls)
    app = Gate(app, settings.hosts, frozenset({LOGIN}) if settings.token else frozenset())
    if settings.prefix:
        app = Prefix(app, settings.prefix)
    return SecurityHeaders(app)


async def _refused(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    text = "there is nothing here" if exc.status_code == 404 else exc.detail
    return problem(exc.status_code, text, exc.headers)


async def _failed(_request: Request, exc: Exception) -> Response:
    # The server logs it with its trace; a visitor learns nothing of the inside.
    return problem(500, "whyspan failed on this; its log says how")
