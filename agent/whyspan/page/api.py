"""The questions as routes: parameters read, the answer worked out in a thread, errors as one line.

Each question opens the store, asks, and closes it: nothing of one visitor's is kept for another's, and a store that is
made anew is seen. A few are worked out at a time, each with a deadline; who comes beyond that waits a little, then is
told to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from whyspan_exporters.reader import Reader

from whyspan import clock
from whyspan.errors import ConfigError, StoreError
from whyspan.page import questions
from whyspan.page.answer import JSON, encode, problem
from whyspan.page.params import Query, parse
from whyspan.page.settings import Settings

#: Questions worked out at the same time: Python runs one anyway, SQLite waits for the disk meanwhile.
AT_ONCE: Final = 2
#: s that a question waits for its turn.
PATIENCE_S: Final = 10.0
#: s of work on one question.
DEADLINE_S: Final = 20.0
_LONGEST_QUERY: Final = 8192


def routes(settings: Settings) -> list[Route]:
    """Return a route per question."""
    limiter = anyio.CapacityLimiter(AT_ONCE)
    return [Route(q.path, _endpoint(q, settings, limiter), methods=["GET"]) for q in questions.ALL]


def _endpoint(
    question: questions.Question, settings: Settings, limiter: anyio.CapacityLimiter
) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        if len(request.url.query) > _LONGEST_QUERY:
            return problem(400, "the query is too long")
        try:
            query = parse(question.query, request.url.query)
        except ConfigError as exc:
            return problem(400, str(exc))
        name = request.path_params.get(question.names, "")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await limiter.acquire()
        except TimeoutError:
            return problem(503, "too many questions at once", {"retry-after": "2"})
        try:
            body = await anyio.to_thread.run_sync(_work, question, settings, query, name)
        except ConfigError as exc:
            return problem(400, str(exc))
        except questions.NotFound as exc:
            return problem(404, str(exc))
        except StoreError as exc:
            return problem(503, str(exc))
        finally:
            limiter.release()
        return Response(body, media_type=JSON)

    return endpoint


def _work(question: questions.Question, settings: Settings, query: Query, name: str) -> bytes:
    with contextlib.closing(Reader(settings.store, DEADLINE_S)) as reader:
        asked = questions.Asked(reader, settings, query, name, clock.now_unix_ns())
        return encode(question.ask(asked))
