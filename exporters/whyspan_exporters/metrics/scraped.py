"""The sink behind ``[prometheus]``: keeps the figures, and the endpoint that shows them."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from whyspan import clock

from whyspan_exporters.metrics import openmetrics, snapshot
from whyspan_exporters.metrics.endpoint import Endpoint, bind
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.records import Explained, Record
from whyspan_exporters.resends import Resends

log = logging.getLogger("whyspan.prometheus")

_RETRY_S: Final = 10.0


class PrometheusSink:
    """An address that cannot be had is a state, tried again: it keeps no finding from being stored."""

    def __init__(self, host: str, port: int) -> None:
        """Bind while there are privileges; the thread starts at the first `emit`, when they are dropped."""
        self._host, self._port = host, port
        self._figures = Figures()
        self._resends = Resends()
        self._resource = Resources().whyspan().attributes
        self._endpoint: Endpoint | None = None
        self._listener: socket.socket | None = None
        self._problem = ""
        self._next_try_s = 0.0
        with contextlib.suppress(ValueError):
            if not ipaddress.ip_address(host).is_loopback:
                log.warning(
                    "prometheus: %s can be reached from other hosts; there is no TLS and no password", host
                )
        self._bind()

    @property
    def port(self) -> int:
        """The port, once it is bound; of use where 0 was asked for."""
        return self._port

    def emit(self, records: Sequence[Record]) -> None:
        """Take *records* into the figures."""
        if self._endpoint is None:
            self._start()
        for record in records:
            if not (isinstance(record, Explained) and self._resends.knows(record)):
                self._figures.add(record)

    def flush(self) -> str:
        """Return "": nothing here is to be kept."""
        return ""

    def status(self) -> dict[str, Any]:
        """Return what `whyspan probes` shows."""
        e = self._endpoint
        return {
            "listen": f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}",
            "problem": self._problem,
            "answered": e.answered if e else 0,
            "refused": e.refused if e else 0,
        }

    def close(self) -> None:
        """Stop listening."""
        if self._endpoint is not None:
            self._endpoint.close()
        elif self._listener is not None:
            self._listener.close()

    def _bind(self) -> None:
        self._next_try_s = time.monotonic() + _RETRY_S
        try:
            self._listener = bind(self._host, self._port)
        except OSError as exc:
            problem = f"cannot listen on {self._host}:{self._port}: {exc.strerror or exc}"
            if problem != self._problem:
                log.error("prometheus: %s", problem)
            self._problem = problem
            return
        self._port = self._listener.getsockname()[1]
        self._problem = ""

    def _start(self) -> None:
        if self._listener is None and time.monotonic() >= self._next_try_s:
            self._bind()
        if self._listener is not None:
            self._endpoint = Endpoint(self._listener, self._page)
            log.info("prometheus: metrics at http://%s/metrics", self.status()["listen"])

    def _page(self, accept: str) -> tuple[bytes, str]:
        taken = snapshot.take(self._figures, clock.now_unix_ns())
        return openmetrics.render(taken, self._resource, accept)
