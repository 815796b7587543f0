"""The package in a guest with a real systemd, from `apt install` to `apt purge`, and a right verdict in between."""

from __future__ import annotations

import os

import pytest

from tests.vm import systemd_image, systemd_install

pytestmark = [pytest.mark.vm, pytest.mark.slow]

SMOKE = os.environ.get("WHYSPAN_VM_SMOKE", "") not in ("", "0")
CHOSEN = os.environ.get("WHYSPAN_VM_KERNELS", "").split() or (
    ["6.12"] if SMOKE else list(systemd_image.KERNELS)
)


@pytest.mark.timeout(3 * 3600)  # an emulated processor on a busy machine
@pytest.mark.parametrize("kernel", CHOSEN)
def test_the_package_lives_and_leaves_nothing(kernel: str) -> None:
    if reason := systemd_image.lacking():
        pytest.skip(reason)
    systemd_install.run(kernel)
