"""``whyspan doctor``: what this host allows, what will attach and what will not, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whyspan.cli import _servers
from whyspan.cli._options import btf_option, config_option, console

if TYPE_CHECKING:
    from whyspan_probes.features import Features
    from whyspan_probes.kernel_btf import KernelBtf
    from whyspan_probes.state import ProbeState


@click.command(name="doctor")
@config_option
@btf_option
@click.option("--no-attach", is_flag=True, help="Only look: do not try to load and attach the probes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, config_path: Path | None, btf: Path | None, no_attach: bool, as_json: bool) -> int:
    """Check kernel, privileges and probes, and list the inference servers found.

    Exit status 0 when every probe attaches, 1 otherwise.
    """
    from whyspan_probes.features import read_features
    from whyspan_probes.state import HEALTHY

    from whyspan import cgroups
    from whyspan.config import load_config
    from whyspan.discovery import Discovery
    from whyspan.pipeline.settings import kernel_btf

    config = load_config(config_path)
    features = read_features()
    kernel = kernel_btf(str(btf) if btf else config.collector.btf)._replace(own=features.btf)
    checks = _checks(features, kernel)
    probes = _try_probes(features, kernel, attach=not no_attach)
    cgroups.join_host_namespace()
    servers = _servers.describe(Discovery(config.targets).scan()[0])
    healthy = all(ok for _, ok, _, _ in checks) and all(p.state in HEALTHY for p in probes)
    if as_json:
        report: dict[str, Any] = {
            "healthy": healthy,
            "checks": [dict(zip(("check", "ok", "found", "remedy"), c, strict=True)) for c in checks],
            "probes": [asdict(p) for p in probes],
            "engines": servers,
        }
        click.echo(json.dumps(report, indent=2))
        return 0 if healthy else 1
    _print(checks, probes, servers)
    return 0 if healthy else 1


def _checks(features: Features, kernel: KernelBtf) -> list[tuple[str, bool, str, str]]:
    """Return (check, fine, what was found, what to do)."""
    from whyspan_probes.errors import LibbpfMissingError
    from whyspan_probes.features import kernel_version
    from whyspan_probes.libbpf import libbpf

    try:
        lib = libbpf()
        library = f"{lib.libbpf_major_version()}.{lib.libbpf_minor_version()}"
        remedy = ""
    except LibbpfMissingError as e:
        library, remedy = "", str(e)
    version = kernel_version(features.kernel)
    capabilities = ", ".join(sorted(features.capabilities)) or "none"
    return [
        ("kernel", version >= (5, 17), features.kernel, "bpf_loop needs Linux 5.17 or newer"),
        (
            "BTF",
            bool(kernel.source),
            kernel.source or "none",
            "a kernel with CONFIG_DEBUG_INFO_BTF, or --btf FILE",
        ),
        (
            "lockdown",
            features.lockdown != "confidentiality",
            features.lockdown or "not readable",
            "boot without lockdown=confidentiality",
        ),
        (
            "tracefs",
            bool(features.tracefs),
            features.tracefs or "not mounted",
            "mount -t tracefs tracefs /sys/kernel/tracing",
        ),
        (
            "process ids",
            features.host_pids,
            "the host's" if features.host_pids else "those of a PID namespace",
            "run this container with --pid=host (hostPID: true)",
        ),
        ("capabilities", features.may_load, capabilities, "run as root, or grant CAP_BPF and CAP_PERFMON"),
        ("libbpf", bool(library), library or "none", remedy),
    ]


def _try_probes(features: Features, kernel: KernelBtf, *, attach: bool) -> list[ProbeState]:
    from whyspan_probes.errors import ProbeFrameworkError
    from whyspan_probes.features import HookTable
    from whyspan_probes.loader import Session, program_sections
    from whyspan_probes.registry import discover
    from whyspan_probes.state import HookState, ProbeState

    found = discover()
    if attach and features.may_load:
        try:
            session = Session(found, 1 << 20, kernel)
            try:
                session.attach()
                return [p.state for p in session.probes]
            finally:
                session.close()
        except (ProbeFrameworkError, OSError) as e:
            reason = str(e)
    else:
        reason = "not tried" if features.may_load else "no privilege to load programs"
    table = HookTable(kernel)
    states = []
    for f in found:
        state = ProbeState(f.probe.name, f.probe.title, f.probe.cost.value, "unknown", reason)
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
        states.append(state)
    table.close()
    return states


def _print(
    checks: list[tuple[str, bool, str, str]], probes: list[ProbeState], servers: list[dict[str, Any]]
) -> None:
    from rich.table import Table

    out = console()
    table = Table("check", "", "found", "to do", box=None, pad_edge=False)
    for name, ok, found, remedy in checks:
        table.add_row(name, "ok" if ok else "NO", found, "" if ok else remedy)
    out.print(table)
    out.print()
    table = Table("probe", "state", "attached by", "why not", box=None, pad_edge=False)
    for p in probes:
        used = ", ".join(dict.fromkeys(s for h in p.hooks.values() for s in h.used))
        refused = [r for h in p.hooks.values() for r in h.refused]
        # A failed probe's reason repeats its hooks' refusals.
        reasons = refused if any(r in p.reason for r in refused) else [p.reason, *refused]
        reasons += [lack for h in p.hooks.values() for lack in h.lacks]
        table.add_row(p.name, p.state, used, "; ".join(dict.fromkeys(filter(None, reasons))))
    out.print(table)
    out.print()
    if not servers:
        out.print("no inference server found; name one with `whyspan run --pid` or --comm, --unit, --cgroup")
    else:
        out.print(_servers.table(servers))
