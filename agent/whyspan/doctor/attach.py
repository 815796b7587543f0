"""What becomes of each probe: by attaching all of them for a moment, or by asking which hooks there are."""

from __future__ import annotations

from collections.abc import Iterable

from whyspan_probes.features import Features
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.registry import Found
from whyspan_probes.state import HEALTHY, HookState, ProbeState

from whyspan.doctor.check import Check, Subject

_RING_BYTES = 1 << 20
NOT_TRIED = "not tried"
#: Without these there is no critical path, or no request.
_ESSENTIAL = frozenset({"sched", "sockets"})


def states(found: list[Found], features: Features, kernel: KernelBtf, *, attach: bool) -> list[ProbeState]:
    """Return the state of each probe; of those that were not tried it is unknown, with why.

    Where the kernel refuses everything, all have failed.
    """
    from whyspan_probes.errors import ProbeFrameworkError
    from whyspan_probes.loader import Session

    reason = NOT_TRIED if features.may_load else "no privilege to load programs"
    if attach and features.may_load:
        try:
            session = Session(found, _RING_BYTES, kernel)
            try:
                session.attach()
                return [p.state for p in session.probes]
            finally:
                session.close()
        except (ProbeFrameworkError, OSError) as e:
            return _expected(found, kernel, "failed", str(e))
    return _expected(found, kernel, "unknown", reason)


def _expected(found: Iterable[Found], kernel: KernelBtf, name: str, reason: str) -> list[ProbeState]:
    from whyspan_probes.errors import ProbeFrameworkError
    from whyspan_probes.features import HookTable
    from whyspan_probes.loader import program_sections

    table = HookTable(kernel)
    out = []
    for f in found:
        state = ProbeState(f.probe.name, f.probe.title, f.probe.cost.value, name, reason)
        try:
            sections = program_sections(f.object_path)
            for hook in f.probe.hooks:
                why = [table.missing(sections[p]) for alternative in hook.alternatives for p in alternative]
                state.hooks[hook.name] = HookState([], [w for w in why if w])
            for user in f.probe.user_hooks:
                why = [table.missing(sections[program]) for program in user.programs]
                state.hooks[user.name] = HookState([], [w for w in why if w])
        except (ProbeFrameworkError, KeyError) as e:
            state.reason = str(e)
        out.append(state)
    table.close()
    return out


def checks(states: Iterable[ProbeState]) -> list[Check]:
    """Judge them: one for each probe."""
    return [_probe(s) for s in states]


def _probe(s: ProbeState) -> Check:
    it = Subject(f"probe.{s.name}", s.name)
    if s.state in HEALTHY:
        lacks = list(dict.fromkeys(lack for h in s.hooks.values() for lack in h.lacks))
        if lacks:
            return it.limited(
                s.state, "; ".join(lacks), "boot a kernel that has the probe's first choice of hook"
            )
        return it.ok(s.state)
    if s.state == "unknown" and s.reason == NOT_TRIED:
        return it.note(reasons(s), "run doctor without --no-attach")
    if s.state == "unknown":
        return it.unknown(reasons(s), "run doctor as root")
    if s.name in _ESSENTIAL and s.state == "failed":
        return it.failed(f"failed: {reasons(s)}", "requests, or their paths: nothing can be told", _remedy(s))
    return it.limited(f"{s.state}: {reasons(s)}", s.title, _remedy(s))


def _remedy(s: ProbeState) -> str:
    text = reasons(s)
    if "not built" in text:
        return "install the package, or run make build in a checkout"
    if "not permitted" in text or "EPERM" in text or "Permission" in text:
        return "run as root, or see the capabilities and seccomp above"
    if "--btf" in text or "BTF" in text:
        return "boot a kernel with BTF, or name its BTF by --btf FILE"
    return "boot a newer kernel, or one built with this hook"


def reasons(s: ProbeState) -> str:
    """Return why a probe does less than it could, each reason once."""
    refused = [r for h in s.hooks.values() for r in h.refused]
    # A failed probe's reason repeats its hooks' refusals.
    found = refused if any(r in s.reason for r in refused) else [s.reason, *refused]
    found += [lack for h in s.hooks.values() for lack in h.lacks]
    return "; ".join(dict.fromkeys(filter(None, found)))
