"""A neighbour that does nothing but burn the CPU it is pinned to, all the time or a part of it."""

from __future__ import annotations

import argparse
import time

from tests.demo.procs import set_name

NAME = "whyspan-hog"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy-ms", type=float, default=100.0)
    parser.add_argument("--rest-ms", type=float, default=0.0, help="sleep that long after each busy time")
    args = parser.parse_args()
    set_name(NAME)
    number = 0
    while True:
        end = time.monotonic() + args.busy_ms / 1000
        while time.monotonic() < end:
            for _ in range(1000):
                number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        if args.rest_ms:
            time.sleep(args.rest_ms / 1000)


if __name__ == "__main__":
    main()
