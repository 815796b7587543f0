"""Attaches a probe's user hooks to files, and detaches them: one link for each file and program.

A hook at the entry of a function is on the file, for whoever maps it: a process that starts is hooked from its first
instruction, and processes need not be told apart. What an unwatched process with the same file pays is one trap per
call, in which the program turns it away.

A hook at the *return* is on one process, one link each: a return probe changes the return address on the stack of
whoever calls, which harms some processes (see ``safety`` and ``catchers``); one that nobody checked must not get it.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from whyspan_probes import libbpf as lb
from whyspan_probes import symbols, usdt
from whyspan_probes.catchers import who_may_catch
from whyspan_probes.features import read_features
from whyspan_probes.mapped_files import Key, MappedFile
from whyspan_probes.probe import UserHook
from whyspan_probes.safety import moves_stacks, refuse_user_probe
from whyspan_probes.state import FileState

_MAX_PROCESSES_SHOWN = 16
_EVERYBODY = -1


class Program(NamedTuple):
    """A loaded program: libbpf's pointer and the section that says how it attaches."""

    pointer: int
    section: str

    @property
    def at_return(self) -> bool:
        """Whether it runs when the function returns."""
        return self.section.startswith("uretprobe")

    @property
    def multi(self) -> bool:
        """Whether one link may have many places."""
        return ".multi" in self.section


class _Hook(NamedTuple):
    declared: UserHook
    pattern: re.Pattern[str]
    programs: list[Program]


class _Place(NamedTuple):
    """Where a link is: a hook on a file, of one process or of everybody."""

    hook: str
    file: Key
    tgid: int


class _Spot(NamedTuple):
    """Where a hook is in the file, what its program is told there, and the semaphore to raise (0: none)."""

    name: str
    offset: int
    cookie: int
    semaphore: int


class _Refused(Exception):
    """Why a hook was not attached to a file."""


class _Unwanted(_Refused):
    """The file is not one that the hook is for."""


class _Absent(_Refused):
    """The file has none of its functions."""


@dataclass
class _Outcome:
    """What became of one hook on one file; ``tried`` are the processes that mapped it then."""

    tried: frozenset[int]
    links: list[int] = field(default_factory=list)
    state: str = "refused"
    by: str = ""
    reason: str = ""
    symbols: list[str] = field(default_factory=list)


