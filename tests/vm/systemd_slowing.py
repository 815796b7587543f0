"""In the guest: the demo's server under load, slowed by a CPU quota of its unit, and what whyspan says of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from tests.vm.systemd_guest import CommandError, Guest

UNIT, SERVICE, PORT = "chat.service", "chat", 8000
CAUSE = "cpu.throttled"
#: Few requests: an emulated processor has about a tenth of a real one's time, for server, client and agent together.
RATE = 1.0
_HEALTHY, _SLOWED = 12, 4
_WAIT_S = 1800.0
_CLIENT = "/tmp/client.jsonl"
_SERVER = f"""[Unit]
Description=The demo's server
[Service]
Environment=PYTHONPATH=/mnt/demo PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.demo.server --port {PORT} --workers 8
CPUAccounting=yes
StandardOutput=null
StandardError=null
"""
#: What an admin adds to the sections of the file: which unit is a server, and from when on a request is slow. And that
#: every request is explained, since the test counts them; and budgets, since the same work is many times the part of an
#: emulated core that it is of a real one.
_KEYS = {
    "targets": f'auto = false\\nmatch = [{{ unit = "{UNIT}", service = "{SERVICE}" }}]',
    "slo": "e2e_ms = %d",
    "collector": "explain_per_s = 100\\nexplain_core_ratio = 2\\nordinary_per_s = 5\\n"
    "budget_core_ratio = 1.0\\nbudget_target_ratio = 1.0",
}


def start(guest: Guest) -> None:
    """Start the server as a unit, and a client with requests at a steady rate."""
    guest.run(
        f"cat > /etc/systemd/system/{UNIT} <<'END'\n{_SERVER}END\nsystemctl daemon-reload; systemctl start {UNIT}"
    )
    probe = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/healthz', timeout=20)"
    guest.until(f'python3 -c "{probe}"', timeout_s=_WAIT_S)
    guest.run(
        "systemd-run -q --unit=client --setenv=PYTHONPATH=/mnt/demo --setenv=PYTHONDONTWRITEBYTECODE=1 "
        f"/usr/bin/python3 -m tests.demo.load --port {PORT} --rate {RATE} --connections 4 --out {_CLIENT}"
    )


def calibrate(guest: Guest) -> tuple[int, float]:
    """Return what a healthy request takes at most, in ms, and the part of a CPU that the server uses."""
    wait_sent(guest, 3)
    begin, used = time.monotonic(), _usage_s(guest)
    sent = wait_sent(guest, 3 + _HEALTHY)
    ratio = (_usage_s(guest) - used) / (time.monotonic() - begin)
    return int(max(s["end_ns"] - s["start_ns"] for s in sent[3:]) / 1e6), ratio


def wait_sent(guest: Guest, count: int) -> list[dict[str, Any]]:
    """Wait until the client has had so many answers; return all.

    Raises:
        CommandError: one of them is no 200, or they do not come.
    """
    guest.until(f"test $(wc -l < {_CLIENT}) -ge {count}", timeout_s=_WAIT_S)
    sent = [json.loads(line) for line in guest.run(f"cat {_CLIENT}").output.splitlines()]
    if bad := [s for s in sent if s["status"] not in (0, 200)]:
        raise CommandError(f"the server answers {bad[0]['status']}")
    return sent


def configure(guest: Guest, file: str, e2e_ms: int) -> None:
    """Edit the shipped configuration, whose keys are comments."""
    edits = " ".join(f"-e '/^\\[{section}\\]$/a {keys}'" for section, keys in _KEYS.items())
    guest.run(f"sed -i {edits % e2e_ms} {file}")


def quota(guest: Guest, ratio: float | None) -> None:
    """Give the unit a quota, as an admin does; None takes it away."""
    text = "" if ratio is None else f"{max(1, round(ratio * 100))}%"
    guest.run(f"systemctl set-property --runtime {UNIT} CPUQuota={text}")


def slowed(guest: Guest, *, cause: str = "") -> list[dict[str, Any]]:
    """Return the requests that whyspan calls slow, newest first."""
    option = f"--cause {cause}" if cause else ""
    rows: list[dict[str, Any]] = json.loads(
        guest.run(f"whyspan slow --json --service {SERVICE} --limit 1000 {option} 2>/dev/null").output or "[]"
    )
    return rows


def wait_slowed(guest: Guest) -> list[dict[str, Any]]:
    """Wait for the first verdicts; return the slow requests of all causes.

    Raises:
        CommandError: none came.
    """
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        rows = slowed(guest)
        if sum(r["verdict"]["cause"] == CAUSE for r in rows) >= _SLOWED or len(rows) >= 10 * _SLOWED:
            return rows
        time.sleep(5.0)  # each look is the start of a process
    raise CommandError(f"only {len(slowed(guest))} slow requests; {_throttled(guest)}")


def causes(rows: list[dict[str, Any]]) -> Counter[str]:
    """Count the causes of some requests."""
    return Counter(r["verdict"]["cause"] for r in rows)


def stop(guest: Guest) -> None:
    """End the client and the server, and remove the unit."""
    guest.run(
        f"systemctl stop client {UNIT}; systemctl reset-failed; rm -f /etc/systemd/system/{UNIT} {_CLIENT}; "
        "systemctl daemon-reload"
    )


def _stat(guest: Guest) -> dict[str, int]:
    text = guest.run(f"cat /sys/fs/cgroup/system.slice/{UNIT}/cpu.stat").output
    return {k: int(v) for k, v in (line.split() for line in text.splitlines())}


def _usage_s(guest: Guest) -> float:
    return _stat(guest)["usage_usec"] / 1e6


def _throttled(guest: Guest) -> str:
    return f"throttled in {_stat(guest).get('nr_throttled', 0)} periods"


def throttled(guest: Guest) -> str:
    """Return the kernel's own word for the fault: it must have bitten.

    Raises:
        CommandError: it has not.
    """
    if _stat(guest).get("nr_throttled", 0) < 3:
        raise CommandError(f"the quota did not bite: {_throttled(guest)}")
    return _throttled(guest)
