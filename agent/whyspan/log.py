"""Logging of the long-running processes: standard error, one line per state change.

Where standard error is the journal, which stamps lines itself, they begin with their level instead (sd-daemon(3)).
"""

from __future__ import annotations

import logging
import os
import sys

from whyspan.text import clean

#: Set to ``debug`` by ``whyspan run --verbose`` for the processes it starts.
LOG_ENV = "WHYSPAN_LOG"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JOURNAL_FORMAT = "%(name)s: %(message)s"
_LINE_LIMIT = 2000
#: syslog(3): debug, informational, warning, error, critical
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


class _CleanFormatter(logging.Formatter):
    # A message can quote a process name or a route: it stays one line and obeys no escape code.
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = clean(record.message, _LINE_LIMIT)
        return super().formatMessage(record)


class _JournalFormatter(_CleanFormatter):
    # A traceback has many lines, and the journal takes each for a message of its own.
    def format(self, record: logging.LogRecord) -> str:
        priority = next(p for level, p in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def to_journal(fd: int = 2) -> bool:
    """Whether *fd* leads to the journal: ``JOURNAL_STREAM`` has its device and inode (systemd.exec(5))."""
    try:
        there = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{there.st_dev}:{there.st_ino}"


def setup(verbose: bool = False) -> None:
    """Send the log of this process to standard error; debug level when *verbose* or asked by `LOG_ENV`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter(_JOURNAL_FORMAT) if to_journal() else _CleanFormatter(_FORMAT))
    debug = verbose or os.environ.get(LOG_ENV, "") == "debug"
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
