"""The two units in a guest, as systemd, the kernel and the store show them."""

from __future__ import annotations

import re

from tests.vm.systemd_guest import CommandError, Done, Guest

UNITS = ("whyspan.service", "whyspan-exporter.service")
STATE = "/var/lib/whyspan"
LOG = "journalctl --no-pager -o cat"
#: What the units allow a real processor. An emulated one, of a busy machine, needs more to start and to stop; the
#: watchdog's time is the unit's own.
_STRETCHED = "[Service]\nTimeoutStartSec=1200\nTimeoutStopSec=120\n"
_ACTIVE_S = 1800.0
_RELOAD_S = 600.0


class Service:
    """Both units of one guest."""

    def __init__(self, guest: Guest) -> None:
        """Take a running guest."""
        self.guest = guest

    def stretch(self) -> None:
        """Give both units more time, by drop-ins as an admin writes them; before they are there."""
        for unit in UNITS:
            folder = f"/etc/systemd/system/{unit}.d"
            self.guest.run(f"mkdir -p {folder}; printf '{_STRETCHED}' > {folder}/emulated.conf")

    def wait_active(self) -> None:
        """Wait until both units run, and are ready.

        Raises:
            CommandError: one of them failed or does not come up; the text has the end of their logs.
        """
        # One by one: of several, `is-active` is content with any. One that has failed for good is not waited for.
        active = " && ".join(f"systemctl is-active {unit}" for unit in UNITS)
        ended = " || ".join(f"systemctl is-failed {unit}" for unit in UNITS)
        try:
            self.guest.until(f"{active} || {ended}", timeout_s=_ACTIVE_S)
            self.guest.run(active)
        except CommandError as e:
            log = self.guest.run(f"{LOG} -u whyspan -u whyspan-exporter -n 30", check=False).output
            raise CommandError(f"{e}\n{log}") from None

    def reload(self, times: int = 1) -> Done:
        """Reload both as an admin does, at once again if *times* says so; return how it went.

        Raises:
            CommandError: it does not come to an end; the text says what systemd waits for.
        """
        try:
            again = f"for _ in $(seq {times}); do systemctl reload whyspan || exit 1; done"
            return self.guest.run(again, timeout_s=_RELOAD_S, check=False)
        except CommandError as e:
            shown = "systemctl list-jobs --no-pager; systemctl status --no-pager whyspan whyspan-exporter"
            raise CommandError(f"{e}\n{self.guest.run(shown, check=False).output}") from None

    def wait_stopped(self) -> list[str]:
        """Wait until neither runs; return how each ended: ``Result`` and ``ExecMainStatus``.

        Raises:
            CommandError: one of them still runs.
        """
        # A unit that systemd had to kill is "failed".
        self.guest.until(
            " && ".join(f"systemctl show -P ActiveState {u} | grep -qE 'inactive|failed'" for u in UNITS)
        )
        shown = [
            self.guest.run(f"systemctl show -p Result -p ExecMainStatus {unit}").output for unit in UNITS
        ]
        return [" ".join(sorted(text.split())) for text in shown]

    def status(self) -> str:
        """What systemd says of both, in a line each."""
        shown = "systemctl show -P ActiveState -P SubState -P StatusText"
        return "; ".join(f"{u}: {' '.join(self.guest.run(f'{shown} {u}').output.split())}" for u in UNITS)

    def ready_after(self) -> dict[str, float]:
        """Seconds from the start of each unit's process until it was ready, by the guest's clock."""
        found = {}
        for unit in UNITS:
            names = "-p ExecMainStartTimestampMonotonic -p ActiveEnterTimestampMonotonic"
            begin, ready = sorted(
                map(int, re.findall(r"=(\d+)", self.guest.run(f"systemctl show {names} {unit}").output))
            )
            found[unit] = round((ready - begin) / 1e6, 1)
        return found

    def capabilities(self) -> dict[str, str]:
        """The user and the effective capabilities of each main process, as the kernel has them."""
        shown = "awk '/^(Uid|CapEff)/ {print $2}' /proc/$(systemctl show -P MainPID %s)/status"
        return {unit: " ".join(self.guest.run(shown % unit).output.split()) for unit in UNITS}

    def main_pid(self) -> int:
        """The collector's process."""
        return int(self.guest.run("systemctl show -P MainPID whyspan").output)

    def check_process(self, pid: int) -> None:
        """Check that the collector is still that process.

        Raises:
            CommandError: it is another.
        """
        if (now := self.main_pid()) != pid:
            raise CommandError(f"process {pid} became {now}")

    def stored(self) -> int:
        """How many requests are in the store."""
        opened = f"sqlite3.connect('file:{STATE}/whyspan.db?mode=ro', uri=True)"
        query = f"import sqlite3; print({opened}.execute('select count(*) from requests').fetchone()[0])"
        return int(self.guest.run(f'python3 -c "{query}"').output)
