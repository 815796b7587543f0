"""Every query of every panel, link, alert and variable has an answer with the labels that it shows.

Filled by the real agent: Prometheus scrapes it, VictoriaMetrics gets OTLP. An empty answer is a failure, but for
metrics of hardware that this machine lacks (`boards.NEEDS_HARDWARE`): these must be empty.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.boards import boards, world
from tests.boards.boards import Query
from tests.boards.world import Filled

pytestmark = [pytest.mark.boards, pytest.mark.bpf]
STORES = ("prometheus", "victoriametrics")
QUERIES = boards.promql()
LIVE = [q for q in QUERIES if not boards.needs_hardware(q.text)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    # In the checkout's file system pytest keeps the folder of a failed run.
    return world.fill(Path(tmp_path_factory.mktemp("boards")))


@pytest.mark.timeout(400)  # the first waits for the agent, the faults and the stores
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("query", LIVE, ids=[q.where for q in LIVE])
def test_query_has_an_answer(query: Query, store: str, filled: Filled) -> None:
    assert (store, query.where) not in filled.errors
    series = filled.answers[store, query.where]
    assert series, query.text
    # What only some series have is shown as empty by the others: the overflow series, a request without a model.
    for label in boards.label_names(query.legend):
        assert any(label in labels for labels in series), (label, query.text)
    assert all("__name__" not in labels for labels in series), (
        "a raw series: its labels differ between stores"
    )


@pytest.mark.parametrize("store", STORES)
def test_hardware_that_is_not_here(store: str, filled: Filled) -> None:
    found = [q for q in QUERIES if boards.needs_hardware(q.text)]
    assert found
    assert {q.where: filled.answers[store, q.where] for q in found if filled.answers[store, q.where]} == {}
    assert not [q.where for q in found if (store, q.where) in filled.errors]


@pytest.mark.parametrize("query", LIVE, ids=[q.where for q in LIVE])
def test_both_ways_give_the_same_labels(query: Query, filled: Filled) -> None:
    """Scraped or sent by OTLP, the boards see the same."""
    names = [{name for labels in filled.answers[store, query.where] for name in labels} for store in STORES]
    # The scrape's own label; by OTLP it is service.instance.id, which VictoriaMetrics leaves under that name.
    assert names[0] - {"instance"} == names[1] - {"instance"}


def test_exemplars_lead_to_traces(filled: Filled) -> None:
    assert filled.causes
    assert filled.causes <= filled.traces
    every = frozenset[str]().union(*filled.exemplars.values())
    assert all(re.fullmatch("[0-9a-f]{32}", trace_id) for trace_id in every)
    # Histograms also show ordinary requests whose caller traces them: the trace is the caller's.
    assert every <= filled.traces | filled.sent


@pytest.mark.parametrize("where", [q.where for q in boards.exemplar_queries()])
def test_panel_has_exemplars(where: str, filled: Filled) -> None:
    assert filled.exemplars[where]
