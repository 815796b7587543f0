"""What pyproject.toml cannot say of whyspan's wheel: its BPF objects are for one architecture, and must be there."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelHook(BuildHookInterface[Any]):
    """Tag the wheel with the architecture, and refuse to make one with an object missing."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is made; an editable installation of a checkout is left alone.

        Raises:
            RuntimeError: an object is missing; ``make build`` makes them.
        """
        if version == "editable":
            return
        sources = list(Path(self.root, "probes/whyspan_probes").rglob("*.bpf.c"))
        missing = sorted(p.name for p in sources if not p.with_suffix(".o").exists())
        if missing or not sources:
            raise RuntimeError(
                f"no BPF object of {', '.join(missing) or 'any probe'}: run `make build` first"
            )
        build_data["pure_python"] = False
        # No interpreter's or C library's symbol is used: any Python 3, and the oldest Linux tag that pip still knows.
        build_data["tag"] = f"py3-none-manylinux_2_17_{platform.machine()}"
