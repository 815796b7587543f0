"""One alternative of each hook of a probe, and what a kernel may say for not having it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from whyspan_probes.probe import Hook
from whyspan_probes.registry import Found

#: Reasons that are the kernel's own, as ``HookTable`` words them.
_KERNELS_OWN = re.compile(
    r": (this kernel (has no|refuses such programs)|no tracepoint|tracefs is not mounted|the kernel has no)"
)
#: Programs whose arguments are those of some kernels only: the verifier refuses them on others.
_BY_SIGNATURE = re.compile(r"^(\w+_switch_(tp|tp3|raw|raw3)|reclaim_victim_\w+): refused at load")


def alternatives(found: Found) -> int:
    """The most alternatives that a hook of this probe has."""
    return max((len(h.alternatives) for h in found.probe.hooks), default=0)


def forced(found: Found, n: int) -> Found:
    """The probe with each hook by its *n*-th alternative or not at all; hooks that have no such one as ever."""

    def hook(h: Hook) -> Hook:
        if n >= len(h.alternatives):
            return dataclasses.replace(h, required=False)
        return dataclasses.replace(h, alternatives=(h.alternatives[n],), required=False)

    probe = dataclasses.replace(found.probe, hooks=tuple(map(hook, found.probe.hooks)))
    return Found(probe, found.object_path)


def is_the_kernels(reason: str) -> bool:
    """Whether a refusal is for what the kernel lacks, rather than for what a program does."""
    return any(p.search(reason) for p in (_KERNELS_OWN, _BY_SIGNATURE))


@dataclasses.dataclass
class Row:
    """What became of one alternative of one hook. ``seen`` and ``expected`` are counts of what its events say."""

    probe: str
    hook: str
    alternative: int
    sections: list[str]
    attached: bool
    reason: str = ""
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_report(rows: list[Row]) -> None:
    """Write them to the file that ``WHYSPAN_VM_REPORT`` names, if it does."""
    path = os.environ.get("WHYSPAN_VM_REPORT")
    if path:
        report = {"kernel": os.uname().release, "rows": [dataclasses.asdict(r) for r in rows]}
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
