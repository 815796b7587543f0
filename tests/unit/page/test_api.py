"""The questions: filters reach the store, mistakes are one line, a store that cannot be read is said so."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whyspan import clock
from whyspan.errors import ConfigError
from whyspan.page import api
from whyspan.page.params import ListQuery, parse, wanted

from tests.unit import viewlab
from tests.unit.page.conftest import Client
from tests.unit.viewlab import Written

NOW = 1_800_000_000_000_000_000


def test_every_view_answers(client: Client, small: Written) -> None:
    c = client()
    rows = c.get("/api/requests", params={"slow": "true", "limit": 1000}).json()
    assert rows["total"] == len(rows["rows"]) > 20
    one = c.get(f"/api/requests/{rows['rows'][0]['id']}").json()
    assert one["row"] == rows["rows"][0]
    assert one["lanes"] and one["path"]
    assert "chat" in c.get("/api/facets").json()["services"]
    assert c.get("/api/tail", params={"since": "10m"}).json()["requests"] > 0
    host = c.get("/api/host", params={"since": "10m"}).json()
    assert host["probes"] and host["series"]


@pytest.mark.parametrize(("ago_s", "running"), [(0, True), (60, False)])
def test_health_says_whether_the_collector_was_heard_lately(
    client: Client, tmp_path: Path, ago_s: int, running: bool
) -> None:
    now = clock.now_unix_ns() - ago_s * 1_000_000_000
    store = viewlab.build(tmp_path / "s.db", 3, hours=0.05, now_unix_ns=now)
    assert client(store.path).get("/api/health").json() == {"collector": running}


def test_filters_reach_the_store(client: Client) -> None:
    c = client()
    everything: list[dict[str, Any]] = c.get("/api/requests", params={"limit": 1000}).json()["rows"]
    assert {r["slow"] for r in everything} == {True, False}

    def ids(**params: Any) -> set[str]:
        return {r["id"] for r in c.get("/api/requests", params=params | {"limit": 1000}).json()["rows"]}

    def expected(keep: Any) -> set[str]:
        return {r["id"] for r in everything if keep(r)}

    assert ids(slow="true") == expected(lambda r: r["slow"] or r["failed"])
    assert ids(slow="false") == expected(lambda r: not (r["slow"] or r["failed"]))
    assert ids(failed="true") == expected(lambda r: r["failed"])
    assert ids(service="chat", cause="cpu") == expected(
        lambda r: r["service"] == "chat" and r["cause"].split(".")[0] == "cpu"
    )
    middle = sorted(r["latency_ms"] for r in everything)[len(everything) // 2]
    assert ids(min_ms=middle) == expected(lambda r: r["latency_ms"] >= middle)
    assert ids(max_ms=middle) == expected(lambda r: r["latency_ms"] < middle)
    assert ids(since="0s") == set()
    assert ids(service="<script>window.owned=1</script>") and not ids(service="none")
    assert ids(service="", cause="", since="", until="") == ids()


def test_pages_go_through_all(client: Client) -> None:
    c = client()
    seen: list[str] = []
    cursor = ""
    for _ in range(100):
        page = c.get("/api/requests", params={"limit": 7, "sort": "latency", "cursor": cursor}).json()
        seen += [r["id"] for r in page["rows"]]
        cursor = page["next"]
        if not cursor:
            break
    assert len(seen) == len(set(seen)) == page["total"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/requests?limit=0", "limit"),
        ("/api/requests?limit=10001", "limit"),
        ("/api/requests?limit=x", "limit"),
        ("/api/requests?limit=1&limit=2", "limit is given twice"),
        ("/api/requests?nothing=1", "nothing"),
        ("/api/requests?sort=1%3Bdrop", "drop"),
        ("/api/requests?order=up", "up"),
        ("/api/requests?cursor=AAAA", "cursor"),
        ("/api/requests?since=yesterday", "since"),
        ("/api/requests?since=2026-02-31T00:00:00Z", "is not a time"),
        ("/api/requests?since=" + "1" * 60 + "s", "since"),
        ("/api/requests?min_ms=-1", "min_ms"),
        ("/api/requests?min_ms=nan", "min_ms"),
        ("/api/requests?min_ms=1e999", "min_ms"),
        ("/api/requests?slow=perhaps", "slow"),
        ("/api/requests?slow=", "slow"),
        ("/api/requests?service=%ff", "cannot be read"),
        ("/api/requests?service=" + "x" * 600, "service"),
        ("/api/requests?" + "&".join(f"p{i}=1" for i in range(50)), "cannot be read"),
        ("/api/tail?step=-1", "step"),
        ("/api/health?x", "x"),
    ],
)
def test_mistakes_are_one_line(client: Client, path: str, says: str) -> None:
    found = client().get(path)
    assert found.status_code == 400
    error = found.json()["error"]
    assert says in error and "\n" not in error and len(error) <= 400


def test_what_is_not_there(client: Client) -> None:
    found = client().get("/api/requests/none-1")
    assert (found.status_code, found.json()["error"][:30]) == (404, "there is no request none-1 in ")
    assert client().get("/api/requests?" + "x" * 9000).status_code == 400


def test_a_store_that_cannot_be_read(client: Client, tmp_path: Path) -> None:
    c = client(store=tmp_path / "s.db")
    assert c.get("/").status_code == 200
    found = c.get("/api/requests")
    assert (found.status_code, found.json()["error"][:17]) == (503, "there is no store")
    (tmp_path / "s.db").write_bytes(b"no database" * 1000)
    assert c.get("/api/requests").status_code == 503
    (tmp_path / "s.db").unlink()
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    found = c.get("/api/requests")
    assert (found.status_code, "version 99" in found.json()["error"]) == (503, True)


def test_work_has_a_deadline(client: Client, small: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client().get("/api/requests").status_code == 200
    monkeypatch.setattr(api, "DEADLINE_S", 1e-9)
    monkeypatch.setattr("whyspan_exporters.reader.STEPS", 1)
    found = client().get("/api/requests")
    assert (found.status_code, found.json()["error"]) == (503, "not answered within 1e-09 s: ask for less")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_any_query_is_understood_or_refused(query: str) -> None:
    try:
        found = parse(ListQuery, query)
        assert wanted(found, NOW).since_unix_ns >= 0
    except ConfigError as exc:
        assert str(exc)
