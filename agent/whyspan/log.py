"""Logging of the long-running processes: standard error, one format, one line per state change."""

from __future__ import annotations

import logging
import os
import sys

from whyspan.text import clean

#: Set to ``debug`` by ``whyspan run --verbose`` for the processes it starts.
LOG_ENV = "WHYSPAN_LOG"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE_LIMIT = 2000


class _CleanFormatter(logging.Formatter):
    # A message can quote a process name or a route: it stays one line and obeys no escape code.
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = clean(record.message, _LINE_LIMIT)
        return super().formatMessage(record)


def setup(verbose: bool = False) -> None:
    """Send the log of this process to standard error; debug level when *verbose* or asked by `LOG_ENV`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_CleanFormatter(_FORMAT))
    debug = verbose or os.environ.get(LOG_ENV, "") == "debug"
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
