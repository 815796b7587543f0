"""Another job on the GPU: ``python -m tests.stubs.hog [--blocks N] [--idle] [--pin MIB]`` with ``Device.env``.

Prints ``ready`` and works until its standard input ends.
"""

from __future__ import annotations

import argparse
import select
import sys

from tests.demo.procs import set_name
from tests.stubs.cuda import Runtime
from tests.stubs.model import LONG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--blocks", type=int, default=2000, help="of each kernel; a microsecond each by the rules"
    )
    parser.add_argument("--idle", action="store_true", help="only hold memory")
    parser.add_argument(
        "--pin", type=int, default=0, help="pin and free so many MiB of host memory, again and again"
    )
    args = parser.parse_args()
    set_name("gpu-hog")
    rt = Runtime()
    rt("cudaSetDeviceFlags", 4)  # its waiting costs nobody a CPU
    kernel = rt.register([LONG])[0]
    stream = rt.stream()
    rt.malloc(1 << 30)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.05 if args.idle else 0)[0]:
        if args.pin:
            rt("cudaFreeHost", rt.host_alloc(args.pin << 20))
        elif not args.idle:
            for _ in range(8):
                rt.launch(kernel, stream, args.blocks)
            rt.synchronize(stream)


if __name__ == "__main__":
    main()
