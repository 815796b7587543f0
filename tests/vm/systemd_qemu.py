"""QEMU for the guest: its command line, its process, the state after a boot, and the second disk."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.vm.image_link import AgentLink, GuestError, QmpLink
from tests.vm.systemd_image import Image

BOOT_S = 5400.0  # two minutes of CPU; a busy machine takes its time
POLL_S = 0.2
_END_S = 10.0
_DATA_BYTES = 1 << 30  # sparse; the same for all guests, since the size is part of the state
#: Modules that udev would load for a device or a feature of the processor; each costs seconds where it is emulated.
_UNWANTED = (
    "ahci,i2c_i801,lpc_ich,iTCO_wdt,psmouse,pcspkr,joydev,evdev,button,intel_agp,qemu_fw_cfg,sg,aesni_intel,"
    "ghash_clmulni_intel,sha512_ssse3,sha256_ssse3,sha1_ssse3,crc32_pclmul,crct10dif_pclmul,polyval_clmulni"
)
#: Modules that systemd loads for what nobody uses here.
_UNUSED = ("drm", "dm_mod", "loop", "fuse", "efi_pstore")
#: No mitigations: they cost much where every branch is emulated, and show nothing here.
_CMDLINE = (
    "root=/dev/vda ro console=ttyS0 mitigations=off nowatchdog apparmor=0 audit=0 panic=-1 "
    f"systemd.show_status=no modprobe.blacklist={_UNWANTED},{','.join(_UNUSED)} "
    + " ".join(f"systemd.mask=modprobe@{name}.service" for name in _UNUSED)
)
#: One processor: of two emulated ones, one may run code of the kernel that the other is just patching (attaching to a
#: tracepoint, BPF_ENABLE_STATS), which ends in "Oops: int3".
_MACHINE = shlex.split(
    "-machine q35,sata=off,smbus=off,i8042=off,usb=off,vmport=off -accel tcg -cpu max,la57=off "
    "-smp 1 -m 3G -nodefaults -display none -no-user-config -device virtio-rng-pci -device virtio-serial-pci"
)


class Qemu:
    """The process, with its two sockets; killed at the end."""

    def __init__(self, image: Image, kernel: str, disk: str, data: Path, console: Path) -> None:
        """Describe it; *disk*: the options of the root disk's drive."""
        self.folder = tempfile.TemporaryDirectory(prefix="whyspan-guest-")
        place = Path(self.folder.name)
        self.agent, self.monitor, self.console = place / "agent", place / "monitor", console
        drive = "if=none,format=raw,id"
        self.argv = [
            # It ends with this process, however that ends.
            *shlex.split("setpriv --pdeathsig KILL qemu-system-x86_64"),
            *_MACHINE,
            "-no-reboot",  # a panic ends it
            *("-kernel", str(image.kernel(kernel)), "-initrd", str(image.initrd(kernel))),
            *("-append", _CMDLINE, "-serial", f"file:{console}"),
            *("-drive", f"{drive}=root,cache=unsafe,{disk}", "-device", "virtio-blk-pci,drive=root"),
            *("-drive", f"{drive}=data,snapshot=on,file={data}", "-device", "virtio-blk-pci,drive=data"),
            *("-chardev", f"socket,id=agent,path={self.agent},server=on,wait=off"),
            *("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"),
            *("-qmp", f"unix:{self.monitor},server=on,wait=off"),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start it."""
        self.console.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [*self.argv, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the test, which then ends the guest
        )

    def check_alive(self) -> None:
        """Check that it runs.

        Raises:
            GuestError: it has ended; the text has what it said.
        """
        if self.process and self.process.poll() is not None:
            assert self.process.stderr is not None
            said = self.process.stderr.read().decode(errors="replace").strip()
            raise GuestError(f"qemu ended with {self.process.returncode}: {said or self.last_words()}")

    def hit_by_patching(self) -> bool:
        """Wait a little for its end; whether the kernel died of code that was just being patched.

        An emulated processor may run it half written when there are several threads and tracepoints are switched. It is
        rare, and QEMU's doing: what ran in it may be run again.
        """
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        return self.console.exists() and "Oops: int3" in self.console.read_text(errors="replace")

    def last_words(self) -> str:
        """Return the end of what the console shows."""
        lines = self.console.read_text(errors="replace").strip().splitlines() if self.console.exists() else []
        return " | ".join(lines[-3:]) or "nothing on the console"

    def end(self) -> None:
        """Kill it, and remove its sockets."""
        if self.process:
            self.process.kill()
            self.process.communicate()
        self.folder.cleanup()


def wait_up(qemu: Qemu, link: AgentLink, timeout_s: float = BOOT_S) -> None:
    """Wait until the agent in the guest answers.

    Raises:
        GuestError: it does not in time, or QEMU has ended.
    """
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        qemu.check_alive()
        if link.synchronised():
            return
        time.sleep(POLL_S)
    raise GuestError(f"the guest took no command within {timeout_s:.0f} s: {qemu.last_words()}")


def go_on(qemu: Qemu) -> None:
    """Let it run from the state that it was started with, once it has read it.

    Raises:
        GuestError: it cannot read it, or has ended.
    """
    while True:
        qemu.check_alive()
        with contextlib.suppress(OSError), contextlib.closing(QmpLink(qemu.monitor)) as monitor:
            while (status := monitor.ask("query-status")["status"]) == "inmigrate":
                time.sleep(POLL_S)
            if status == "paused":  # as it was when the state was written
                monitor.ask("cont")
            return
        time.sleep(POLL_S)


def booted(image: Image, kernel: str) -> tuple[Path, Path]:
    """Return the state after a boot, and the disk that belongs to it; made now if they are not there yet."""
    version = subprocess.run(
        ["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    key = hashlib.sha256(repr((version, _MACHINE, _CMDLINE, _DATA_BYTES)).encode()).hexdigest()[:12]
    final = image.folder / f"booted-{kernel}-{key}"
    with (image.folder / f"booted-{kernel}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            for old in image.folder.glob(f"booted-{kernel}-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(
                prefix=".booted-", dir=image.folder, ignore_cleanup_errors=True
            ) as made:
                whole = Path(made) / "whole"
                whole.mkdir()
                _boot(image, kernel, whole)
                whole.rename(final)
    return final / "state", final / "disk.ext4"


def _boot(image: Image, kernel: str, folder: Path) -> None:
    """Boot a copy of the disk, wait until systemd has nothing left to start, and write down all that it is."""
    disk, state = folder / "disk.ext4", folder / "state"
    subprocess.run(["cp", "--sparse=always", str(image.disk), str(disk)], check=True)
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(data_disk(None))
        qemu = Qemu(image, kernel, f"file={disk}", data, folder / "console.log")
        stack.callback(qemu.end)
        qemu.start()
        link = stack.enter_context(contextlib.closing(AgentLink(qemu.agent)))
        wait_up(qemu, link)
        waits = {"path": "/bin/systemctl", "arg": ["is-system-running", "--wait"], "capture-output": True}
        pid = link.ask("guest-exec", **waits)["pid"]
        while not (done := link.ask("guest-exec-status", pid=pid))["exited"]:
            time.sleep(POLL_S)
        if done["exitcode"]:
            said = base64.b64decode(done.get("out-data", "")).decode(errors="replace").strip()
            raise GuestError(f"the guest is not well after its boot: {said}")
        monitor = stack.enter_context(contextlib.closing(QmpLink(qemu.monitor)))
        monitor.ask("stop")
        monitor.ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        monitor.ask("migrate", uri=f"exec:cat > {state}")
        while (status := monitor.ask("query-migrate")["status"]) not in ("completed", "failed"):
            qemu.check_alive()
            time.sleep(POLL_S)
        if status != "completed" or not state.stat().st_size:
            raise GuestError("the state of the guest cannot be written")
        monitor.ask("quit")
        assert qemu.process is not None
        qemu.process.wait()


@contextlib.contextmanager
def data_disk(folder: Path | None) -> Iterator[Path]:
    """Make a disk with the files of *folder* on it, or an empty one; its path holds no comma."""
    with tempfile.TemporaryDirectory(prefix="whyspan-data-") as made:
        disk = Path(made) / "data.ext4"
        with disk.open("wb") as file:
            os.truncate(file.fileno(), _DATA_BYTES)
        if folder is not None:
            mke2fs = shutil.which("mke2fs", path="/usr/sbin:/sbin") or "mke2fs"
            subprocess.run([mke2fs, "-q", "-F", "-t", "ext4", "-d", str(folder), str(disk)], check=True)
        yield disk
