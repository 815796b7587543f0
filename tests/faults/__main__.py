"""``python -m tests.faults``: inject every engine fault into a stub engine or a real vLLM, and judge the verdicts."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from tests.faults.engines import lab, vllm_roomy, vllm_small
from tests.faults.runner import table

NEEDED = 0.95
ENGINES = {"lab": lab, "vllm": vllm_roomy, "vllm-small": vllm_small}


def main() -> int:
    """Run and print; 0 when at least 95% of the slowed requests of every case are named rightly."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("only", nargs="*", help="cases; default: all")
    parser.add_argument("--engine", choices=list(ENGINES), default="lab")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("probes need root")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    console = Console(width=150, soft_wrap=True)
    with suppress(OSError):
        # The client's clock is the truth: it must not starve beside threads that spin.
        Path("/proc/self/autogroup").write_text("-10")
    scores = ENGINES[args.engine](args.only, console)
    console.print(table(scores))
    return 0 if all(s.ratio >= NEEDED and s.open_seen for s in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
