"""Where links lead: runbook pages, other boards, a trace in Tempo."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

#: Where `docs/runbooks` can be read; `generate.py --runbooks URL` writes another one.
RUNBOOKS: Final = "https://github.com/whyspan/whyspan/blob/main/docs/runbooks"
#: Boards take it from this variable, so that an installation can point to its own copy.
RUNBOOKS_VARIABLE: Final = "runbooks"
TAG: Final = "whyspan"


def runbook(page: str) -> DashboardLink:
    """Return the link of a panel to *page*: a file's name without ``.md``, perhaps with ``#section``."""
    name, _, section = page.partition("#")
    url = f"${{{RUNBOOKS_VARIABLE}}}/{name}.md" + (f"#{section}" if section else "")
    return (
        DashboardLink("Runbook")
        .type(DashboardLinkType.LINK)
        .url(url)
        .target_blank(True)
        .icon("doc")
        .tooltip("What this means and what to do")
    )


def board(title: str, uid: str, variables: str) -> DashboardLink:
    """Return a data link to another board at the same time, with *variables* of its URL."""
    url = f"/d/{uid}?${{__url_time_range}}&{variables}"
    return DashboardLink(title).type(DashboardLinkType.LINK).url(url)


def all_boards() -> DashboardLink:
    """Return the list of whyspan's boards at the top of each."""
    return (
        DashboardLink("whyspan")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .keep_time(True)
        .include_vars(False)
        .icon("external link")
        .tooltip("")
        .url("")
        .target_blank(False)
    )


#: Two clicks from "P99 is up" to the cause: a service's name leads to its own board.
TO_SERVICE: Final = ("This service", "whyspan-service", "var-service=${__field.labels.whyspan_service}")
TO_HOST: Final = ("This host", "whyspan-host", "var-host=${__field.labels.host_name}")
