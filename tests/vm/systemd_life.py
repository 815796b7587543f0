"""The steps of the package's life in a guest: each does what an admin does, and checks what came of it."""

from __future__ import annotations

from tests.vm import systemd_disk, systemd_slowing, systemd_traces
from tests.vm.systemd_guest import CommandError, Guest
from tests.vm.systemd_journal import Journal
from tests.vm.systemd_service import LOG, STATE, UNITS, Service

CONFIG = "/etc/whyspan/whyspan.toml"
#: Nothing is written for good in a guest that is thrown away: no fsync for each file.
_APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Dpkg::Options::=--force-unsafe-io"


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
        """Mount the second disk, and look at the guest as it is."""
        with self.journal.step("prepare"):
            self.guest.run("mount -o ro /dev/vdb /mnt")
            self.service.stretch()
            self.before = systemd_traces.look(self.guest)
            self.journal.facts["guest"] = self.guest.run(
                "uname -r; . /etc/os-release; echo $PRETTY_NAME"
            ).output

    def install(self) -> None:
        """Install it with apt; both units run when apt returns.

        Without what is recommended: unpacking a compiler takes an emulated processor a quarter of an hour.
        """
        command = f"{_APT} --no-install-recommends install /mnt/old.deb"
        with self.journal.step("install", "apt install ./whyspan_*.deb") as entry:
            entry["output"] = self.guest.run(command, timeout_s=3600).output[-1500:]
            # At once: what fails to start is tried again, and its log is gone with a guest that panics.
            entry["log"] = self.guest.run(f"{LOG} -o short -u 'whyspan*' -n 60", check=False).output
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
            done = self.guest.run("whyspan doctor", check=False)
            entry["status"], entry["output"] = done.status, done.output[-6000:]
            if "Traceback" in done.output:
                raise CommandError(done.output[-2000:])

    def verdict(self) -> None:
        """Configure the server as an admin does, slow it, and read the verdict."""
        with self.journal.step("healthy") as entry:
            systemd_slowing.start(self.guest)
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
        systemd_slowing.stop(self.guest)

    def reload(self) -> None:
        """A changed key is taken over by the same process; a broken file is refused, and changes nothing."""
        with self.journal.step("reload", "systemctl reload whyspan") as entry:
            self.pid = self.service.main_pid()
            self.guest.run(f"sed -i 's/^e2e_ms = .*/e2e_ms = 123456/' {CONFIG}")
            entry["status"] = self.service.reload().status
            # systemd waits for the signal to be sent, not for what it does.
            self.guest.until(f"{LOG} -u whyspan | grep -q 'reloaded: .*slo.e2e_ms'", timeout_s=600)
            self.service.wait_active()
            entry["log"] = self.guest.run(f"{LOG} -u whyspan -n 6").output
            self.service.check_process(self.pid)
        with self.journal.step("reload again and again", "systemctl reload whyspan") as entry:
            entry["status"] = self.service.reload(times=3).status
            if entry["status"]:
                raise CommandError("a reload failed that came while another was under way")
            self.service.wait_active()
            self.service.check_process(self.pid)
        with self.journal.step("reload of a broken file", "systemctl reload whyspan") as entry:
            self.guest.run(f"cp {CONFIG} /tmp/good.toml; echo 'nonsense = [' >> {CONFIG}")
            done = self.service.reload()
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
            restarts = int(self.guest.run("systemctl show -P NRestarts whyspan").output)
            self.guest.run(f"kill -STOP {self.pid}")
            restarted = f"test $(systemctl show -P NRestarts whyspan) -gt {restarts}"
            entry["killed_after_s"] = round(self.guest.until(restarted).seconds, 1)
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
            entry["took_s"] = round(self.guest.run("systemctl stop whyspan").seconds, 1)
            entry["results"] = shown = self.service.wait_stopped()
            left = systemd_traces.look(self.guest)
            if shown != ["ExecMainStatus=0 Result=success"] * len(UNITS):
                raise CommandError(f"not an orderly stop: {shown}")
            if left.processes or left.programs > self.before.programs:
                raise CommandError(f"left by a stop: {left.processes}, {left.programs} BPF programs")
            self.guest.run("systemctl start whyspan")
            self.service.wait_active()

    def upgrade(self) -> None:
        """Install a newer version: the admin's configuration, the store and what was learnt stay."""
        keep = "-o Dpkg::Options::=--force-confold"
        with self.journal.step("upgrade", "apt install ./whyspan_NEWER.deb") as entry:
            self.guest.run(f"echo '# mine' >> {CONFIG}")
            stored, self.pid = self.service.stored(), self.service.main_pid()
            kept = self.guest.run(
                f"cd {STATE} && find . -type f -not -name '*-wal' -not -name '*-shm'"
            ).output
            self.guest.run(f"{_APT} --no-install-recommends {keep} install /mnt/new.deb", timeout_s=3600)
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
        with self.journal.step("remove", "apt remove whyspan"):
            self.guest.run(f"{_APT} remove whyspan")
            left = systemd_traces.look(self.guest)
            if left.processes or left.programs > self.before.programs:
                raise CommandError(f"left by a removal: {left.processes}, {left.programs} BPF programs")
            self.guest.run(f"test -e {CONFIG} && test -e {STATE}/whyspan.db && ! test -e /usr/lib/whyspan")
        with self.journal.step("purge", "apt purge whyspan") as entry:
            self.guest.run(f"{_APT} purge whyspan && {_APT} autoremove --purge")
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
