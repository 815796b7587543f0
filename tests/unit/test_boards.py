"""Boards, alert rules and provisioning as committed: up to date, well-formed, and every panel says what it is."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from whyspan_dashboards import alerts, links, sources
from whyspan_dashboards.files import generated
from whyspan_exporters.metrics.catalogue import by_series
from whyspan_exporters.metrics.naming import label_name

from tests.boards import boards, schemas

BOARDS = boards.boards()
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in boards.panels(board)]


def test_committed_files_are_up_to_date() -> None:
    made = generated()
    stale = [n for n, text in made.items() if (boards.FOLDER / n).read_text(encoding="utf-8") != text]
    assert stale == [], "run .venv/bin/python dashboards/generate.py"
    kept = {p.relative_to(boards.FOLDER).as_posix() for p in (boards.GRAFANA / "boards").iterdir()}
    assert kept <= set(made)


def test_another_address_of_the_runbooks() -> None:
    for name, text in generated("https://wiki.example/x").items():
        assert links.RUNBOOKS not in text, name


@pytest.mark.parametrize("name", BOARDS)
def test_board_is_what_the_sdk_reads(name: str) -> None:
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(BOARDS[name]), cls=JSONEncoder))
    assert again == BOARDS[name]


def test_there_are_five_boards() -> None:
    assert [b["title"] for b in BOARDS.values()] == [
        "Why is the tail slow?",
        "One service",
        "Host and GPU",
        "KV cache",
        "The agent itself",
    ]
    assert len({b["uid"] for b in BOARDS.values()}) == 5
    assert all(len(b["uid"]) <= 40 and "id" not in b for b in BOARDS.values())


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=[f"{n}:{p['title']}" for n, p in PANELS])
def test_panel_says_what_it_is(name: str, panel: Any) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert defaults["thresholds"]["steps"]
    assert panel["datasource"]["uid"] in ("${metrics}", "${traces}")
    assert all(t["datasource"] == panel["datasource"] for t in panel["targets"])
    assert panel["type"] not in ("timeseries", "heatmap") or panel["maxDataPoints"] == boards.max_points()
    (runbook,) = panel["links"]
    page, _, section = runbook["url"].removeprefix("${runbooks}/").partition("#")
    assert (boards.RUNBOOKS / page).is_file()
    assert not section or section in boards.anchors(boards.RUNBOOKS / page), runbook["url"]


@pytest.mark.parametrize("name", BOARDS)
def test_titles_and_places_are_unique(name: str) -> None:
    found = list(boards.panels(BOARDS[name]))
    assert max(Counter(p["title"] for p in found).values()) == 1
    ids = [p["id"] for p in BOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)
    assert min(ids) > 0
    cells = [
        (x, y)
        for p in found
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_used_and_known(name: str) -> None:
    text = json.dumps(BOARDS[name])
    for variable in BOARDS[name]["templating"]["list"]:
        assert f"${variable['name']}" in text or f"${{{variable['name']}}}" in text, variable["name"]
        assert variable["type"] in ("datasource", "constant") or variable["description"]
    for query in boards.panel_queries():
        assert "$" not in query.text, query


def test_links_between_boards_lead_to_one() -> None:
    uids = {b["uid"] for b in BOARDS.values()}
    found = [link["url"] for _, p in PANELS for link in p["fieldConfig"]["defaults"].get("links", ())]
    assert found
    assert {urlsplit(url).path.removeprefix("/d/") for url in found} <= uids


def test_queries_read_metrics_that_there_are() -> None:
    known = by_series()
    for query in boards.promql():
        for metric in boards.metrics_of(query.text):
            assert metric in known or f"{metric}_count" in known, (query.where, metric)


def test_legends_name_labels_of_their_metric() -> None:
    known = by_series()
    everywhere = {"le", "host_name", "instance"}
    for query in boards.promql():
        metrics = boards.metrics_of(query.text)
        labels = {label_name(a) for m in metrics for a in (known.get(m) or known[f"{m}_count"]).attributes}
        assert set(boards.label_names(query.legend)) <= labels | everywhere, query


def test_only_the_gpu_is_exempt() -> None:
    """What may stay empty on this machine is what its catalogue says that nothing fills."""
    exempt = {m for m, i in by_series().items() if i.only}
    assert exempt == boards.NEEDS_HARDWARE


def test_every_alert_is_in_both_files_and_has_its_pages() -> None:
    prometheus = {r["alert"]: r for r in boards.rules()}
    (group,) = boards.provisioning("alerting")["groups"]
    grafana = {r["title"]: r for r in group["rules"]}
    assert set(prometheus) == set(grafana) == {a.name for a in alerts.ALERTS}
    index = (boards.RUNBOOKS / "README.md").read_text(encoding="utf-8")
    for a in alerts.ALERTS:
        page = boards.RUNBOOKS / f"{a.page}.md"
        assert f"**{a.name}**" in page.read_text(encoding="utf-8"), a.name
        assert a.name in index
        for rule in (prometheus[a.name], grafana[a.name]):
            assert rule["annotations"]["runbook_url"] == f"{links.RUNBOOKS}/{a.page}.md"
            assert rule["for"] == a.for_
        assert a.board in {b["uid"] for b in BOARDS.values()}
        query, threshold = (step["model"] for step in grafana[a.name]["data"])
        assert prometheus[a.name]["expr"] == f"({query['expr']}) {a.op} {a.limit:g}"
        assert threshold["conditions"][0]["evaluator"] == {
            "type": {">": "gt", "<": "lt"}[a.op],
            "params": [a.limit],
        }
    # Grafana would take "$x" in a provisioning file for an environment variable.
    assert "$" not in json.dumps(group)


def test_alert_uids_are_unique_and_short() -> None:
    (group,) = boards.provisioning("alerting")["groups"]
    uids = [r["uid"] for r in group["rules"]]
    assert len(set(uids)) == len(uids)
    assert max(map(len, uids)) <= 40


@pytest.mark.parametrize("kind", ["datasources", "dashboards", "alerting"])
def test_provisioning_by_its_schema(kind: str) -> None:
    schemas.check_provisioning(kind, boards.provisioning(kind))


def test_schema_refuses_a_wrong_key() -> None:
    wrong = boards.provisioning("datasources")
    wrong["datasources"][1]["jsonData"]["tracesToMetric"] = {}
    with pytest.raises(ValueError, match="tracesToMetric"):
        schemas.check_provisioning("datasources", wrong)


def test_sources_lead_to_each_other() -> None:
    prometheus, tempo = boards.provisioning("datasources")["datasources"]
    (exemplar,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplar == {"name": sources.TRACE_LABEL, "datasourceUid": tempo["uid"]}
    assert tempo["jsonData"]["tracesToMetrics"]["datasourceUid"] == prometheus["uid"]
    for query in tempo["jsonData"]["tracesToMetrics"]["queries"]:
        assert "$$__tags" in query["query"]
    (group,) = boards.provisioning("alerting")["groups"]
    used = {d["datasourceUid"] for r in group["rules"] for d in r["data"]}
    assert used == {prometheus["uid"], "__expr__"}


def test_compose_file_by_its_schema() -> None:
    schemas.check_compose(boards.FOLDER / "compose.yaml")


def test_every_panel_with_exemplars_is_of_a_metric_that_has_some() -> None:
    for _, panel in PANELS:
        for target in panel["targets"]:
            if target.get("exemplar"):
                metrics = boards.metrics_of(target["expr"])
                assert all(m.startswith(("gen_ai_server_", "whyspan_cause_")) for m in metrics), panel[
                    "title"
                ]
