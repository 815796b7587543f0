"""Feeds that are asked at a low rate: ``/metrics`` and the health endpoint."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from whyspan.feeds import http, scrape
from whyspan.feeds.http import HttpError
from whyspan.feeds.kv_feed import Emit
from whyspan.feeds.messages import HEALTH, Feed, FeedState
from whyspan.marks import Gauges, Health

#: What does not exist now may exist after a restart behind the same port.
_ABSENT_EVERY_S: Final = 60.0
_HEALTH_BODY: Final = 64 << 10
_NOT_FOUND: Final = frozenset({401, 403, 404, 405, 501})  # llama.cpp answers 501 without --metrics


class PolledFeed:
    """One address of one server, asked until it is closed."""

    def __init__(
        self, feed: Feed, state: FeedState, emit: Emit, *, interval_s: float, timeout_s: float
    ) -> None:
        self._feed, self.state, self._emit = feed, state, emit
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a wrong address is a state, not an error."""
        try:
            url = http.parse_url(self._feed.endpoint)
        except HttpError as e:
            self.state.state = "stopped"
            self.state.failed(str(e))
            return
        self._task = asyncio.get_running_loop().create_task(self._run(url))

    def close(self) -> None:
        """End it."""
        if self._task:
            self._task.cancel()

    async def _run(self, url: http.Url) -> None:
        once = self._health if self._feed.kind == HEALTH else self._metrics
        while True:
            began = time.monotonic()
            await once(url)
            interval_s = _ABSENT_EVERY_S if self.state.state == "absent" else self._interval_s
            # At least half the interval of peace, however slow the answer was.
            await asyncio.sleep(max(began + interval_s - time.monotonic(), interval_s / 2))

    async def _health(self, url: http.Url) -> None:
        began = time.monotonic_ns()
        try:
            answer = await http.get(url, timeout_s=self._timeout_s, max_bytes=_HEALTH_BODY)
        except HttpError as e:
            self._fail("down", e)
            self._emit(self._feed, time.monotonic_ns(), Health(status=0, took_ns=time.monotonic_ns() - began))
            return
        if answer.status == 404:
            self.state.state = "absent"
            return
        self.state.state = "up"
        self._emit(self._feed, time.monotonic_ns(), Health(status=answer.status, took_ns=answer.took_ns))

    async def _metrics(self, url: http.Url) -> None:
        try:
            answer = await http.get(url, timeout_s=self._timeout_s, max_bytes=scrape.MAX_BODY)
        except HttpError as e:
            self._fail("down", e)
            return
        now_ns = time.monotonic_ns()
        if answer.status in _NOT_FOUND:
            self.state.state = "absent"
            self.state.last_error = f"status {answer.status}: metrics are not on"
            return
        try:
            if answer.status != 200:
                raise scrape.ScrapeError(f"status {answer.status}")
            body: Gauges = scrape.parse(answer.body)
        except scrape.ScrapeError as e:
            self.state.state = "absent" if answer.status == 200 else "up"
            self.state.failed(str(e))
            return
        self.state.state = "up"
        self.state.events += 1
        self._emit(self._feed, now_ns, body)

    def _fail(self, state: str, error: HttpError) -> None:
        self.state.state = "slow" if error.kind == "timeout" else state
        self.state.failed(str(error))
