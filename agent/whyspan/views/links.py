"""Where to look further from a request: its trace, the runbook of its cause, the requests that are to blame."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from whyspan_exporters.reader import Reader, Stored

from whyspan.model import Finding
from whyspan.text import clean
from whyspan.views.shapes import Link

#: Where the runbooks are that come with this whyspan.
RUNBOOKS: Final = "https://github.com/whyspan/whyspan/blob/main/docs/runbooks/{runbook}.md"
_MAX_NAME: Final = 1000  # characters
_MAX_LINKS: Final = 6
_MAX_CULPRITS: Final = 50  # of which the store is asked for a request

_RUNBOOK_OF: Final = (
    (re.compile(r"cpu\.throttled$"), "throttled"),
    (re.compile(r"engine\.(kv_|prefix_)"), "kv"),
    (re.compile(r"engine\."), "service"),
    (re.compile(r"gpu\."), "gpu"),
    (re.compile(r"[a-z]+\."), "host"),
)


def elsewhere(f: Finding, judged: bool, trace_url: str, runbook_url: str) -> list[Link]:
    """Return links to the request's trace and to the runbook of its cause; *judged*: it has a verdict.

    The addresses as in `whyspan.views.request.find`.
    """
    out = []
    if trace_url and _is_trace(f.request.trace_id):
        href = trace_url.replace("{trace_id}", f.request.trace_id)
        out.append(Link(kind="trace", label="trace", href=href))
    name = next((book for of, book in _RUNBOOK_OF if of.match(f.verdict.cause)), "") if judged else ""
    if name:
        href = (runbook_url or RUNBOOKS).replace("{runbook}", quote(name))
        out.append(Link(kind="runbook", label=f"runbook: {name}", href=href))
    return out


def neighbours(reader: Reader, stored: Stored) -> list[Link]:
    """Return links to the requests that are to blame, as far as they are in the store.

    Raises:
        StoreError: The store cannot be read.
    """
    v = stored.finding.verdict
    out: dict[str, Link] = {}
    for culprit in (v.culprit, *(o.culprit for o in v.others[:_MAX_CULPRITS])):
        if not _is_trace(culprit.trace_id) or len(out) >= _MAX_LINKS:
            continue
        found = reader.of_trace(culprit.trace_id)
        if found and found != stored.id:
            label = f"request {clean(culprit.name, _MAX_NAME)}".strip()
            out.setdefault(found, Link(kind="request", label=label, href=found))
    return list(out.values())


def _is_trace(trace_id: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", trace_id) is not None
