"""Addresses of watched processes as places in their files, told at once: a process may have ended soon after."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from whyspan_probes import libraries

from whyspan.code import maps, memory, returns
from whyspan.code.files import FileId, identify
from whyspan.code.maps import Mapping, Maps
from whyspan.lru import Lru
from whyspan.text import clean

_PROC: Final = Path("/proc")
_MAX_PROCESSES: Final = 512
_MAX_MODULES: Final = 2048
_MAX_ADDRESSES: Final = 8192  # remembered of a process
_MAX_HOLDERS: Final = 4
_MODULE_CHARS: Final = 80
#: Whether a process has mapped other code is looked at so often (20 us). If its size is the same, and there are
#: addresses that lie in no code, its mappings are read again after ever longer times.
_LOOK_S: Final = 1.0
_LONGEST_S: Final = 60.0
#: Lists of mappings read per call: of a torch process each takes some ms.
_MAX_READS: Final = 4
VDSO: Final = "vdso"


class Module:
    """Something with code in it: a file, the kernel's vdso, or what a process made while it ran (``tgid``).

    ``key`` names it; ``holders`` are some processes that map the file, each with its mapping's name.
    """

    def __init__(self, key: Hashable, mapping: Mapping, file_id: FileId | None, tgid: int) -> None:
        self.key, self.path, self.inode, self.id = key, mapping.path, mapping.inode, file_id
        self.name = clean(mapping.name, _MODULE_CHARS)
        self.tgid = tgid
        self.holders: dict[int, str] = {}


class Place(NamedTuple):
    """A place in code. ``offset`` is in the module's file, in the vdso, or in memory for code of no file."""

    module: Module
    offset: int
    label: str  # what it is called as long as its function is not known


class _View:
    """What is known of a process."""

    def __init__(self) -> None:
        self.maps = Maps()
        self.size = ""
        self.looked_s = self.due_s = -1.0
        self.delay_s = _LOOK_S
        self.modules: dict[int, Module] = {}  # by the mapping's start
        self.leaves: dict[int, Place | None] = {}
        self.callers: dict[int, Place | None] = {}


class Places:
    """Resolves addresses. Call ``learn`` with all of a batch first: it is what reads."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._views: Lru[int, _View] = Lru(_MAX_PROCESSES)
        self._modules: Lru[Hashable, Module] = Lru(_MAX_MODULES)
        self._reads = 0

    def begin(self) -> None:
        """Begin another batch: so many lists of mappings may be read in each."""
        self._reads = 0

    def forget(self, tgid: int) -> None:
        """Drop what is known of a process: it has ended, or executes another program."""
        self._views.pop(tgid)

    def learn(self, tgid: int, leaves: Collection[int], callers: Collection[int], now_s: float) -> None:
        """Look up addresses where threads were, and addresses to return to. *now_s* is CLOCK_MONOTONIC."""
        view = self._views.get(tgid)
        if view is None:
            view = _View()
            self._views.put(tgid, view)
        if now_s - view.looked_s >= _LOOK_S or view.looked_s < 0:
            view.looked_s = now_s
            size = libraries.code_size(tgid, self._proc)
            if size and size != view.size and self._read(tgid, view, now_s):
                view.size, view.delay_s = size, _LOOK_S
        self._resolve(tgid, view, leaves, callers)
        lost = any(view.leaves.get(a) is None for a in leaves)
        lost = lost or any(view.callers.get(a) is None for a in callers)
        if lost and now_s >= view.due_s and self._read(tgid, view, now_s):
            view.delay_s = min(2 * view.delay_s, _LONGEST_S)
            self._resolve(tgid, view, leaves, callers)

    def stack(self, tgid: int, user: Sequence[int]) -> tuple[list[Place], bool]:
        """Return the places of a stack, the innermost first, and whether it breaks off: at what cannot be a frame."""
        view = self._views.get(tgid)
        out: list[Place] = []
        for i, address in enumerate(user):
            known = None if view is None else (view.callers if i else view.leaves).get(address)
            if known is None:
                return out, True
            out.append(known)
        return out, False

    def _read(self, tgid: int, view: _View, now_s: float) -> bool:
        if self._reads == _MAX_READS:
            return False
        self._reads += 1
        view.due_s = now_s + view.delay_s
        found = maps.read(tgid, self._proc)
        if found is None:
            return False
        view.maps = found
        view.modules, view.leaves, view.callers = {}, {}, {}
        return True

    def _resolve(self, tgid: int, view: _View, leaves: Collection[int], callers: Collection[int]) -> None:
        for known in (view.leaves, view.callers):
            if len(known) > _MAX_ADDRESSES:
                known.clear()
        for address in leaves:
            if address not in view.leaves:
                view.leaves[address] = self._place(tgid, view, address, address)
        new = [a for a in callers if a not in view.callers]
        inside = [a for a in new if view.maps.at(a - 1) is not None]
        for address in new:
            view.callers[address] = None
        before = memory.read(tgid, [(a - returns.BYTES, returns.BYTES) for a in inside])
        for address, code in zip(inside, before, strict=True):
            if returns.follows_call(code):
                # The call, and not what comes after it: that may be the next function.
                view.callers[address] = self._place(tgid, view, address - 1, address)

    def _place(self, tgid: int, view: _View, at: int, address: int) -> Place | None:
        mapping = view.maps.at(at)
        if mapping is None:
            return None
        module = view.modules.get(mapping.start)
        if module is None:
            module = view.modules[mapping.start] = self._module(tgid, mapping)
        offset = at - mapping.start + mapping.offset
        shown = address - mapping.start + mapping.offset
        where = offset if mapping.of_file or module.key == VDSO else at
        return Place(module, where, f"{module.name}+0x{shown:x}")

    def _module(self, tgid: int, mapping: Mapping) -> Module:
        file_id = None
        key: Hashable
        if mapping.of_file:
            file_id = identify(str(self._proc / str(tgid) / "map_files" / mapping.span))
            key = file_id or (tgid, mapping.path, mapping.inode)
        else:
            key = VDSO if mapping.path == "[vdso]" else ("made", tgid)
        module = self._modules.get(key)
        if module is None:
            module = Module(key, mapping, file_id, 0 if mapping.of_file or key == VDSO else tgid)
            self._modules.put(key, module)
        if mapping.of_file and (tgid in module.holders or len(module.holders) < _MAX_HOLDERS):
            module.holders[tgid] = mapping.span
        elif mapping.of_file:
            module.holders.pop(next(iter(module.holders)))
            module.holders[tgid] = mapping.span
        return module
