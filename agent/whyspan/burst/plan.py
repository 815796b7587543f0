"""Which functions of which allocators the malloc burst hooks, and how far: entry and return, or the entry alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from whyspan_probes.btf import Btf
from whyspan_probes.catchers import who_may_catch
from whyspan_probes.features import Features
from whyspan_probes.safety import refuse_user_probe

from whyspan.burst.allocators import Allocator, Function
from whyspan.burst.errors import BurstError
from whyspan.burst.obj import Place
from whyspan.text import clean


class Plan(NamedTuple):
    """The functions by number; of each file the numbers of those hooked so far, and why not farther."""

    functions: list[tuple[Allocator, Function]]
    with_return: dict[Allocator, list[int]]
    entry_only: dict[Allocator, list[int]]
    why: dict[Allocator, str]

    def places(self, btf: Btf, numbers: Sequence[int]) -> list[Place]:
        """Return where these functions are, with the cookies that malloc_burst.bpf.c expects."""
        sizes = btf.enum("malloc_size")
        chosen = [(n, self.functions[n][1]) for n in numbers]
        return [(f.offset, n << 8 | sizes[f.size.value]) for n, f in chosen]


def make(
    tgid: int,
    found: Sequence[Allocator],
    features: Features,
    may_catch: Callable[[int, Sequence[str]], str] = who_may_catch,
) -> Plan:
    """Decide what may be hooked how.

    ``catchers`` is asked of operator new only: no exception passes through a function of C's allocator, which calls
    nobody else's code. *may_catch* is for tests.

    Raises:
        BurstError: not even entries may be hooked.
    """

    def unsafe(section: str) -> str:
        return refuse_user_probe(section, tgid, features.kernel, lockdown=features.lockdown)

    if why := unsafe("uprobe"):
        raise BurstError(why)
    no_return = unsafe("uretprobe")
    plan = Plan([], {}, {}, {})
    for a in found:
        thrown = [f.symbol for f in a.functions if f.throws]
        catcher = may_catch(tgid, thrown) if thrown and not no_return else ""
        if catcher:
            plan.why[a] = (
                f"times of operator new are not known: a C++ exception could not reach {clean(catcher)}"
            )
        if no_return:
            plan.why[a] = f"times are not known: {no_return}"
        for f in a.functions:
            only = no_return or (f.throws and catcher)
            (plan.entry_only if only else plan.with_return).setdefault(a, []).append(len(plan.functions))
            plan.functions.append((a, f))
    return plan
