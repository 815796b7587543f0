"""A snapshot of a stalled process as lines of text: its threads by what they were in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whyspan.text import clean

if TYPE_CHECKING:
    from whyspan.model import Snapshot, ThreadGroup

_GROUPS, _FRAMES, _WIDTH = 8, 6, 160


def lines(snapshot: Snapshot, start_ns: int) -> list[str]:
    """Return the lines, those threads first that stalled. *start_ns*: when the request began."""
    at_ms = (snapshot.at_ns - start_ns) / 1e6
    count = sum(g.count for g in snapshot.groups) + snapshot.left_out
    out = [
        f"  threads of {clean(snapshot.process, 40)} [{snapshot.tgid}] at {at_ms:.0f} ms: {count}, while it stalled"
    ]
    for group in snapshot.groups[:_GROUPS]:
        out += _group(group)
    more = count - sum(g.count for g in snapshot.groups[:_GROUPS])
    return [*out, f"    ... ({more} more threads)"] if more else out


def _group(group: ThreadGroup) -> list[str]:
    from whyspan.codetext import short

    names = ", ".join(clean(name, 40) for name in dict.fromkeys(group.threads[:3]))
    state = f"{group.state} in {group.syscall}" if group.syscall else group.state
    since = f" for {group.for_ms:.0f} ms" if group.for_ms else ""
    many = f"{group.count} threads: " if group.count > 1 else ""
    out = [f"    {'> ' if group.stalled else ''}{many}{names}: {state}{since}"]
    shown = short(group)
    out += [f"        {clean(line, _WIDTH)}" for line in shown[:_FRAMES]]
    return [*out, f"        ... ({len(shown) - _FRAMES} more)"] if len(shown) > _FRAMES else out
