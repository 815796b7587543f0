"""Loads probes' objects, attaches the first alternative of each hook that works, and reports what happened."""

from __future__ import annotations

import ctypes as ct
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whyspan_probes import libbpf as lb
from whyspan_probes import link_misses, rodata, sampling
from whyspan_probes.btf import Btf
from whyspan_probes.errors import PrivilegeError, ProbeError
from whyspan_probes.features import HookTable
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.mapped_files import Key, MappedFile, MappedFiles
from whyspan_probes.probe import Hook, Probe, UserHook
from whyspan_probes.registry import Found
from whyspan_probes.schema import HEAD_FIELDS, EventType
from whyspan_probes.shared_maps import MAX_KINDS, SharedMaps
from whyspan_probes.state import HookState, ProbeState
from whyspan_probes.user_hooks import Program, UserHooks, summary
from whyspan_probes.walking import Walk

KINDS_PER_PROBE = 16
_FAILED_PROGRAM = re.compile(r"prog '(\w+)': failed to load")
_UNRESOLVED = re.compile(r"failed to resolve CO-RE relocation <\w+> \[\d+\] (\w+ [^\s(]+)")
_LOADERS = 4
_MAX_FILES_SHOWN = 64
_PERMISSION_ERRNOS = (1, 13)
_TRAMPOLINES = frozenset({"fentry", "fexit"})


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
        self._walks: list[Walk] = []
        self._walking = threading.Lock()  # whoever walks may be another thread than whoever sheds or closes
        self._programs: dict[str, int] = {}
        self._user: UserHooks | None = None
        self._unusable: dict[str, str] = {}  # programs of user hooks, and why
        self._config: Mapping[str, int] = {}

    @property
    def attached(self) -> bool:
        """Whether it is delivering events."""
        return bool(self._links or self._walks) or (self._user is not None and self._user.attached)

    def program_fds(self) -> dict[str, int]:
        """Return the descriptors of the programs attached, by name."""
        return dict(self._programs)

    def link_misses(self) -> int:
        """Return how many runs of kprobes and kretprobes the kernel left out since they were attached."""
        return sum(map(link_misses.read, self._links))

    def attach(self, config: Mapping[str, int]) -> None:
        """Load and attach. Failure is a state, not an exception.

        Raises:
            ProbeError: the object and the declaration disagree, or the configuration names an unknown field.
            PrivilegeError: the kernel refused for lack of capabilities.
        """
        if not self.path.exists():
            self.state.state, self.state.reason = "failed", f"{self.path.name} is not built"
            return
        self._config = config
        choice = {h.name: 0 for h in self.probe.hooks}
        refused: dict[str, list[str]] = {h.name: [] for h in self.probe.hooks}
        self._unusable = {}
        tries = sum(len(h.alternatives) for h in self.probe.hooks)
        for _ in range(1 + tries + sum(len(h.programs) for h in self.probe.user_hooks)):
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
        lb.destroy_links(self._links)
        with self._walking:
            for walk in self._walks:
                walk.close()
            self._links, self._walks, self._programs = [], [], {}
        if self._user is not None:
            self._user.close()
            self._user, self.state.files = None, []
        if self._object:
            lb.libbpf().bpf_object__close(self._object)
            self._object = 0

    def walk(self, hook: str, tgids: Iterable[int]) -> dict[int, bytes]:
        """Run the program of a hook over the threads of these processes; return what it prints. From any thread."""
        with self._walking:
            return {tgid: walk.run(tgid) for walk in self._walks if walk.hook == hook for tgid in tgids}

    def attach_again(self, hooks: HookTable) -> None:
        """Attach with the same configuration what was detached. Failure is a state."""
        self._hooks, self._kernel = hooks, hooks.kernel
        _attach(self, self._config)

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
        run = {
            "key_secret": self._secret,
            "shard_mask": self._maps.shards - 1,
            "wake_every": self._maps.wake_every,
            "kind_base": self.kind_base,
            "no_btf": not self._kernel.own,
        }
        rodata.write(obj, btf, self.probe.name, {"whyspan_run": run, "cfg": config})
        for name, fd in self._maps.by_name.items():
            found = lib.bpf_object__find_map_by_name(obj, name.encode())
            if found:
                lb.check(lib.bpf_map__reuse_fd(found, fd), f"map {name}")

    def _sections(self) -> dict[str, str]:
        out = _sections_of(self._object)
        unknown = self.probe.programs() - set(out)
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
        for program in (p for h in self.probe.user_hooks for p in h.programs):
            why = self._hooks.missing(sections[program])
            if why:
                self._unusable[program] = f"{sections[program]}: {why}"

    def _give_up(self, choice: Mapping[str, int], refused: Mapping[str, list[str]]) -> bool:
        for hook in self.probe.hooks:
            if hook.required and choice[hook.name] >= len(hook.alternatives):
                self.close()
                self.state.state = "failed"
                self.state.reason = f"hook {hook.name}: {'; '.join(refused[hook.name])}"
                self.state.hooks = {h.name: HookState([], refused[h.name]) for h in self.probe.hooks}
                return True
        for user in self.probe.user_hooks:
            if user.required and set(user.programs) <= self._unusable.keys():
                self.close()
                self.state.state = "failed"
                self.state.reason = f"hook {user.name}: {'; '.join(self._refusals(user))}"
                self.state.hooks = {h.name: HookState([], self._refusals(h)) for h in self.probe.user_hooks}
                return True
        return False

    def _refusals(self, hook: UserHook) -> list[str]:
        return [self._unusable[p] for p in hook.programs if p in self._unusable]

    def _chosen(self, choice: Mapping[str, int]) -> Iterable[tuple[Hook, tuple[str, ...]]]:
        for hook in self.probe.hooks:
            if choice[hook.name] < len(hook.alternatives):
                yield hook, hook.alternatives[choice[hook.name]]

    def _load(self, choice: dict[str, int], refused: dict[str, list[str]]) -> bool:
        lib = lb.libbpf()
        wanted = {p: h for h, programs in self._chosen(choice) for p in programs}
        # All alternatives of a user hook: which one will do is known only when there is a file.
        user = {p for h in self.probe.user_hooks for p in h.programs} - self._unusable.keys()
        current = None
        while current := lib.bpf_object__next_program(self._object, current):
            name = lib.bpf_program__name(current).decode()
            lib.bpf_program__set_autoload(current, name in wanted or name in user)
        result = lib.bpf_object__load(self._object)
        if result == 0:
            return True
        log = lb.take_log()
        failed = _FAILED_PROGRAM.search(log)
        if -result in _PERMISSION_ERRNOS and "Operation not permitted" in log and not failed:
            raise PrivilegeError(
                f"probe {self.probe.name}: the kernel refused to load it (CAP_BPF, CAP_PERFMON)"
            )
        if failed is not None and failed[1] in user:
            self._unusable[failed[1]] = f"{failed[1]}: refused at load: {_summary(log)}"
            return False
        if failed is None or failed[1] not in wanted:
            last = log.splitlines()[-1] if log else "no message"
            raise ProbeError(f"probe {self.probe.name}: cannot be loaded: {last}", log)
        hook = wanted[failed[1]]
        sections, why = self._sections(), f"{failed[1]}: refused at load: {_summary(log)}"
        section = sections[failed[1]]
        if -result == errno.EPERM and section.partition("/")[0] in _TRAMPOLINES:
            # Not what the program does (the verifier's word for that is EACCES): others of its kind would be refused
            # likewise. Said as it will be of them, or it would depend on which of the probes was first.
            kind = f"this kernel refuses such programs ({errno.errorcode[-result]})"
            self._hooks.refuse(section, kind)
            why = f"{sections[hook.alternatives[choice[hook.name]][0]]}: {kind}"
        refused[hook.name].append(why)
        choice[hook.name] += 1
        return False

    def _attach_all(
        self, choice: dict[str, int], refused: dict[str, list[str]], sections: Mapping[str, str]
    ) -> bool:
        lib = lb.libbpf()
        for hook, programs in self._chosen(choice):
            for name in programs:
                program = lib.bpf_object__find_program_by_name(self._object, name.encode())
                try:
                    if hook.hz:
                        self._links += sampling.attach(program, hook.hz)
                    elif hook.walks:
                        self._walks.append(Walk(hook.name, program))
                    else:
                        self._links.append(lb.check_pointer(lib.bpf_program__attach(program), sections[name]))
                except OSError as e:
                    why = _summary(lb.take_log(), os.strerror(e.errno or errno.EINVAL))
                    refused[hook.name].append(f"{sections[name]}: cannot attach: {why}")
                    choice[hook.name] += 1
                    return False
                self._programs[name] = lib.bpf_program__fd(program)
        loaded = {}
        for name in {p for h in self.probe.user_hooks for p in h.programs} - self._unusable.keys():
            program = lib.bpf_object__find_program_by_name(self._object, name.encode())
            loaded[name] = Program(program, sections[name])
            self._programs[name] = lib.bpf_program__fd(program)
        if self.probe.user_hooks:
            self._user = UserHooks(self.probe.user_hooks, loaded)
        return True

    def follow(self, files: Mapping[Key, MappedFile]) -> None:
        """Attach the user hooks to the files that watched processes map now, and detach them from others."""
        if self._user is None:
            return
        self.state.files = self._user.apply(files)[:_MAX_FILES_SHOWN]
        for hook in self.probe.user_hooks:
            used = (f.by for f in self.state.files if f.hook == hook.name and f.by)
            self.state.hooks[hook.name].used = list(dict.fromkeys(used))
        if not self.probe.hooks:
            self.state.state, self.state.reason = summary(self.state.files)

    def _report(
        self, choice: Mapping[str, int], refused: Mapping[str, list[str]], sections: Mapping[str, str]
    ) -> None:
        used = {h.name: [sections[p] for p in programs] for h, programs in self._chosen(choice)}
        self.state.hooks = {
            h.name: HookState(used.get(h.name, []), refused[h.name]) for h in self.probe.hooks
        }
        for h, programs in self._chosen(choice):
            known = h.limits if self._kernel.own else {**h.limits, **h.lacks}
            self.state.hooks[h.name].lacks = sorted({known[p] for p in programs if p in known})
        self.state.hooks |= {h.name: HookState([], self._refusals(h)) for h in self.probe.user_hooks}
        whole = all(h.name in used for h in self.probe.hooks)
        self.state.state, self.state.reason = (
            ("attached", "") if whole else ("partial", "an optional hook is missing")
        )
        if not self.probe.hooks:
            self.state.state, self.state.reason = summary(self.state.files)


