"""A disk image of Debian 12 with a real systemd, in which the package is installed; made once and cached.

``python -m tests.vm.systemd_image`` makes it beforehand (root, network; 3 min, 1.8 GB).

It holds what a plain server has, two kernels (the release's own and the one of its backports) and QEMU's guest agent,
by which a test runs commands in it. There is no network in the guest: what the package depends on or recommends lies
in a local apt repository of the image, and is *not* installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.engine.install import cache
from tests.roots import Source, sources

SUITE = "bookworm"
#: The kernels, by the name that tests use: the suite that apt takes ``linux-image-amd64`` from.
KERNELS = {"6.1": SUITE, "6.12": f"{SUITE}-backports"}
TOOLS = ("debootstrap", "qemu-system-x86_64", "mke2fs")
_PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"

_SYSTEM = "systemd,systemd-sysv,udev,dbus,kmod,procps,init,initramfs-tools,apt-utils,python3,ca-certificates"
#: qemu-guest-agent: runs the test's commands; bpftool: the test looks for leftovers with it.
_TESTS = ("qemu-guest-agent", "bpftool")
#: Not installed: for apt to find when it installs the package.
_OFFERED = ("python3-bpfcc", "adduser", "libstdc++6", "python3-venv")
_REPOSITORY = "var/local/packages"
_FILES = {
    "etc/fstab": "/dev/vda / ext4 defaults,noatime 0 1\n",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
    # Only what this machine's one disk needs: the boot is emulated, and every module costs.
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\n",
    "etc/initramfs-tools/conf.d/whyspan": "MODULES=list\nCOMPRESS=gzip\n",
    # A later index would ask for a network.
    "etc/apt/apt.conf.d/90offline": 'APT::Periodic::Enable "0";\nAcquire::Languages "none";\n',
}
_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
)
_IMAGE_BYTES = 6 << 30  # sparse


class ImageError(Exception):
    """The image cannot be made here; the text says why, in one line."""


class Image(NamedTuple):
    """The image's files; none is ever changed once made."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The root disk: ext4, no partition table."""
        return self.folder / "disk.ext4"

    def kernel(self, name: str) -> Path:
        """Return the kernel of that name (a key of `KERNELS`)."""
        return self.folder / f"vmlinuz-{name}"

    def initrd(self, name: str) -> Path:
        """Return the first file system of that kernel."""
        return self.folder / f"initrd-{name}"


def lacking() -> str:
    """Why an image cannot be made or run here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root: debootstrap makes devices and changes owners"
    for tool in TOOLS:
        if shutil.which(tool, path=_PATH) is None:
            return f"needs {tool}: `make test-vm` installs it"
    if not sources():
        return "apt knows no Debian archive to make a guest from"
    return ""


def image() -> Image:
    """Return the image, made now if it is not there yet; another process that makes it is waited for.

    Raises:
        ImageError: it is not there and cannot be made.
    """
    final = cache() / "images" / f"{SUITE}-{_recipe()}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f"{SUITE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            if reason := lacking():
                raise ImageError(reason)
            with tempfile.TemporaryDirectory(
                prefix=f".{SUITE}-", dir=final.parent, ignore_cleanup_errors=True
            ) as made:
                whole = Path(made) / "image"
                whole.mkdir()
                _make(Path(made) / "root", whole, sources()[0])
                whole.rename(final)  # what is there is whole
            for old in final.parent.glob(f"{SUITE}-*"):
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)
    return Image(final)


def _recipe() -> str:
    text = repr((SUITE, KERNELS, _SYSTEM, _TESTS, _OFFERED, _FILES, _MASKED, _IMAGE_BYTES, 1))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _make(root: Path, whole: Path, source: Source) -> None:
    keys = [f"--keyring={source.keyring}"] if source.keyring else []
    _run(["debootstrap", "--variant=minbase", f"--include={_SYSTEM}", *keys, SUITE, str(root), source.uri])
    for name, text in _FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "etc/machine-id").write_text("uninitialized\n")
    suites = (SUITE, f"{SUITE}-updates", KERNELS["6.12"])
    (root / "etc/apt/sources.list").write_text("".join(f"deb {source.uri} {s} main\n" for s in suites))
    with _mounted(root):
        _chroot(root, "apt-get update -q")
        for name, suite in KERNELS.items():
            _install(root, "linux-image-amd64", f"-t {suite}")
            version = _newest(root / "boot", "vmlinuz-", name)
            shutil.copy(root / "boot" / f"vmlinuz-{version}", whole / f"vmlinuz-{name}")
            shutil.copy(root / "boot" / f"initrd.img-{version}", whole / f"initrd-{name}")
        _install(root, " ".join(_TESTS))
        _offer(root)
        _chroot(root, f"systemctl mask {' '.join(_MASKED)} getty@tty1.service")
        _chroot(root, "passwd -q -d root")
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
    _run(
        [
            "mke2fs",
            "-q",
            "-t",
            "ext4",
            "-L",
            "root",
            "-d",
            str(root),
            str(whole / "disk.ext4"),
            str(_IMAGE_BYTES >> 10),
        ]
    )


def _offer(root: Path) -> None:
    """Put what may be installed later into a local repository, and make it apt's only source."""
    _chroot(root, f"apt-get install -q -y --download-only --no-install-recommends {' '.join(_OFFERED)}")
    place = root / _REPOSITORY
    place.mkdir(parents=True)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        shutil.move(package, place / package.name)
    _chroot(root, f"cd /{_REPOSITORY} && apt-ftparchive packages . > Packages")
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:/{_REPOSITORY} ./\n")
    shutil.rmtree(root / "var/lib/apt/lists")
    _chroot(root, "apt-get update -q")


def _install(root: Path, packages: str, options: str = "") -> None:
    _chroot(root, f"apt-get install -q -y --no-install-recommends {options} {packages} && apt-get clean")


def _newest(folder: Path, prefix: str, series: str) -> str:
    """The newest kernel of a series (6.1, 6.12) in /boot: of two builds of one series the later written."""
    found = list(folder.glob(f"{prefix}{series}.*"))
    if not found:
        raise ImageError(f"apt installed no kernel {series}")
    return max(found, key=lambda p: p.stat().st_mtime).name.removeprefix(prefix)


@contextlib.contextmanager
def _mounted(root: Path) -> Iterator[None]:
    """What maintainer scripts look at: /proc, /sys and /dev; and no service is started by them."""
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(policy.unlink)
        for kind, name in (("proc", "proc"), ("sysfs", "sys"), ("devtmpfs", "dev")):
            _run(["mount", "-t", kind, kind, str(root / name)])
            stack.callback(_run, ["umount", "-l", str(root / name)])
        yield


def _chroot(root: Path, command: str) -> None:
    _run(["chroot", str(root), "/bin/sh", "-c", command])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, "PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        check=False,
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        raise ImageError(f"{' '.join(argv)[:100]}: {last[0]}")


def main() -> int:
    """Make the image."""
    try:
        print(image().folder)
    except ImageError as e:
        print(f"image: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
