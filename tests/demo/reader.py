"""The other end of the server's log pipe. SIGUSR1: stop reading for a part of every period; SIGUSR2: read on."""

from __future__ import annotations

import argparse
import os
import select
import signal
import time

from tests.demo.procs import set_name

NAME = "demo-logship"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipe-fd", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--period-s", type=float, default=3.0)
    parser.add_argument("--pause-s", type=float, default=1.5)
    args = parser.parse_args()
    set_name(NAME)
    state = {"stutter_from": 0.0}
    # A handler that sets a value: the pause below is cut short by its own wake-up pipe, not by an exception.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)

    def switch(number: int, _frame: object) -> None:
        state["stutter_from"] = time.monotonic() if number == signal.SIGUSR1 else 0.0
        os.write(wake_write, b"x")

    signal.signal(signal.SIGUSR1, switch)
    signal.signal(signal.SIGUSR2, switch)
    out = os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    while True:
        start = state["stutter_from"]
        if start and (phase := (time.monotonic() - start) % args.period_s) < args.pause_s:
            ready, _, _ = select.select([wake_read], [], [], args.pause_s - phase)
        else:
            ready, _, _ = select.select([args.pipe_fd, wake_read], [], [], 0.1 if start else None)
        if wake_read in ready:
            os.read(wake_read, 64)
        if args.pipe_fd in ready:
            data = os.read(args.pipe_fd, 65536)
            if not data:
                return
            os.write(out, data)


if __name__ == "__main__":
    main()
