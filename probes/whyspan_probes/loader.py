"""Loads probes' objects, attaches the first alternative of each hook that works, and reports what happened."""

from __future__ import annotations

import ctypes as ct
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from whyspan_probes import libbpf as lb
from whyspan_probes.btf import Btf
from whyspan_probes.errors import PrivilegeError, ProbeError
from whyspan_probes.features import HookTable
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.probe import Hook, Probe
from whyspan_probes.registry import Found
from whyspan_probes.schema import HEAD_FIELDS, EventType
from whyspan_probes.shared_maps import MAX_KINDS, SharedMaps
from whyspan_probes.state import HookState, ProbeState

KINDS_PER_PROBE = 16
_FAILED_PROGRAM = re.compile(r"prog '(\w+)': failed to load")
_UNRESOLVED = re.compile(r"failed to resolve CO-RE relocation <\w+> \[\d+\] (\w+ [^\s(]+)")
_LOADERS = 4
_PERMISSION_ERRNOS = (1, 13)


def event_types(probe: Probe, btf: Btf, kind_base: int) -> list[EventType]:
    """Return the probe's event types as its object lays them out.

    Raises:
        ProbeError: the object and the declaration name different events or fields.
    """
    kinds = {n.removeprefix("KIND_"): v for n, v in btf.enum(f"{probe.name}_kind").items()}
    if set(kinds) != set(probe.events):
        raise ProbeError(
            f"probe {probe.name}: declares {sorted(probe.events)}, its object has {sorted(kinds)}"
        )
    out = []
    for name, fields in probe.events.items():
        dtype = btf.struct_dtype(name)
        payload = [n for n in dtype.names or () if n not in HEAD_FIELDS and not n.startswith("_pad")]
        if (dtype.names or ())[: len(HEAD_FIELDS)] != HEAD_FIELDS or set(payload) != set(fields) - {"aux"}:
            raise ProbeError(f"event {name}: declares {sorted(fields)}, its object has {payload}")
        if not 0 <= kinds[name] < KINDS_PER_PROBE:
            raise ProbeError(f"event {name}: kind {kinds[name]} is out of range")
        out.append(EventType(name, kind_base + kinds[name], dtype))
    return out


def program_sections(path: Path) -> dict[str, str]:
    """Return the ELF section of every program of an object, by program name; needs no privilege.

    Raises:
        ProbeError: the object is missing or cannot be read.
    """
    lib = lb.libbpf()
    obj = lib.bpf_object__open_file(str(path).encode(), None) if path.exists() else 0
    if not obj:
        raise ProbeError(f"{path.name} is not built or cannot be read", lb.take_log())
    try:
        return _sections_of(obj)
    finally:
        lib.bpf_object__close(obj)


def _sections_of(obj: int) -> dict[str, str]:
    lib, current, out = lb.libbpf(), None, {}
    while current := lib.bpf_object__next_program(obj, current):
        out[lib.bpf_program__name(current).decode()] = lib.bpf_program__section_name(current).decode()
    return out


