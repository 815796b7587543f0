"""What the decoys' processes do. Each lowers itself to idle priority first and goes on until killed."""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.demo.procs import set_name

MIB = 1 << 20
_BLOCK = 256 << 10


def spin(_args: argparse.Namespace) -> None:
    """Burn CPU."""
    number = 0
    while True:
        number = (number * 1103515245 + 12345) & 0x7FFFFFFF


def churn(args: argparse.Namespace) -> None:
    """Read a file that is larger than the group may keep in the page cache; it has no blocks, so no disk works."""
    path = Path(args.folder) / "decoy-churn"
    with path.open("wb") as file:
        file.truncate(args.mib * MIB)
    with path.open("rb", buffering=0) as file:
        while True:
            file.seek(0)
            while file.read(MIB):
                time.sleep(0.002)


def leak(args: argparse.Namespace) -> None:
    """Take memory and keep it, up to a bound; then begin again."""
    while True:
        kept = []
        for _ in range(args.mib):
            kept.append(os.urandom(MIB))
            time.sleep(0.02)


def write(args: argparse.Namespace) -> None:
    """Write to a device, past the page cache."""
    block = mmap.mmap(-1, _BLOCK)  # aligned, as O_DIRECT wants it
    device = os.open(args.folder, os.O_WRONLY | os.O_DIRECT)
    while True:
        os.lseek(device, 0, os.SEEK_SET)
        for _ in range(64):
            os.write(device, block)
            time.sleep(0.01)


def burst(_args: argparse.Namespace) -> None:
    """Send 16 MiB over loopback to a process of its own, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        set_name("decoy-sink")
        taker, _address = listener.accept()
        while taker.recv(1 << 18):
            pass
        os._exit(0)
    giver = socket.create_connection(listener.getsockname())
    data = bytes(MIB)
    while True:
        for _ in range(16):
            giver.sendall(data)
        print(16 * MIB, flush=True)
        time.sleep(0.2)


def collect(_args: argparse.Namespace) -> None:
    """Make many objects and have the collector walk them; print its pauses in ms."""
    gc.disable()
    kept = [[i] for i in range(400_000)]
    while kept:
        began = time.monotonic()
        gc.collect()
        print(round((time.monotonic() - began) * 1000), flush=True)
        time.sleep(0.1)


def scrape(args: argparse.Namespace) -> None:
    """Get a cheap page of the server, five times a second."""
    while True:
        with urllib.request.urlopen(args.url, timeout=30) as answer:
            print(answer.status, flush=True)
        time.sleep(0.2)


WORK: dict[str, Callable[[argparse.Namespace], None]] = {
    f.__name__: f for f in (spin, churn, leak, write, burst, collect, scrape)
}


def main() -> None:
    """Do one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=list(WORK))
    parser.add_argument("--url", default="")
    parser.add_argument("--folder", default="")
    parser.add_argument("--mib", type=int, default=0)
    args = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    set_name(f"decoy-{args.work}")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    WORK[args.work](args)


if __name__ == "__main__":
    main()
