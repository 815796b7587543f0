"""The life of the package in a guest with a real systemd: ``python -m tests.vm.systemd_install [--kernel 6.12]``.

install, ready, a verdict on a slowed server, reload, watchdog, stop, upgrade, remove, purge. Times go to
``build/vm/install.json``; they are of an emulated processor, so the tests hold no limit against them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.demo.procs import ROOT
from tests.vm import systemd_disk, systemd_slowing, systemd_traces
from tests.vm.image_link import GuestError
from tests.vm.systemd_guest import CommandError, Guest
from tests.vm.systemd_image import KERNELS, ImageError, image
from tests.vm.systemd_journal import Journal
from tests.vm.systemd_qemu import data_disk
from tests.vm.systemd_service import LOG, STATE, UNITS, Service

CONFIG = "/etc/whyspan/whyspan.toml"
_APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q"


class Life:
    """One run. Each method is one step, in the order of `STEPS`."""

    def __init__(self, guest: Guest, journal: Journal, versions: tuple[str, str]) -> None:
        """Take a running guest, to which nothing has been done yet."""
        self.guest, self.journal = guest, journal
        self.old, self.new = versions
        self.service = Service(guest)
        self.before: systemd_traces.Traces
        self.pid = 0

    def prepare(self) -> None:
        """Mount the second disk, start the server, and look at the guest as it is."""
        with self.journal.step("prepare"):
            self.guest.run("mount -o ro /dev/vdb /mnt")
            self.before = systemd_traces.look(self.guest)
            systemd_slowing.start(self.guest)
            self.journal.facts["guest"] = self.guest.run(
                "uname -r; . /etc/os-release; echo $PRETTY_NAME"
            ).output

    def install(self) -> None:
        """Install it with apt; both units run when apt returns."""
        command = f"{_APT} install /mnt/old.deb"
        with self.journal.step("install", "apt install ./whyspan_*.deb") as entry:
            entry["output"] = self.guest.run(command, timeout_s=3600).output[-1500:]
        with self.journal.step("ready", "systemctl status whyspan whyspan-exporter") as entry:
            self.service.wait_active()
            entry["ready_after_s"] = self.service.ready_after()
            entry["state"] = self.service.status()
            entry["bpf_programs"] = systemd_traces.programs(self.guest)
            entry["capabilities"] = self.service.capabilities()
            if entry["bpf_programs"] <= self.before.programs:
                raise CommandError("ready, and no BPF program is loaded")

    def doctor(self) -> None:
        """Ask the doctor; what it says is kept, and it must be able to say it."""
        with self.journal.step("doctor", "whyspan doctor") as entry:
            done = self.guest.run("whyspan doctor", check=False, timeout_s=900)
            entry["status"], entry["output"] = done.status, done.output[-6000:]
            if "Traceback" in done.output:
                raise CommandError(done.output[-2000:])

    def verdict(self) -> None:
        """Configure the server as an admin does, slow it, and read the verdict."""
        with self.journal.step("healthy") as entry:
            healthy_ms, ratio = systemd_slowing.calibrate(self.guest)
            entry |= {"healthy_ms": healthy_ms, "cpu_ratio": round(ratio, 3)}
        with self.journal.step("configure", "systemctl reload whyspan"):
            systemd_slowing.configure(self.guest, CONFIG, 2 * healthy_ms + 100)
            self.guest.run("systemctl reload whyspan")
            self.guest.until(
                f"whyspan slow --all --json --service {systemd_slowing.SERVICE} | grep -q trace_id"
            )
        with self.journal.step("verdict", "whyspan slow; whyspan explain") as entry:
            systemd_slowing.quota(self.guest, ratio / 2)
            rows = systemd_slowing.wait_slowed(self.guest)
            entry["fault"] = f"CPUQuota of {systemd_slowing.UNIT}: {systemd_slowing.throttled(self.guest)}"
            systemd_slowing.quota(self.guest, None)
            found = systemd_slowing.causes(rows)
            entry["causes"] = dict(found)
            if found.most_common(1)[0][0] != systemd_slowing.CAUSE:
                raise CommandError(f"the verdicts are {dict(found)}, not {systemd_slowing.CAUSE}")
            sample = next(r for r in rows if r["verdict"]["cause"] == systemd_slowing.CAUSE)
            entry["explained"] = self.guest.run(f"whyspan explain {sample['trace_id']}").output[:4000]

    def reload(self) -> None:
        """A changed key is taken over by the same process; a broken file is refused, and changes nothing."""
        with self.journal.step("reload", "systemctl reload whyspan") as entry:
            self.pid = self.service.main_pid()
            self.guest.run(f"sed -i 's/^e2e_ms = .*/e2e_ms = 123456/' {CONFIG}")
            self.guest.run("systemctl reload whyspan")
            self.service.wait_active()
            entry["log"] = self.guest.run(f"{LOG} -u whyspan -n 6").output
            self.service.check_process(self.pid)
        with self.journal.step("reload of a broken file", "systemctl reload whyspan") as entry:
            self.guest.run(f"cp {CONFIG} /tmp/good.toml; echo 'nonsense = [' >> {CONFIG}")
            done = self.guest.run("systemctl reload whyspan", check=False)
            entry["status"] = done.status
            entry["log"] = self.guest.run(f"{LOG} -u whyspan -n 6").output
            self.guest.run(f"cp /tmp/good.toml {CONFIG}; rm /tmp/good.toml; systemctl reset-failed")
            if not done.status:
                raise CommandError("a broken file was taken")
            self.service.wait_active()
            self.service.check_process(self.pid)

    def watchdog(self) -> None:
        """Stop the collector with SIGSTOP: systemd kills it, and starts it anew."""
        with self.journal.step("watchdog", "kill -STOP $(systemctl show -P MainPID whyspan)") as entry:
            programs = systemd_traces.programs(self.guest)
            self.pid = self.service.main_pid()
            self.guest.run(f"kill -STOP {self.pid}")
            entry["killed_after_s"] = round(
                self.guest.until("test $(systemctl show -P NRestarts whyspan) -ge 1").seconds, 1
            )
            self.service.wait_active()
            entry["log"] = self.guest.run(
                f"{LOG} -u whyspan | grep -iE 'watchdog|killed|restart' | tail -5"
            ).output
            if self.service.main_pid() == self.pid or "atchdog" not in entry["log"]:
                raise CommandError(f"the watchdog did not restart it: {entry['log']}")
            entry["bpf_programs"] = [programs, systemd_traces.programs(self.guest)]

    def stop(self) -> None:
        """Stop both in order, within their own limit: systemd says if it had to kill."""
        with self.journal.step("stop", "systemctl stop whyspan") as entry:
            entry["took_s"] = round(self.guest.run("systemctl stop whyspan", timeout_s=120).seconds, 1)
            entry["results"] = shown = self.service.wait_stopped()
            left = systemd_traces.look(self.guest)
            if shown != ["ExecMainStatus=0 Result=success"] * len(UNITS):
                raise CommandError(f"not an orderly stop: {shown}")
            if left.processes or left.programs > self.before.programs:
                raise CommandError(f"left by a stop: {left.processes}, {left.programs} BPF programs")
            self.guest.run("systemctl start whyspan", timeout_s=900)
            self.service.wait_active()

    def upgrade(self) -> None:
        """Install a newer version: the admin's configuration, the store and what was learnt stay."""
        keep = "--option Dpkg::Options::=--force-confold"
        with self.journal.step("upgrade", "apt install ./whyspan_NEWER.deb") as entry:
            self.guest.run(f"echo '# mine' >> {CONFIG}")
            stored, self.pid = self.service.stored(), self.service.main_pid()
            kept = self.guest.run(
                f"cd {STATE} && find . -type f -not -name '*-wal' -not -name '*-shm'"
            ).output
            self.guest.run(f"{_APT} {keep} install /mnt/new.deb", timeout_s=3600)
            self.service.wait_active()
            version = self.guest.run("dpkg-query -W -f '${Version}' whyspan").output
            after = self.guest.run(f"cd {STATE} && find . -type f").output.splitlines()
            entry |= {
                "version": version,
                "stored": [stored, self.service.stored()],
                "kept": kept.splitlines(),
            }
            self.guest.run(f"grep -qx '# mine' {CONFIG} && ! grep -q '{systemd_disk.NEWER_LINE}' {CONFIG}")
            if version != self.new:
                raise CommandError(f"version {version}, not {self.new}")
            if missing := set(kept.splitlines()) - set(after):
                raise CommandError(f"lost by the upgrade: {missing}")
            if self.service.stored() < stored or self.service.main_pid() == self.pid:
                raise CommandError(
                    f"after the upgrade {self.service.stored()} of {stored} requests, process {self.service.main_pid()}"
                )

    def remove(self) -> None:
        """Remove it: nothing runs; the configuration and the store stay. Purge it: nothing is left."""
        systemd_slowing.stop(self.guest)
        with self.journal.step("remove", "apt remove whyspan"):
            self.guest.run(f"{_APT} remove whyspan", timeout_s=900)
            left = systemd_traces.look(self.guest)
            if left.processes or left.programs > self.before.programs:
                raise CommandError(f"left by a removal: {left.processes}, {left.programs} BPF programs")
            self.guest.run(f"test -e {CONFIG} && test -e {STATE}/whyspan.db && ! test -e /usr/lib/whyspan")
        with self.journal.step("purge", "apt purge whyspan") as entry:
            self.guest.run(f"{_APT} purge whyspan && {_APT} autoremove --purge", timeout_s=900)
            entry["left"] = systemd_traces.look(self.guest).left_since(self.before)
            if entry["left"]:
                raise CommandError(f"left by a purge: {entry['left'][:20]}")


