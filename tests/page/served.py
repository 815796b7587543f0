"""Real ``whyspan serve`` processes for tests."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMMAND = (sys.executable, "-c", "from whyspan.cli import main; main()", "serve")
_START_S = 60


class Served(NamedTuple):
    """A page being served. ``url`` ends in a slash; of a Unix socket it is ``unix:PATH``."""

    url: str
    process: subprocess.Popen[str]
    log: Path


@contextlib.contextmanager
def serve(store: Path, *options: str) -> Iterator[Served]:
    """Serve *store* on a free port of 127.0.0.1, unless *options* say otherwise, until the context ends."""
    listen = () if {"--socket", "--listen"} & {*options} else ("--listen", "127.0.0.1:0")
    env = os.environ | {"WHYSPAN_CONFIG": "", "WHYSPAN_OVERRIDES": ""}
    with tempfile.TemporaryDirectory(prefix="whyspan-page-") as made:
        log = Path(made) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*COMMAND, "--store", str(store), *listen, *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
                env=env,
            )
        try:
            yield Served(_url(process, log), process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if ready else ""
    assert line.startswith("whyspan: page at "), (line, log.read_text())
    return line.split()[3]
