"""What the package leaves in a guest: files, users, processes, BPF programs. Nothing may be left by a purge."""

from __future__ import annotations

from typing import NamedTuple

from tests.vm.systemd_guest import Guest

#: Where the system keeps books of its own: not the package's doing, and no test of it.
_BOOKS = (
    *(
        "/var/log/",
        "/var/cache/apt",
        "/var/lib/apt/",
        "/var/lib/dpkg/",
        "/tmp/",
        "/var/tmp/",
        "/root/",
        "/mnt",
    ),
    *("/var/lib/systemd/random-seed", "/var/lib/systemd/timers", "/etc/ld.so.cache", "/var/cache/ldconfig/"),
    # Copies of these files from before a change (passwd(5)), and the lock of who changes them.
    *("/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/.pwd.lock"),
)


class Traces(NamedTuple):
    """One look at the guest."""

    files: frozenset[str]
    users: frozenset[str]
    programs: int
    processes: tuple[str, ...]

    def left_since(self, before: Traces) -> list[str]:
        """Return what is there and was not, one line each."""
        return [
            *sorted(self.files - before.files),
            *sorted(f"user or group {u}" for u in self.users - before.users),
            *(f"process {p}" for p in self.processes),
            *([f"{self.programs - before.programs} BPF programs"] if self.programs > before.programs else []),
        ]


def look(guest: Guest) -> Traces:
    """Look at the guest."""
    files = guest.run("find / -xdev").output.splitlines()
    users = guest.run("getent passwd | cut -d: -f1; getent group | cut -d: -f1 | sed 's/^/group /'").output
    processes = guest.run(
        "ps -eo user:20,pid,args | grep -E '^whyspan|/usr/lib/whyspan' | grep -v grep || true"
    ).output
    return Traces(
        frozenset(f for f in files if not f.startswith(_BOOKS)),
        frozenset(users.splitlines()),
        programs(guest),
        tuple(processes.splitlines()),
    )


def programs(guest: Guest) -> int:
    """Return how many BPF programs are loaded, of whomever; systemd's own for its units are not counted."""
    return int(
        guest.run(
            "bpftool prog | grep -E '^[0-9]+:' | grep -vc -E ' cgroup_(skb|device|sock)' || true"
        ).output
    )