class LoadedProbe:
    """One probe's open object: its links, its programs, its state."""

    def __init__(self, found: Found, index: int, maps: SharedMaps, key_secret: int, hooks: HookTable) -> None:
        self.probe = found.probe
        self.path = found.object_path
        self.kind_base = index * KINDS_PER_PROBE
        if self.kind_base + KINDS_PER_PROBE > MAX_KINDS:
            raise ProbeError(f"probe {self.probe.name}: too many probes")
        self.state = ProbeState(self.probe.name, self.probe.title, self.probe.cost.value)
        self.types: list[EventType] = []
        self._maps, self._secret, self._hooks, self._kernel = maps, key_secret, hooks, hooks.kernel
        self._object = 0
        self._links: list[int] = []
        self._programs: dict[str, int] = {}

    @property
    def attached(self) -> bool:
        """Whether it is delivering events."""
        return bool(self._links)

    def program_fds(self) -> dict[str, int]:
        """Return the descriptors of the programs attached, by name."""
        return dict(self._programs)

    def attach(self, config: Mapping[str, int]) -> None:
        """Load and attach. Failure is a state, not an exception.

        Raises:
            ProbeError: the object and the declaration disagree, or the configuration names an unknown field.
            PrivilegeError: the kernel refused for lack of capabilities.
        """
        if not self.path.exists():
            self.state.state, self.state.reason = "failed", f"{self.path.name} is not built"
            return
        choice = {h.name: 0 for h in self.probe.hooks}
        refused: dict[str, list[str]] = {h.name: [] for h in self.probe.hooks}
        for _ in range(1 + sum(len(h.alternatives) for h in self.probe.hooks)):
            self._open(config)
            sections = self._sections()
            self._skip_missing(choice, refused, sections)
            if self._give_up(choice, refused):
                return
            if self._load(choice, refused) and self._attach_all(choice, refused, sections):
                break
            self.close()
            if self._give_up(choice, refused):
                return
        self._report(choice, refused, sections)

    def close(self) -> None:
        """Detach and unload."""
        lib = lb.libbpf()
        for link in self._links:
            lib.bpf_link__destroy(link)
        self._links, self._programs = [], {}
        if self._object:
            lib.bpf_object__close(self._object)
            self._object = 0

    def shed(self, reason: str) -> None:
        """Detach because of the budget."""
        self.close()
        self.state.state, self.state.reason = "shed", reason

    def _open(self, config: Mapping[str, int]) -> None:
        lib = lb.libbpf()
        lb.take_log()
        opts = lb.ObjectOpenOpts(sz=ct.sizeof(lb.ObjectOpenOpts))
        if self._kernel.file is not None:
            opts.btf_custom_path = os.fsencode(self._kernel.file)
        obj = lib.bpf_object__open_file(str(self.path).encode(), ct.byref(opts))
        if not obj:
            raise ProbeError(f"probe {self.probe.name}: cannot open {self.path.name}", lb.take_log())
        self._object = obj
        btf = Btf.of_object(obj)
        self.types = event_types(self.probe, btf, self.kind_base)
        self._write_rodata(btf, config)
        for name, fd in self._maps.by_name.items():
            found = lib.bpf_object__find_map_by_name(obj, name.encode())
            if found:
                lb.check(lib.bpf_map__reuse_fd(found, fd), f"map {name}")

    def _rodata(self) -> tuple[int, int]:
        """Return address and size of the object's read-only data."""
        lib, current = lb.libbpf(), None
        while current := lib.bpf_object__next_map(self._object, current):
            if lib.bpf_map__name(current).endswith(b".rodata"):
                size = ct.c_size_t()
                return lib.bpf_map__initial_value(current, ct.byref(size)) or 0, size.value
        return 0, 0

    def _write_rodata(self, btf: Btf, config: Mapping[str, int]) -> None:
        address, size = self._rodata()
        variables = btf.variables(".rodata")
        values: dict[str, Mapping[str, int]] = {
            "whyspan_run": {
                "key_secret": self._secret,
                "shard_mask": self._maps.shards - 1,
                "wake_every": self._maps.wake_every,
                "kind_base": self.kind_base,
                "no_btf": not self._kernel.own,
            },
            "cfg": config,
        }
        for name, fields in values.items():
            if name not in variables:
                raise ProbeError(f"probe {self.probe.name}: its object has no `{name}`")
            variable = variables[name]
            dtype = btf.dtype(variable.type_id, name)
            if not address or variable.offset + dtype.itemsize > size:
                raise ProbeError(f"probe {self.probe.name}: `{name}` lies outside its read-only data")
            raw: Any = (ct.c_uint8 * dtype.itemsize).from_address(address + variable.offset)
            view: Any = np.frombuffer(raw, dtype=dtype)
            for field, value in fields.items():
                if field not in (dtype.names or ()) or field.startswith("_pad"):
                    raise ProbeError(f"probe {self.probe.name}: unknown configuration field {field!r}")
                view[0][field] = value

    def _sections(self) -> dict[str, str]:
        out = _sections_of(self._object)
        unknown = {p for h in self.probe.hooks for p in h.programs()} - set(out)
        if unknown:
            raise ProbeError(f"probe {self.probe.name}: no program {sorted(unknown)} in its object")
        return out

    def _skip_missing(
        self, choice: dict[str, int], refused: dict[str, list[str]], sections: Mapping[str, str]
    ) -> None:
        for hook in self.probe.hooks:
            while choice[hook.name] < len(hook.alternatives):
                programs = hook.alternatives[choice[hook.name]]
                why = next(filter(None, (self._hooks.missing(sections[p]) for p in programs)), "")
                if not why:
                    break
                refused[hook.name].append(f"{sections[programs[0]]}: {why}")
                choice[hook.name] += 1

    def _give_up(self, choice: Mapping[str, int], refused: Mapping[str, list[str]]) -> bool:
        for hook in self.probe.hooks:
            if hook.required and choice[hook.name] >= len(hook.alternatives):
                self.close()
                self.state.state = "failed"
                self.state.reason = f"hook {hook.name}: {'; '.join(refused[hook.name])}"
                self.state.hooks = {h.name: HookState([], refused[h.name]) for h in self.probe.hooks}
                return True
        return False

    def _chosen(self, choice: Mapping[str, int]) -> Iterable[tuple[Hook, tuple[str, ...]]]:
        for hook in self.probe.hooks:
            if choice[hook.name] < len(hook.alternatives):
                yield hook, hook.alternatives[choice[hook.name]]

    def _load(self, choice: dict[str, int], refused: dict[str, list[str]]) -> bool:
        lib = lb.libbpf()
        wanted = {p: h for h, programs in self._chosen(choice) for p in programs}
        current = None
        while current := lib.bpf_object__next_program(self._object, current):
            name = lib.bpf_program__name(current).decode()
            lib.bpf_program__set_autoload(current, name in wanted)
        result = lib.bpf_object__load(self._object)
        if result == 0:
            return True
        log = lb.take_log()
        failed = _FAILED_PROGRAM.search(log)
        if -result in _PERMISSION_ERRNOS and "Operation not permitted" in log and not failed:
            raise PrivilegeError(
                f"probe {self.probe.name}: the kernel refused to load it (CAP_BPF, CAP_PERFMON)"
            )
        if failed is None or failed[1] not in wanted:
            last = log.splitlines()[-1] if log else "no message"
            raise ProbeError(f"probe {self.probe.name}: cannot be loaded: {last}", log)
        hook = wanted[failed[1]]
        refused[hook.name].append(f"{failed[1]}: refused at load: {_summary(log)}")
        choice[hook.name] += 1
        return False

    def _attach_all(
        self, choice: dict[str, int], refused: dict[str, list[str]], sections: Mapping[str, str]
    ) -> bool:
        lib = lb.libbpf()
        for hook, programs in self._chosen(choice):
            for name in programs:
                program = lib.bpf_object__find_program_by_name(self._object, name.encode())
                link = lib.bpf_program__attach(program)
                if not link:
                    refused[hook.name].append(f"{sections[name]}: cannot attach: {_summary(lb.take_log())}")
                    choice[hook.name] += 1
                    return False
                self._links.append(link)
                self._programs[name] = lib.bpf_program__fd(program)
        return True

    def _report(
        self, choice: Mapping[str, int], refused: Mapping[str, list[str]], sections: Mapping[str, str]
    ) -> None:
        used = {h.name: [sections[p] for p in programs] for h, programs in self._chosen(choice)}
        self.state.hooks = {
            h.name: HookState(used.get(h.name, []), refused[h.name]) for h in self.probe.hooks
        }
        if not self._kernel.own:
            for h, programs in self._chosen(choice):
                self.state.hooks[h.name].lacks = sorted({h.lacks[p] for p in programs if p in h.lacks})
        whole = all(h.name in used for h in self.probe.hooks)
        self.state.state, self.state.reason = (
            ("attached", "") if whole else ("partial", "an optional hook is missing")
        )