STEPS = (
    Life.prepare,
    Life.install,
    Life.doctor,
    Life.verdict,
    Life.reload,
    Life.watchdog,
    Life.stop,
    Life.upgrade,
    Life.remove,
)


def run(kernel: str, deb: Path | None = None) -> None:
    """Live through all steps in a guest, with that package or the newest in dist/.

    Raises:
        CommandError, GuestError: a step failed.
        ImageError: there is no image, and none can be made.
        PackageError: there is no package.
    """
    deb = deb or systemd_disk.package()
    journal = Journal(kernel)
    journal.facts["package"] = deb.name
    with tempfile.TemporaryDirectory(prefix="whyspan-guest-data-") as folder:
        versions = systemd_disk.fill(Path(folder), deb)
        console = ROOT / "build" / "vm" / f"install-{kernel}.log"
        with data_disk(Path(folder)) as data, Guest(image(), kernel, console=console, data=data) as guest:
            life = Life(guest, journal, versions)
            try:
                for step in STEPS:
                    step(life)
            except CommandError:
                journal.facts["log"] = guest.run(f"{LOG} -o short -u 'whyspan*' -n 80", check=False).output
                raise
    journal.passed()


def main() -> int:
    """Run it in the kernels named, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm.systemd_install", description=__doc__)
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="default: all")
    parser.add_argument("--deb", type=Path, help="the package; default: the newest in dist/")
    arguments = parser.parse_args()
    for kernel in arguments.kernel or KERNELS:
        try:
            run(kernel, arguments.deb)
        except (CommandError, GuestError, ImageError, systemd_disk.PackageError) as e:
            print(f"{kernel}: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