def _summary(log: str, otherwise: str = "no message") -> str:
    """The one line of libbpf's output that tells why: the verifier's last sentence, or the last warning."""
    unresolved = _UNRESOLVED.search(log)
    if unresolved:
        return f"no {unresolved[1]} in the kernel's BTF"
    lines = [ln.strip() for ln in log.splitlines() if ln.strip()]
    for i, line in enumerate(lines):
        if line.startswith("processed ") and i:
            return lines[i - 1][:160]
    useful = [ln for ln in lines if not ln.startswith(("--", "libbpf: --"))]
    return useful[0].removeprefix("libbpf: ")[:160] if useful else otherwise


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
            self._mapped = MappedFiles(h.library for p in self.probes for h in p.probe.user_hooks)
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

        *progress* is told of each as soon as it and those before it are done. What it raises ends it: then `close`.

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
                try:
                    for p in self.probes:
                        if p.probe.name in loading:
                            loading[p.probe.name].result()
                        progress(p.state)
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # what has not begun need not
                    raise
        finally:
            self._hooks.close()

    def attach_again(self, probe: LoadedProbe) -> None:
        """Attach a probe that was shed. Takes some tenths of a second; failure is its state."""
        hooks = HookTable(self._hooks.kernel)
        try:
            probe.attach_again(hooks)
            probe.follow(self._mapped.files)
        except PrivilegeError as e:  # given up since
            probe.close()
            probe.state.state, probe.state.reason = "failed", str(e)
        finally:
            hooks.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring that fills faster than the reader's timer; return whether one does."""
        return bool(self.maps.waiter.poll(timeout_s))

    def follow(self, tgids: Collection[int], now_s: float) -> bool:
        """Attach user hooks to what these processes, all that are watched, map now; return whether that changed.

        Call it often: it looks only at the processes that are due, see ``MappedFiles``.
        """
        changed = self._mapped.follow(tgids, now_s)
        if changed:
            for p in self.probes:
                p.follow(self._mapped.files)
        return changed

    def look_again(self, tgid: int) -> None:
        """The process executes another program: its files are others."""
        self._mapped.again(tgid)

    def event_types(self) -> list[EventType]:
        """Return the event types of every probe that was opened."""
        return [t for p in self.probes for t in p.types]

    def close(self) -> None:
        """Detach everything and free the maps."""
        with ThreadPoolExecutor(max_workers=_LOADERS) as pool:
            list(pool.map(LoadedProbe.close, self.probes))
        self.maps.close()