def _summary(log: str) -> str:
    """The one line of libbpf's output that tells why: the verifier's last sentence, or the last warning."""
    unresolved = _UNRESOLVED.search(log)
    if unresolved:
        return f"no {unresolved[1]} in the kernel's BTF"
    lines = [ln.strip() for ln in log.splitlines() if ln.strip()]
    for i, line in enumerate(lines):
        if line.startswith("processed ") and i:
            return lines[i - 1][:160]
    useful = [ln for ln in lines if not ln.startswith(("--", "libbpf: --"))]
    return useful[0].removeprefix("libbpf: ")[:160] if useful else "no message"


def _attach(p: LoadedProbe, config: Mapping[str, int]) -> None:
    try:
        p.attach(config)
    except ProbeError as e:
        p.close()
        p.state.state, p.state.reason = "failed", str(e)


class Session:
    """All probes of one run and the maps that they share."""

    def __init__(self, found: Iterable[Found], ring_bytes: int, kernel: KernelBtf | None = None) -> None:
        """*kernel*: the BTF to go by, see ``KernelBtf.find``; default: the running kernel's own."""
        self.maps = SharedMaps(ring_bytes)
        hooks = HookTable(kernel)
        secret = secrets.randbits(64)
        try:
            self.probes = [LoadedProbe(f, i, self.maps, secret, hooks) for i, f in enumerate(found)]
            self._hooks = hooks
        except BaseException:
            self.maps.close()
            raise

    def attach(
        self,
        config: Mapping[str, Mapping[str, int]] | None = None,
        disabled: Iterable[str] = (),
        progress: Callable[[ProbeState], None] = lambda _: None,
    ) -> None:
        """Attach every probe that is not disabled; one that fails does not stop the others.

        Raises:
            PrivilegeError: the kernel refuses all of them.
        """
        wanted = [p for p in self.probes if p.probe.name not in set(disabled)]
        try:
            # Half of the time is libbpf's reading of the kernel's BTF, once per object: done side by side.
            with ThreadPoolExecutor(max_workers=min(_LOADERS, max(1, len(wanted)))) as pool:
                loading = {
                    p.probe.name: pool.submit(_attach, p, (config or {}).get(p.probe.name, {}))
                    for p in wanted
                }
            for p in self.probes:
                if p.probe.name in loading:
                    loading[p.probe.name].result()
                progress(p.state)
        finally:
            self._hooks.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring that fills faster than the reader's timer; return whether one does."""
        return bool(self.maps.waiter.poll(timeout_s))

    def event_types(self) -> list[EventType]:
        """Return the event types of every probe that was opened."""
        return [t for p in self.probes for t in p.types]

    def close(self) -> None:
        """Detach everything and free the maps."""
        for p in self.probes:
            p.close()
        self.maps.close()
