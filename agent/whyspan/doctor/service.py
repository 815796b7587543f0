"""Whether the agent runs: its systemd units, and what it last said of itself."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan.doctor.check import Check, Subject

UNITS: Final = ("whyspan.service", "whyspan-exporter.service")
_PROPERTIES: Final = "Id,LoadState,ActiveState,SubState,Result,NRestarts,UnitFileState,StatusText,MainPID"
_SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)
_TIMEOUT_S: Final = 5.0


class ServiceFacts(NamedTuple):
    """``units`` has the properties of each unit by name; empty with a reason in ``problem``.

    ``said`` is the collector's state, as new as seconds, empty when no agent runs.
    """

    units: Mapping[str, Mapping[str, str]]
    problem: str
    said: Mapping[str, Any]

    @property
    def collector(self) -> int:
        """The process id of the running collector, 0 for none."""
        main = self.units.get(UNITS[0], {}).get("MainPID", "0")
        told = self.said.get("tgid", 0)
        return told if isinstance(told, int) and told > 0 else int(main) if main.isdigit() else 0


def gather(store: Path) -> ServiceFacts:
    """Ask systemd, if it runs this host, and the store."""
    units, problem = _units()
    return ServiceFacts(units, problem, _said(store))


def _units() -> tuple[dict[str, dict[str, str]], str]:
    if not _SYSTEMD.is_dir():
        return {}, "this host, or container, does not run systemd"
    command = ["systemctl", "show", f"--property={_PROPERTIES}", *UNITS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return {}, f"systemctl: {e.strerror if isinstance(e, OSError) else 'no answer in time'}"
    if done.returncode:
        return {}, f"systemctl: {(done.stderr.splitlines() or ['failed'])[0]}"
    return parse(done.stdout), ""


def parse(shown: str) -> dict[str, dict[str, str]]:
    """Return what ``systemctl show`` printed, by unit."""
    out = {}
    for block in shown.split("\n\n"):
        values = {k: v for k, is_one, v in (line.partition("=") for line in block.splitlines()) if is_one}
        if values.get("Id"):
            out[values["Id"]] = values
    return out


def _said(store: Path) -> dict[str, Any]:
    from whyspan_exporters.reader import Reader

    from whyspan.errors import StoreError

    try:
        reader = Reader(store)
        try:
            return reader.status()
        finally:
            reader.close()
    except StoreError:
        return {}


def checks(f: ServiceFacts) -> list[Check]:
    """Judge them."""
    return [*(_unit(name, f) for name in UNITS), _agent(f)]


def _unit(name: str, f: ServiceFacts) -> Check:
    it = Subject(f"service.{name.removesuffix('.service').replace('-', '_')}", name)
    if f.problem:
        return it.note(f.problem)
    unit = f.units.get(name, {})
    if unit.get("LoadState", "not-found") == "not-found":
        return it.note("not installed", "apt install ./whyspan_*.deb; whyspan run needs no unit")
    found = f"{unit.get('ActiveState')} ({unit.get('SubState')})"
    found += f": {unit['StatusText']}" if unit.get("StatusText") else ""
    if unit.get("LoadState") == "masked":
        return it.note("masked", f"systemctl unmask {name}")
    match unit.get("ActiveState"):
        case "active" | "reloading":
            restarts = unit.get("NRestarts", "0")
            if restarts.isdigit() and int(restarts):
                return it.note(f"{found}; restarted {restarts} times", f"journalctl -u {name} -p warning")
            return it.ok(found)
        case "activating":
            return it.note(found, f"journalctl -u {name} -e")
        case "failed":
            return it.failed(
                f"{found}, {unit.get('Result')}", "nothing is observed", f"journalctl -u {name} -e"
            )
    return it.note(found, f"systemctl enable --now {UNITS[0]}")


def _agent(f: ServiceFacts) -> Check:
    it = Subject("service.agent", "running agent")
    if not f.said:
        return it.note("none has reported in the last seconds", "systemctl start whyspan, or whyspan run")
    probes = f.said.get("probes")
    watched = f.said.get("watched")
    count = len(watched) if isinstance(watched, list) else 0
    found = f"process {f.said.get('tgid')}, {count} processes watched"
    states = [p for p in probes if isinstance(p, dict)] if isinstance(probes, list) else []
    if shed := [str(p.get("name")) for p in states if p.get("state") == "shed"]:
        return it.limited(
            f"{found}; shed for their cost: {', '.join(shed)}",
            "what these probes see, until they are attached anew",
            "raise collector.budget_core_ratio or budget_target_ratio, then systemctl reload whyspan",
        )
    return it.ok(found)
