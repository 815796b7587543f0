"""``whyspan compare``: which causes got worse between two sets of requests, and a gate for releases."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from whyspan.cli._options import console, store_of, store_options
from whyspan.cli._progress import progress
from whyspan.errors import ConfigError

if TYPE_CHECKING:
    from whyspan_exporters.recall import Recall

    from whyspan.views.compare import Chosen
    from whyspan.views.select import Measured, Selector
    from whyspan.views.weighing import Totals

#: Requests of a side that are read, the newest of it.
_MAX_STORED: Final = 5000
#: And looked at, where a selector takes few of them.
_MAX_READ: Final = 200_000
#: A request may begin so long before the interval in which it was counted first.
_SLACK_NS: Final = 60_000_000_000
WORSE, TOO_FEW = 3, 4


def _amount(unit: str, scale: float) -> Callable[[click.Context, click.Parameter, str], float]:
    """Return what reads a number with a unit at its end."""

    def read(_ctx: click.Context, _option: click.Parameter, value: str) -> float:
        match = re.fullmatch(rf"\+?(\d{{1,9}}(?:\.\d{{1,9}})?)\s*{unit}", value.strip(), re.ASCII)
        if match is None:
            raise click.BadParameter(f"{value!r} is not an amount such as 15{unit}")
        return float(match[1]) * scale

    return read


@click.command(
    name="compare",
    epilog="Exit status: 0 no worse, or not clearly so; 3 worse than the limits; 4 too few requests.",
)
@click.option(
    "--a", "a_text", required=True, metavar="SEL", help="What is compared with, such as the old release."
)
@click.option("--b", "b_text", required=True, metavar="SEL", help="What may be worse.")
@click.option("--p99", "p99_ms", callback=_amount("ms", 1.0), default="15ms", show_default=True, metavar="MS",
              help="B's P99 latency may be higher by this.")  # fmt: skip
@click.option("--errors", callback=_amount("%", 0.01), default="0.8%", show_default=True, metavar="PERCENT",
              help="B's ratio of errors may be higher by this many percentage points.")  # fmt: skip
@click.option("--limit", type=click.IntRange(100, 20_000), default=_MAX_STORED, show_default=True,
              help="Stored requests of a side that are compared, the newest.")  # fmt: skip
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    a_text: str,
    b_text: str,
    p99_ms: float,
    errors: float,
    limit: int,
    config_path: Path | None,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Tell which causes cost requests B more time than requests A, and whether B may be released.

    SEL is key=pattern,...: service, model, version (of the engine), engine, template, tenant, method, route, status,
    outcome, agent, port, process, pid, container, pod, cgroup; since and until (an age such as 2h, or RFC 3339); and
    store=FILE for that of another host. Patterns are the shell's: route=/v1/*.

    \b
    whyspan compare --a since=2h,until=1h --b since=1h
    whyspan compare --a service=chat,version=0.10.* --b service=chat,version=0.11.*
    whyspan compare --a store=host1.db --b store=host2.db
    """
    import msgspec

    from whyspan import clock
    from whyspan.cli import _compare
    from whyspan.views import compare, select

    now = clock.now_unix_ns()
    chosen_a, chosen_b = select.parse(a_text, now), select.parse(b_text, now)
    default = store_of(config_path, store_path)
    with progress("reading", 3) as advance:
        a = _choose(chosen_a, default, limit, now)
        advance(1, "")
        b = _choose(chosen_b, default, limit, now)
        both = compare.shared(a, b)
        if both:
            raise ConfigError(f"A and B share {both} requests: separate them, as by since and until")
        advance(2, "comparing")
        view = compare.compare(a, b, p99_ms=p99_ms, errors=errors)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(view)).decode())
    else:
        _compare.show(view, console())
    if view.too_few:
        return TOO_FEW
    return WORSE if any(g.state == "worse" for g in view.gates) else 0


def _choose(selector: Selector, default: Path, limit: int, now_unix_ns: int) -> Chosen:
    """Read the requests of a side.

    Raises:
        StoreError: There is no such store, or it cannot be read.
    """
    from whyspan_exporters.bulk import BulkReader

    from whyspan.views import select
    from whyspan.views.compare import Chosen

    service = selector.patterns.get("service", "")
    exact = service if not re.search(r"[*?\[]", service) else ""
    starts: list[int] = []
    requests: list[Measured] = []
    with contextlib.closing(BulkReader(selector.store or default)) as reader:
        since, until = selector.since_unix_ns, min(selector.until_unix_ns, now_unix_ns)
        for raw in reader.raw(since_unix_ns=since, until_unix_ns=until, limit=_MAX_READ, service=exact):
            measured = select.decode(raw.finding)
            if measured is None or not selector.takes(measured):
                continue
            if len(requests) == limit:  # what follows is older: the time ends here
                since = starts[-1]
                break
            starts.append(raw.start_unix_ns)
            requests.append(measured)
        return Chosen(selector, starts, requests, _totals(reader.history, since, until, starts))


def _totals(history: Recall, since: int, until: int, starts: list[int]) -> dict[str, Totals] | None:
    """Return how many requests of each service ended; None unless they were counted all the time."""
    from whyspan.views.weighing import Totals

    counted = history.first_unix_ns()
    if not starts or counted is None or counted > min(starts) + _SLACK_NS:
        return None
    out = {}
    for service in history.services(since, until):
        for ended in history.requests(since, until, max(until - since, 1), service).values():
            out[service] = Totals(ended.latency, ended.failed)
    return out
