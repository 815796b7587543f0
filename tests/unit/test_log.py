"""The log: with times on a terminal or in a file, with levels for the journal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
from whyspan import log
log.setup()
one = logging.getLogger("whyspan.x")
one.info("fine"); one.warning("two\\nlines \\x1b[31m"); one.debug("never")
try: 1 / 0
except ZeroDivisionError: one.exception("bad")
"""


def said(tmp_path: Path, *, journal: bool) -> list[str]:
    path = tmp_path / "err"
    with path.open("w") as err:
        there = os.fstat(err.fileno())
        env = os.environ | {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino + (not journal)}"}
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=err, check=True, env=env)
    return path.read_text().splitlines()


def test_the_journal_gets_levels_and_no_times(tmp_path: Path) -> None:
    lines = said(tmp_path, journal=True)
    assert lines[:3] == ["<6>whyspan.x: fine", "<4>whyspan.x: two\\x0alines \\x1b[31m", "<3>whyspan.x: bad"]
    assert len(lines) > 4
    assert all(line.startswith("<3>") for line in lines[2:])  # the traceback, too
    assert lines[-1] == "<3>ZeroDivisionError: division by zero"


def test_elsewhere_lines_have_times(tmp_path: Path) -> None:
    # Standard error may have been redirected in a service: the variable alone proves nothing.
    lines = said(tmp_path, journal=False)
    assert lines[0].endswith(" INFO whyspan.x: fine")
    assert lines[0][:4].isdecimal()
