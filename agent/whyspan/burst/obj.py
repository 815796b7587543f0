"""A burst's BPF object: loaded for one process and until a deadline, its links, its maps.

Nothing is pinned: the kernel detaches and frees everything with the descriptors of this process.
"""

from __future__ import annotations

import ctypes as ct
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import whyspan_probes
from whyspan_probes import libbpf as lb
from whyspan_probes import rodata
from whyspan_probes.btf import Btf
from whyspan_probes.errors import ProbeFrameworkError
from whyspan_probes.features import HookTable
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.loader import program_sections

from whyspan.burst.errors import BurstError

FOLDER = Path(whyspan_probes.__file__).parent / "bursts"
#: Alternatives of the hook on the scheduler's switches, see burst.bpf.h.
SWITCH = ("burst_switch_tp", "burst_switch_tp3", "burst_switch_raw", "burst_switch_raw3")
_FAILED_PROGRAM = re.compile(r"prog '(\w+)': failed to load")
_LINK = 3  # libbpf's PROBE_ATTACH_MODE_LINK: a link or nothing, never an event in tracefs, which would stay behind
_MAX_ROWS = 1 << 16

Place = tuple[int, int]  # offset in the file, cookie


class BurstObject:
    """One object in the kernel. ``used`` has the ELF section chosen for each hook, ``refused`` why not others."""

    def __init__(
        self,
        name: str,
        hooks: Mapping[str, Sequence[Sequence[str]]],
        *,
        tgid: int,
        deadline_ns: int,
        kernel: KernelBtf | None = None,
    ) -> None:
        """Load it.

        Args:
            name: The object, ``bursts/<name>.bpf.o``.
            hooks: Of each hook the alternatives in order of preference, each some programs that go together.
            tgid: The only process whose events count.
            deadline_ns: CLOCK_MONOTONIC; from then on the programs do nothing.
            kernel: The BTF to go by; default: the running kernel's own.

        Raises:
            BurstError: It is not built, or no alternative can be loaded.
        """
        self._path = FOLDER / f"{name}.bpf.o"
        self._run = {"tgid": tgid, "deadline_ns": deadline_ns}
        self._kernel = kernel or KernelBtf.find()
        self._lib = lb.libbpf()
        self._object = 0
        self._links: list[int] = []
        self.used: dict[str, str] = {}
        self.refused: dict[str, list[str]] = {h: [] for h in hooks}
        try:
            self._sections = program_sections(self._path)
        except ProbeFrameworkError as e:
            raise BurstError(f"{e}; run `make build`") from e
        self._left = {h: [list(a) for a in alternatives] for h, alternatives in hooks.items()}
        self._skip_missing()
        while not self._load():
            self.close()

    @property
    def btf(self) -> Btf:
        """The object's own types; valid while it is open."""
        return Btf.of_object(self._object)

    def programs(self, hook: str) -> list[str]:
        """Return the programs chosen for a hook."""
        return self._left[hook][0]

    def attach(self, hook: str) -> None:
        """Attach the programs of a kernel's hook.

        Raises:
            BurstError: the kernel refuses; ``drop`` and load again for the next alternative.
        """
        for name in self.programs(hook):
            lb.take_log()
            link = self._lib.bpf_program__attach(self._program(name))
            if not link:
                raise BurstError(f"{self._sections[name]}: {_why()}")
            self._links.append(link)
        self.used[hook] = self._sections[self.programs(hook)[0]]

    def attach_user(self, hook: str, fd: int, places: Iterable[Place], tgid: int) -> str:
        """Attach the program of a user hook to places of an open file, for one process. Returns its section.

        Raises:
            BurstError: the kernel refuses.
        """
        name, path, places = self.programs(hook)[0], f"/proc/self/fd/{fd}".encode(), list(places)
        section, program = self._sections[name], self._program(name)
        at_return = section.startswith("uretprobe")
        lb.take_log()
        if ".multi" in section:
            n = len(places)
            multi = lb.UprobeMultiOpts(sz=ct.sizeof(lb.UprobeMultiOpts), cnt=n, retprobe=at_return)
            multi.offsets = (ct.c_ulong * n)(*(offset for offset, _ in places))
            multi.cookies = (ct.c_uint64 * n)(*(cookie for _, cookie in places))
            self._keep(
                self._lib.bpf_program__attach_uprobe_multi(program, tgid, path, None, ct.byref(multi)),
                section,
            )
            return section
        for offset, cookie in places:
            one = lb.UprobeOpts(
                sz=ct.sizeof(lb.UprobeOpts), bpf_cookie=cookie, retprobe=at_return, attach_mode=_LINK
            )
            self._keep(
                self._lib.bpf_program__attach_uprobe_opts(program, tgid, path, offset, ct.byref(one)), section
            )
        return section

    def detach(self) -> None:
        """Take all links away, the last one first; the maps stay."""
        for link in reversed(self._links):
            self._lib.bpf_link__destroy(link)
        self._links = []

    def close(self) -> None:
        """Detach and unload; harmless twice."""
        self.detach()
        if self._object:
            self._lib.bpf_object__close(self._object)
            self._object = 0

    def rows(self, name: str, key: np.dtype[Any], value: np.dtype[Any]) -> tuple[Any, Any]:
        """Return the keys and values of a hash map as two arrays of one length.

        Raises:
            BurstError: a value has another size, of an object that was built from other sources.
        """
        fd = self._map(name)
        keys = np.zeros(_MAX_ROWS, key)
        values = np.zeros(_MAX_ROWS, value)
        found, previous = 0, None
        buffer, content = ct.create_string_buffer(key.itemsize), ct.create_string_buffer(value.itemsize + 8)
        while found < _MAX_ROWS and not self._lib.bpf_map_get_next_key(fd, previous, buffer):
            previous = ct.create_string_buffer(buffer.raw[: key.itemsize], key.itemsize)
            if self._lib.bpf_map_lookup_elem(fd, buffer, content):
                continue  # removed in between
            keys[found] = np.frombuffer(buffer.raw[: key.itemsize], key)[0]
            values[found] = np.frombuffer(content.raw[: value.itemsize], value)[0]
            found += 1
        return keys[:found], values[:found]

    def missed(self) -> dict[str, int]:
        """Return what was missed, by reason; only what is not 0."""
        fd, cpus = self._map("burst_missed"), lb.check(self._lib.libbpf_num_possible_cpus(), "possible CPUs")
        out = {}
        for name, index in self.btf.enum("burst_missed").items():
            values = (ct.c_uint64 * cpus)()
            if name != "MISSED_KINDS" and not self._lib.bpf_map_lookup_elem(
                fd, ct.byref(ct.c_uint32(index)), values
            ):
                out[name.removeprefix("MISSED_")] = sum(values)
        return {name: n for name, n in out.items() if n}

    def stack(self, number: int) -> list[int]:
        """Return the addresses of a stack, the innermost first; none for a number below 0."""
        frames = (ct.c_uint64 * 64)()  # burst.bpf.h: BURST_FRAMES
        fd = self._map("burst_stacks")
        if number < 0 or self._lib.bpf_map_lookup_elem(fd, ct.byref(ct.c_uint32(number)), frames):
            return []
        return [a for a in frames if a]

    def _program(self, name: str) -> int:
        return int(self._lib.bpf_object__find_program_by_name(self._object, name.encode()))

    def _map(self, name: str) -> int:
        found = self._lib.bpf_object__find_map_by_name(self._object, name.encode())
        return int(self._lib.bpf_map__fd(lb.check_pointer(found, f"map {name}")))

    def _keep(self, link: int | None, section: str) -> None:
        if not link:
            raise BurstError(f"{section}: {_why()}")
        self._links.append(link)

    def _skip_missing(self) -> None:
        table = HookTable(self._kernel)
        try:
            for hook, alternatives in self._left.items():
                while alternatives and (why := self._missing(table, alternatives[0])):
                    self._refuse(hook, why)
        finally:
            table.close()

    def _missing(self, table: HookTable, programs: Sequence[str]) -> str:
        for name in programs:
            if why := table.missing(self._sections[name]):
                return f"{self._sections[name]}: {why}"
        return ""

    def _refuse(self, hook: str, why: str) -> None:
        self.refused[hook].append(why)
        self._left[hook].pop(0)
        if not self._left[hook]:
            raise BurstError(f"{hook}: {'; '.join(dict.fromkeys(self.refused[hook]))}")

    def _load(self) -> bool:
        lib = self._lib
        lb.take_log()
        opts = lb.ObjectOpenOpts(sz=ct.sizeof(lb.ObjectOpenOpts))
        if self._kernel.file is not None:
            opts.btf_custom_path = os.fsencode(self._kernel.file)
        self._object = lib.bpf_object__open_file(os.fsencode(self._path), ct.byref(opts)) or 0
        if not self._object:
            raise BurstError(f"{self._path.name} cannot be opened")
        rodata.write(self._object, self.btf, self._path.name, {"burst_run": self._run})
        wanted = {p: hook for hook, alternatives in self._left.items() for p in alternatives[0]}
        for name in self._sections:
            lib.bpf_program__set_autoload(self._program(name), name in wanted)
        result = lib.bpf_object__load(self._object)
        if result == 0:
            return True
        log = lb.take_log()
        failed = _FAILED_PROGRAM.search(log)
        if failed is None or failed[1] not in wanted:
            last = log.splitlines()[-1].removeprefix("libbpf: ") if log else os.strerror(-result)
            raise BurstError(f"{self._path.name} cannot be loaded: {last[:200]}")
        self._refuse(wanted[failed[1]], f"{failed[1]}: refused at load")
        return False


def _why() -> str:
    code = ct.get_errno()
    lb.take_log()
    return os.strerror(code) if code else "refused"
