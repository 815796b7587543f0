"""What the page's modules say again that the server says: they agree."""

from __future__ import annotations

import re
from pathlib import Path

from whyspan import page
from whyspan.causes import rules
from whyspan.page import api
from whyspan.page.params import ListQuery, parse
from whyspan.views import links as further
from whyspan.views import shapes
from whyspan_dashboards import links
from whyspan_exporters.listing import FACETS, ORDERS, SORTS

ASSETS = Path(page.__file__).with_name("assets")


def listed(module: str, constant: str) -> list[str]:
    """Return the texts in a list of a module."""
    found = re.search(rf"\b{constant} = [^\[]*\[(.*?)\]", (ASSETS / module).read_text(), re.S)
    assert found is not None
    return re.findall(r'"([^"]*)"', found[1])


def test_every_cause_has_a_family_with_a_colour() -> None:
    families = listed("colours.js", "FAMILIES")
    pools = listed("colours.js", "POOLS")
    ids = {rule.id for rule in rules()}
    assert set(pools) < ids
    assert {i.split(".")[0] for i in ids - set(pools)} <= set(families)


def test_what_the_list_asks_for_is_understood() -> None:
    for sort in {*SORTS, *listed("views/rows.js", "SORTS")}:
        for order in ORDERS:
            assert parse(ListQuery, f"sort={sort}&order={order}").sort == sort
    for outcome in listed("views/requests.js", "OUTCOMES"):
        assert parse(ListQuery, f"outcome={outcome}").outcome == outcome
    assert set(FACETS) <= set(ListQuery.__struct_fields__)


def test_the_rest_of_the_causes_has_one_name() -> None:
    assert f'OTHER = "{shapes.OTHER}"' in (ASSETS / "views/tailparts.js").read_text()


def test_the_page_waits_for_the_servers_own_limits() -> None:
    found = re.search(r"TIMEOUT_MS = ([\d_]+);", (ASSETS / "api.js").read_text())
    assert found is not None
    assert int(found[1]) > (api.PATIENCE_S + api.DEADLINE_S) * 1e3


def test_runbooks_are_where_the_boards_say_and_there() -> None:
    assert further.RUNBOOKS == links.RUNBOOKS + "/{runbook}.md"
    docs = Path(page.__file__).parents[3] / "docs" / "runbooks"
    assert all((docs / f"{name}.md").is_file() for _, name in further._RUNBOOK_OF)
