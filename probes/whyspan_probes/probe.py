"""What a probe declares about itself; everything else is derived from it and from its object's BTF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

#: For ``Hook.lacks``: registers are found at the top of a stack of this size or not at all (arch.bpf.h).
NO_REGISTERS = "system calls are unknown if the kernel's stacks are not 16 KiB"
#: For ``Hook.limits``: kernel/kprobes.c, register_kretprobe, of all processes of the host together.
BOUNDED_RETURNS = "returns are lost while more than 10 calls, or twice the CPUs, are under way in the host"


class Cost(StrEnum):
    """Cost classes of DESIGN section 3, as the governor and the user see them."""

    IDLE_FREE = "idle-free"
    PER_UNIT = "per-unit"
    BURST = "burst"


@dataclass(frozen=True)
class Hook:
    """One thing to observe, by the first alternative that attaches.

    Each alternative is a tuple of program names that are attached together. ``lacks`` says of a program what it
    may not see on a kernel without BTF of its own, ``limits`` what it may not see on any. ``hz``: its programs, of
    section ``perf_event``, run so many times per second on every CPU. ``walks``: its program, of section
    ``iter.s/task``, runs over the threads of a process whenever somebody asks for it.
    """

    name: str
    alternatives: tuple[tuple[str, ...], ...]
    required: bool = True  # without it the probe is useless
    lacks: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    hz: int = 0
    walks: bool = False

    def programs(self) -> set[str]:
        """Return every program that any alternative names."""
        return {p for a in self.alternatives for p in a}


@dataclass(frozen=True)
class UserHook:
    """Functions of a library, hooked in every file of it that a watched process maps, while one does.

    Attributes:
        name: unique among the probe's hooks.
        library: pattern that is searched in the path of a mapped file.
        symbols: the functions, each with the number that ``bpf_get_attach_cookie`` gives the program. Those that a
            file has are hooked; a file that has none is reported.
        programs: in order of preference; the section says how each attaches, and whether at the return.
        semaphore: a 16-bit variable of the library that the kernel raises meanwhile; a file without it is not hooked.
        thrown_to: of a hook at the return: the functions by which an exception of C++ would leave the library; whoever
            uses one and can catch gets no such hook, see ``catchers``. Empty: those of ``symbols``.
        required: a file that matches should have one of the symbols; without it, having none is nothing to report.
        notes: USDT notes to hook besides, as provider:name, each with its number; their semaphores are raised. The
            cookie says where the first argument lies, too, see ``usdt``.
        unless: a note; a file that has it is left to another hook.
        defines: a symbol; a file that does not define it is none of the hook's business.
        first: only the first of ``symbols`` that a file has is hooked: one calls the other.
        throws: of a hook at the return: whether an exception of C++ may leave the functions. Those of a C interface
            that lets none through say no.

    A program must ask ``whyspan_is_watched`` first: a hook at the entry is for all processes that map the file.
    """

    name: str
    library: str
    symbols: Mapping[str, int]
    programs: tuple[str, ...]
    semaphore: str = ""
    thrown_to: tuple[str, ...] = ()
    required: bool = True
    notes: Mapping[str, int] = field(default_factory=dict)
    unless: str = ""
    defines: str = ""
    first: bool = False
    throws: bool = True


@dataclass(frozen=True)
class Probe:
    """A probe: ``<name>.bpf.c`` beside the module that holds this declaration as ``PROBE``.

    Attributes:
        name: also the name of the object, of ``struct <name>_cfg`` and of ``enum <name>_kind``.
        title: one line for tables.
        hooks: what is attached, each with its alternatives in order of preference.
        user_hooks: what is attached in the files that watched processes map, when they do.
        events: for each event struct, its payload fields with meaning and unit; the object must agree.
        cost: cost class.
        joins: how its events find their request, one line.
        needs: kernel features in words, for ``doctor``.
        shed: order in which the governor detaches probes over budget; lower first, 0 = never.
        config: the fields of ``struct <name>_cfg`` with their meaning.
    """

    name: str
    title: str
    hooks: tuple[Hook, ...]
    events: Mapping[str, Mapping[str, str]]
    cost: Cost
    joins: str
    needs: str
    shed: int = 0
    config: Mapping[str, str] = field(default_factory=dict)
    user_hooks: tuple[UserHook, ...] = ()

    def programs(self) -> set[str]:
        """Return every program that a hook names."""
        return {p for h in self.hooks for p in h.programs()} | {
            p for h in self.user_hooks for p in h.programs
        }

    def hook_names(self) -> list[str]:
        """Return the names of all hooks, in order."""
        return [h.name for h in self.hooks] + [h.name for h in self.user_hooks]
