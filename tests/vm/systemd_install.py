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
from tests.vm import systemd_disk
from tests.vm.image_link import GuestError
from tests.vm.systemd_guest import CommandError, Guest, PatchingError
from tests.vm.systemd_image import KERNELS, ImageError, image
from tests.vm.systemd_journal import Journal
from tests.vm.systemd_life import STEPS, Life
from tests.vm.systemd_qemu import data_disk
from tests.vm.systemd_service import LOG

_ATTEMPTS = 3


def run(kernel: str, deb: Path | None = None) -> None:
    """Live through all steps in a guest, with that package or the newest in dist/.

    Raises:
        CommandError, GuestError: a step failed.
        ImageError: there is no image, and none can be made.
        PackageError: there is no package.
    """
    deb = deb or systemd_disk.package()
    for attempt in range(1, _ATTEMPTS + 1):
        journal = Journal(kernel)
        journal.facts |= {"package": deb.name, "attempt": attempt}
        try:
            _live(kernel, deb, journal)
        except PatchingError as e:
            if attempt == _ATTEMPTS:
                raise
            print(f"{kernel}: once more: {e}", file=sys.stderr)
        else:
            journal.passed()
            return


def _live(kernel: str, deb: Path, journal: Journal) -> None:
    with tempfile.TemporaryDirectory(prefix="whyspan-guest-data-") as folder:
        versions = systemd_disk.fill(Path(folder), deb)
        console = ROOT / "build" / "vm" / f"install-{kernel}.log"
        with data_disk(Path(folder)) as data, Guest(image(), kernel, console=console, data=data) as guest:
            life = Life(guest, journal, versions)
            try:
                for step in STEPS:
                    step(life)
            except CommandError:
                journal.note(log=guest.run(f"{LOG} -o short -u 'whyspan*' -n 80", check=False).output)
                raise


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
