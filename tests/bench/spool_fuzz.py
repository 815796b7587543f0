"""Damages a spool's files at random and reads them: ``python -m tests.bench.spool_fuzz [--inputs N] [--seed S]``.

Each input is a good spool with one to eight changes: bytes overwritten, files cut short, integers at their limits. What
must hold is in `tests.unit.spoollab`: no batch that was never put in, none twice, none out of order, totals that add
up, and a file that works afterwards. Prints how many inputs there were, their rate, and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.spoollab import Mutation, damaged_spool, good_spool, mutate

# In memory: a million files would be a million writes of a disk.
_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
_LIMITS = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\x00" * 4,
    b"\xff" * 4,
    b"\x7f\xff\xff\xff",
    b"\x7f" + b"\xff" * 7,
)
_PAGE = 4096
_SAY_EACH = 50_000


def draw(rng: random.Random, size: int) -> Mutation:
    """Return one change; half of them hit where SQLite keeps its structure: the heads of pages and cells."""
    at = rng.randrange(size)
    if rng.random() < 0.5:
        at = at // _PAGE * _PAGE + rng.randrange(120)
    kind = rng.random()
    if kind < 0.05:
        return Mutation(at * 4 + rng.randrange(4), b"", True)
    if kind < 0.5:
        return Mutation(at * 4 + rng.randrange(4), rng.choice(_LIMITS), False)
    if kind < 0.6:
        return Mutation(at * 4 + rng.randrange(4), rng.randbytes(rng.randrange(1, 300)), False)
    return Mutation(at * 4 + rng.randrange(4), rng.randbytes(rng.randrange(1, 5)), False)


def main() -> None:
    """Run; exit status 1 at the first input that breaks a rule, with what repeats it."""
    parser = argparse.ArgumentParser(prog="tests.bench.spool_fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    logging.disable()  # each damage is a line
    good = good_spool()
    kept = untouched = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_FOLDER) as name:
        folder = Path(name)
        for n in range(args.inputs):
            rng = random.Random(args.seed * 1_000_003 + n)
            mutations = [draw(rng, len(good.database)) for _ in range(rng.choice((1, 1, 1, 2, 3, 8)))]
            try:
                found = len(damaged_spool(folder, mutate(good, mutations), again=n % 8 == 0))
            except BaseException as exc:
                print(f"input {n} of seed {args.seed} broke it: {mutations!r}", file=sys.stderr)
                if isinstance(exc, KeyboardInterrupt):
                    raise SystemExit(1) from None
                raise
            kept += found
            untouched += found >= len(good.batches)
            for file in os.scandir(folder):
                os.unlink(file.path)
            if (n + 1) % _SAY_EACH == 0:
                print(f"{n + 1:,} done, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    took_s = time.monotonic() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{args.inputs:,} damaged spools (seed {args.seed}) in {took_s:.0f} s, {args.inputs / took_s:,.0f} a second; "
        f"{kept / args.inputs:.1f} of {len(good.batches)} batches kept on average; peak {peak_mib:.0f} MiB resident"
    )


if __name__ == "__main__":
    main()
