"""Which phase of a request its cause struck."""

from __future__ import annotations

from typing import Final

from whyspan.model import Finding

#: Of a request there are about six; a finding that others made could have any number.
_MAX_PHASES: Final = 64


def of_cause(finding: Finding) -> str:
    """Return the phase of most of a slow request's cause, else ttft or stream; empty when neither is known."""
    spent: dict[str, int] = {}
    for s in finding.segments if finding.slow and finding.phases else ():
        if s.cause != finding.verdict.cause:
            continue
        for p in finding.phases[:_MAX_PHASES]:
            shared_ns = min(s.end_ns, p.end_ns) - max(s.start_ns, p.start_ns)
            if shared_ns > 0:
                spent[p.name] = spent.get(p.name, 0) + shared_ns
    return max(spent, key=lambda name: spent[name]) if spent else finding.phase
