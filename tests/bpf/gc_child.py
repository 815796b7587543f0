"""A process with a large heap that collects when it is told; runs in any CPython from 3.10 on, by its path.

Each line on standard input is a generation; it is collected, and the answer is the time that took, ns.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

HEAP = 200_000  # containers: some 10 ms of a full collection


def main() -> None:
    heap = [[number] for number in range(HEAP)]
    gc.collect()
    gc.disable()
    print(threading.get_native_id(), flush=True)
    for line in sys.stdin:
        begin = time.monotonic_ns()
        gc.collect(int(line))
        print(time.monotonic_ns() - begin, flush=True)
    assert len(heap) == HEAP


if __name__ == "__main__":
    main()
