"""The tier ``bpf`` on stock Debian kernels, each in a guest: `make test-vm` (``KERNEL=6.1``, ``SMOKE=1``)."""

from __future__ import annotations

import os

import pytest

from tests.vm import tier
from tests.vm.kernels import SERIES

pytestmark = pytest.mark.vm

SMOKE = os.environ.get("WHYSPAN_VM_SMOKE", "") not in ("", "0")
CHOSEN = os.environ.get("WHYSPAN_VM_KERNELS", "").split() or (["6.12"] if SMOKE else list(SERIES))


@pytest.mark.timeout(tier.TIMEOUT_S[SMOKE] + 900)  # the kernel may have to be fetched, the disk made
@pytest.mark.parametrize("series", CHOSEN)
def test_the_tier_bpf_on_a_stock_kernel(series: str, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        print(flush=True)
        wrong = tier.run_guest(series, smoke=SMOKE, show=lambda text: print(text, end="", flush=True))
    assert not wrong, "\n".join(wrong)