class UserHooks:
    """The user hooks of one loaded probe."""

    def __init__(
        self, hooks: Iterable[UserHook], programs: Mapping[str, Program], proc: Path = Path("/proc")
    ) -> None:
        """*programs*: those that the kernel has taken, by name."""
        self._hooks = {
            hook.name: _Hook(
                hook, re.compile(hook.library), [programs[p] for p in hook.programs if p in programs]
            )
            for hook in hooks
        }
        self._proc = proc
        features = read_features()
        self._kernel, self._lockdown = features.kernel, features.lockdown
        self._outcomes: dict[_Place, _Outcome] = {}
        self._catchers: dict[tuple[int, tuple[str, ...]], str] = {}  # found out once for each round

    @property
    def attached(self) -> bool:
        """Whether any hook is on any file."""
        return any(o.links for o in self._outcomes.values())

    def apply(self, files: Mapping[Key, MappedFile]) -> list[FileState]:
        """Attach to files that are new, detach from those that are gone, and return the state of all."""
        wanted: dict[_Place, MappedFile] = {}
        for name, hook in self._hooks.items():
            for key, file in files.items():
                if hook.pattern.search(file.path):
                    each = bool(hook.programs) and hook.programs[0].at_return
                    tgids = sorted(file.processes) if each else [_EVERYBODY]
                    wanted |= {_Place(name, key, tgid): file for tgid in tgids}
        self._catchers.clear()
        self._detach([self._outcomes.pop(place) for place in self._outcomes.keys() - wanted.keys()])
        for place, file in wanted.items():
            known, processes = self._outcomes.get(place), frozenset(file.processes)
            if known is None or (not known.links and known.tried != processes):
                self._outcomes[place] = self._attach(place, file)
        return [s for place, file in wanted.items() if (s := self._state(place, file)) is not None]

    def close(self) -> None:
        """Detach everything."""
        self._detach(self._outcomes.values())
        self._outcomes.clear()

    @staticmethod
    def _detach(outcomes: Iterable[_Outcome]) -> None:
        lb.destroy_links([link for outcome in outcomes for link in outcome.links])

    def _state(self, place: _Place, file: MappedFile) -> FileState | None:
        outcome, tgid = self._outcomes[place], place.tgid
        if outcome.state == "unwanted" or (
            outcome.state == "absent" and not self._hooks[place.hook].declared.required
        ):
            return None
        processes = [tgid] if tgid != _EVERYBODY else sorted(file.processes)[:_MAX_PROCESSES_SHOWN]
        return FileState(
            place.hook,
            file.path.encode(errors="replace").decode(),
            outcome.state,
            outcome.by,
            outcome.reason,
            outcome.symbols,
            processes,
            file.build_id,
        )

    def _attach(self, place: _Place, file: MappedFile) -> _Outcome:
        outcome = _Outcome(frozenset(file.processes))
        hook, tgid = self._hooks[place.hook], place.tgid
        reasons: list[str] = []
        try:
            if file.problem:
                raise _Refused(file.problem)
            if not hook.programs:
                raise _Refused("no program of it is loaded")
            with self._open(file, tgid) as fd:
                spots = self._resolve(hook.declared, fd)
                for program in hook.programs:
                    why = self._unsafe(hook.declared, program, file, tgid)
                    if not why:
                        outcome.links, why = _link(program, f"/proc/self/fd/{fd}", spots, tgid)
                    if outcome.links:
                        names = list(dict.fromkeys(s.name for s in spots))
                        outcome.state, outcome.by, outcome.symbols = "attached", program.section, names
                        break
                    reasons.append(f"{program.section}: {why}")
        except _Unwanted as e:
            outcome.state, reasons = "unwanted", [str(e)]
        except _Absent as e:
            outcome.state, reasons = "absent", [str(e)]
        except _Refused as e:
            reasons = [str(e)]
        outcome.reason = "" if outcome.links else "; ".join(dict.fromkeys(reasons))
        return outcome

    @contextlib.contextmanager
    def _open(self, file: MappedFile, tgid: int) -> Iterator[int]:
        """Open the file through one of its processes. The kernel is then given this descriptor, not a path."""
        why = "no process maps it"
        for process, path in file.processes.items():
            if tgid not in (_EVERYBODY, process):
                continue
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError as e:
                gone = not (self._proc / str(process)).exists()
                why = f"process {process} has ended" if gone else f"it cannot be opened: {e.strerror}"
                continue
            try:
                yield fd
            finally:
                os.close(fd)
            return
        raise _Refused(why)

    @staticmethod
    def _resolve(hook: UserHook, fd: int) -> list[_Spot]:
        """Return every place of the file to hook."""
        try:
            wanted = [*hook.symbols, *filter(None, [hook.semaphore, hook.defines])]
            found = symbols.find(fd, wanted)
            notes = usdt.find(fd, {*hook.notes, *filter(None, [hook.unless])})
        except OSError as e:
            raise _Refused(f"its symbols cannot be read: {e.strerror}") from e
        except symbols.ElfError as e:
            raise _Refused(str(e)) from e
        if hook.defines and hook.defines not in found:
            raise _Unwanted(f"it does not define {hook.defines}")
        if hook.unless and any(n.name == hook.unless for n in notes):
            raise _Unwanted(f"it has the note {hook.unless}")
        semaphore = found.get(hook.semaphore)
        spots: dict[int, _Spot] = {}  # two names of one function: once
        for name, cookie in hook.symbols.items():
            symbol = found.get(name)
            if symbol and symbol.function and not (hook.first and spots):
                spot = _Spot(name, symbol.offset, cookie, semaphore.offset if semaphore else 0)
                spots.setdefault(symbol.offset, spot)
        for note in notes:
            if note.name in hook.notes:
                cookie = hook.notes[note.name] | usdt.argument(note.arguments)
                spots.setdefault(note.offset, _Spot(note.name, note.offset, cookie, note.semaphore))
        if not spots:
            raise _Absent(f"it has no function {', '.join([*hook.symbols, *hook.notes][:3])}")
        if hook.semaphore and (semaphore is None or semaphore.function or semaphore.size != 2):
            raise _Refused(f"it has no 16-bit variable {hook.semaphore}")
        return list(spots.values())

    def _unsafe(self, hook: UserHook, program: Program, file: MappedFile, tgid: int) -> str:
        for process in file.processes if tgid == _EVERYBODY else (tgid,):
            why = refuse_user_probe(
                program.section, process, self._kernel, lockdown=self._lockdown, proc=self._proc
            )
            if why:
                return why
        if program.at_return:
            mover = moves_stacks(tgid, self._proc)
            if mover:
                return f"{mover} moves stacks about: a return might not be found again"
            if not hook.throws:
                return ""
            thrown = hook.thrown_to or tuple(hook.symbols)
            if (tgid, thrown) not in self._catchers:
                self._catchers[tgid, thrown] = who_may_catch(tgid, thrown, self._proc)
            catcher = self._catchers[tgid, thrown]
            if catcher:
                return f"a C++ exception could not reach {catcher}"
        return ""


def _link(program: Program, path: str, spots: Sequence[_Spot], tgid: int) -> tuple[list[int], str]:
    """Attach a program; return its links, or none and the reason."""
    lib = lb.libbpf()
    lb.take_log()
    if program.multi:
        n = len(spots)
        opts = lb.UprobeMultiOpts(sz=ct.sizeof(lb.UprobeMultiOpts), cnt=n, retprobe=program.at_return)
        opts.offsets = (ct.c_ulong * n)(*(s.offset for s in spots))
        opts.cookies = (ct.c_uint64 * n)(*(s.cookie for s in spots))
        if any(s.semaphore for s in spots):
            opts.ref_ctr_offsets = (ct.c_ulong * n)(*(s.semaphore for s in spots))
        link = lib.bpf_program__attach_uprobe_multi(
            program.pointer, tgid, path.encode(), None, ct.byref(opts)
        )
        return ([link], "") if link else ([], _why())
    links: list[int] = []
    for spot in spots:
        one = lb.UprobeOpts(
            sz=ct.sizeof(lb.UprobeOpts),
            ref_ctr_offset=spot.semaphore,
            bpf_cookie=spot.cookie,
            retprobe=program.at_return,
        )
        link = lib.bpf_program__attach_uprobe_opts(
            program.pointer, tgid, path.encode(), spot.offset, ct.byref(one)
        )
        if not link:
            why = _why()
            for other in links:
                lib.bpf_link__destroy(other)
            return [], why
        links.append(link)
    return links, ""


def _why() -> str:
    code = ct.get_errno()
    lb.take_log()
    return os.strerror(code) if code else "refused"


def summary(files: Sequence[FileState]) -> tuple[str, str]:
    """Return state and reason of a probe that has user hooks only."""
    states = {f.state for f in files}
    if not states:
        return "waiting", "no watched process maps a file that it is for"
    reason = next((f"{f.path}: {f.reason}" for f in files if f.state != "attached"), "")
    if "attached" not in states:
        return "failed", reason
    return ("partial", reason) if reason else ("attached", "")
