"""``python -m tests.faults.host``: inject the host's faults into servers, and judge the agent's verdicts."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from rich.console import Console

from tests import tracefs
from tests.demo.procs import ROOT, DemoError
from tests.faults.host import registry, report, world
from tests.faults.host.case import Case, Outcome
from tests.faults.host.decoys import DECOYS
from tests.faults.host.draw import AUTO, NONE, Chosen, cases_of
from tests.faults.host.fault import HTTP, THREADED, VLLM, Launch
from tests.faults.host.kinds import PARENTS
from tests.faults.host.runner import Bench
from tests.faults.host.world import REST_CPU

FOLDER = ROOT / "build" / "bench"


def run_group(
    server: str, launch: Launch, cases: list[Case], args: argparse.Namespace, console: Console
) -> Iterator[Outcome]:
    """Run the cases of one kind of server; one that dies is started again for those left."""
    folder = FOLDER / f"faults-{server}"
    folder.mkdir(parents=True, exist_ok=True)
    while cases:
        console.print(f"{server}: {launch}", highlight=False)
        running = world.start(server, launch, folder, console)
        try:
            record = Path(args.record) if args.record else None
            bench = Bench(
                folder, running, args.seed, console, parents=PARENTS, causes=args.causes, record=record
            )
            outcome = asyncio.run(bench.run(cases))
        finally:
            running.close()
        yield outcome
        if len(outcome.rest) == len(cases):
            raise DemoError("the server died before the first case")
        cases = outcome.rest


def main() -> int:
    """Run and print; 0 when every target is met."""
    args = _arguments()
    console = Console(width=170, soft_wrap=True)
    faults, broken = registry.load_all()
    for name, why in broken.items():
        console.print(f"{name} is left out: {why}", highlight=False, markup=False)
    if args.list:
        for f in faults.values():
            console.print(f"{f.id}: {', '.join(f.causes)} on {', '.join(f.servers)}", highlight=False)
        return 0
    if unknown := set(args.fault) - set(faults):
        console.print(f"no such fault: {', '.join(sorted(unknown))}")
        return 2
    args.causes = sorted({f.causes[0] for f in faults.values()})
    chosen = Chosen(args.server, args.decoy, args.quick, args.seed)
    cases = cases_of([f for f in faults.values() if not args.fault or f.id in args.fault], chosen)
    console.print(f"seed {args.seed}, {len(cases)} cases", highlight=False)
    os.sched_setaffinity(0, {REST_CPU})
    with suppress(OSError):
        # The client's clock is the truth: it must not starve beside threads that spin.
        Path("/proc/self/autogroup").write_text("-10")
    result = report.Result(args.seed)
    with tracefs.mounted():
        key = lambda c: (c.server, str(c.fault.launch))  # noqa: E731
        for (server, _), members in groupby(sorted(cases, key=key), key=key):
            group = list(members)
            if why := world.unavailable(server, group[0].fault.launch):
                result.skip(group, why)
                continue
            try:
                for outcome in run_group(server, group[0].fault.launch, group, args, console):
                    result.add(outcome)
                    _write(result, args)
            except (DemoError, OSError, subprocess.SubprocessError) as exc:
                console.print(f"{server}: {exc}", style="red", highlight=False, markup=False)
                result.fail(group, str(exc))
    report.show(result, console)
    _write(result, args)
    return report.status(result, console)


def _write(result: report.Result, args: argparse.Namespace) -> None:
    """Write what there is so far: a run takes long, and its end may not be reached."""
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.as_json(result), encoding="utf-8")
    if args.table:
        Path(args.table).write_text(report.as_markdown(result), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.host", description=__doc__)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="ID", help="only this one (repeatable)"
    )
    parser.add_argument("--server", action="append", default=[], choices=[HTTP, THREADED, VLLM])
    parser.add_argument("--decoy", default=AUTO, help="auto (the seed draws), none, or a name")
    parser.add_argument("--quick", action="store_true", help="each fault once, with a decoy")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--json", default=str(FOLDER / "faults.json"), metavar="PATH")
    parser.add_argument("--table", default="", metavar="PATH", help="write a markdown table there")
    parser.add_argument("--record", default="", metavar="DIR", help="write a recording of each case there")
    args = parser.parse_args()
    if args.decoy not in {AUTO, NONE, *DECOYS}:
        parser.error(f"no such decoy: {args.decoy}; there are {', '.join(DECOYS)}")
    if os.geteuid() != 0 and not args.list:
        parser.error("probes need root")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    return args


if __name__ == "__main__":
    sys.exit(main())
