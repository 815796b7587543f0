"""Three samplers of Python, run alike: this project's own probe, py-spy and austin; and what they wrote, read alike.

``python -m tests.bench.samples_tools TGID HZ SECONDS --out FILE`` is the first of them: the probe alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from whyspan.model import StackFact

from tests.engine.install import cache

#: austin 4 needs glibc 2.38, and writes a format of its own.
PACKAGES = ("py-spy==0.4.3", "austin-dist==3.7.0")
_DEEPER, _BROKEN = 2, 4

Frame = tuple[str, str, int]


class Stack(NamedTuple):
    """A stack, the innermost frame first.

    *deeper*: its tool says that more of it did not fit; *broken*: that some of it could not be read.
    """

    frames: tuple[Frame, ...]
    deeper: bool = False
    broken: bool = False


def tools() -> Path:
    """Return the folder with the others' programs, installed now if they are not there."""
    folder = cache() / ("profilers-" + "-".join(re.sub(r"\W+", "_", p) for p in PACKAGES))
    if not folder.exists():
        target = folder.with_name(folder.name + ".new")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(target),
        ]
        subprocess.run([*pip, *PACKAGES], check=True)
        target.rename(folder)
    return folder / "bin"


def command(tool: str, tgid: int, hz: int, seconds: float, out: Path) -> list[str]:
    """Return how a tool samples a process for a while and writes what it saw."""
    if tool == "py-spy":
        options = [
            "--rate",
            str(hz),
            "--duration",
            str(round(seconds)),
            "--format",
            "raw",
            "--full-filenames",
        ]
        return [str(tools() / tool), "record", *options, "--output", str(out), "--pid", str(tgid)]
    if tool == "austin":
        options = ["--sleepless", "--interval", f"{1_000_000 // hz}us", "--exposure", str(round(seconds))]
        return [str(tools() / tool), *options, "--output", str(out), "--pid", str(tgid)]
    mine = [sys.executable, "-m", "tests.bench.samples_tools", str(tgid), str(hz), str(seconds)]
    return [*mine, "--out", str(out)]


def stacks(tool: str, out: Path) -> Iterable[tuple[Stack, int]]:
    """Return the stacks that a tool wrote, with how often each was seen."""
    for line in out.read_text(errors="replace").splitlines():
        if tool == "whyspan":
            one = json.loads(line)
            frames = tuple((f, file, n) for f, file, n in one["frames"])
            yield Stack(frames, one["deeper"], one["broken"]), one["times"]
        elif tool == "py-spy":
            text, _, times = line.rpartition(" ")
            if not times.isdigit():  # a part of a line: a file's name has a line feed, and it is not escaped
                continue
            found = re.findall(r"(.*?) \((.*?):(\d+)\)(?:;|$)", text)
            yield Stack(tuple((f, file, int(n)) for f, file, n in reversed(found))), int(times)
        elif line.startswith("P"):
            text, _, _ = line.rpartition(" ")
            found = [part.rsplit(":", 2) for part in text.split(";")[2:]]
            whole = [f for f in found if len(f) == 3 and f[2].isdigit()]
            broken = ":INVALID:" in text
            yield Stack(tuple((f, file, int(n)) for file, f, n in reversed(whole)), broken=broken), 1


def record(tgid: int, hz: int, seconds: float, out: Path) -> None:
    """Sample a process with the probe alone, as its collector does; write its stacks."""
    from tests.bench.samples import Bench

    bench = Bench("samples", hz=hz)
    times = Counter[int]()
    facts: dict[int, StackFact] = {}
    end = time.monotonic() + seconds
    try:
        bench.watch(tgid)
        while time.monotonic() < end and psutil.pid_exists(tgid):
            time.sleep(0.1)
            for row in bench.drain("cpu_sample"):
                times[int(row["stack"])] += 1
            facts |= {f.id: f for f in bench.stacks.take()}
    except KeyboardInterrupt:
        for row in bench.drain("cpu_sample"):
            times[int(row["stack"])] += 1
        facts |= {f.id: f for f in bench.stacks.take()}
    finally:
        bench.session.close()
    with out.open("w") as f:
        for number, n in times.items():
            fact = facts.get(number)
            one: dict[str, Any] = {"frames": [], "deeper": False, "broken": True, "times": n}
            if fact:
                one["frames"] = [[p.function, p.file, p.line] for p in fact.python]
                one |= {"deeper": bool(fact.flags & _DEEPER), "broken": bool(fact.flags & _BROKEN)}
            f.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tgid", type=int)
    parser.add_argument("hz", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record(arguments.tgid, arguments.hz, arguments.seconds, arguments.out)
