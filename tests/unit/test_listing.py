"""Lists of requests out of the store: filters, order, pages, facets; also of stores of before."""

from __future__ import annotations

import base64
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.errors import QueryError
from whyspan.model import Culprit, EngineFacts, Finding
from whyspan_exporters import schema
from whyspan_exporters.filters import Filter
from whyspan_exporters.listed import Listed
from whyspan_exporters.listing import FACETS, SORTS
from whyspan_exporters.reader import Reader
from whyspan_exporters.records import Explained
from whyspan_exporters.store import Store

from tests.unit.viewcases import EVIL

MakeFinding = Callable[..., Finding]
NOW = 1_800_000_000_000_000_000
COUNT = 97
S = 1_000_000_000


def explained(make: MakeFinding, n: int) -> Explained:
    """Return the *n*-th of requests that differ in everything that a list shows, with many ties."""
    rng = random.Random(n)
    f = make(
        n,
        slow=n % 3 != 0,
        cause=rng.choice(("cpu.throttled", "cpu.runqueue", "cpuset", "io.log_blocked", "unknown")),
        service=rng.choice(("chat", "embed", "%")),
        route=rng.choice(("/a", "/b")),
        tenant=rng.choice(("", "acme", "globex")),
        outcome=rng.choice(("ok", "ok", "error", "reset")),
        status=rng.choice((200, 429)),
        first_ns=0 if n % 5 == 0 else 1_000_000_000 * (n + 1) + n % 7 * 1_000_000,
    )
    f.wall_ns = n % 10 * 10_000_000
    f.verdict.excess_ms = float(n % 4)
    f.verdict.culprit = Culprit(kind="process", name=rng.choice(("", "etl", "cron")))
    f.engine = EngineFacts(model=rng.choice(("llama", ""))) if n % 2 else None
    return Explained(f"i-{n}", NOW + n % 50 * S, f)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Explained]]]:
    from tests.unit.conftest import build_finding

    path = tmp_path_factory.mktemp("listing") / "s.db"
    records = [explained(build_finding, n) for n in range(COUNT)]
    write(path, records)
    yield path, records


@pytest.fixture(scope="module")
def reader(made: tuple[Path, list[Explained]]) -> Iterator[Reader]:
    opened = Reader(made[0])
    yield opened
    opened.close()


def write(path: Path, records: list[Explained]) -> None:
    store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: NOW)
    store.emit(records)
    assert store.flush() == ""
    store.close()


def failed(r: Explained) -> bool:
    return r.finding.request.outcome in ("error", "reset")


def cause_of(r: Explained) -> str:
    return r.finding.verdict.cause if r.finding.slow or failed(r) else ""


ORDINARY = Filter(ordinary=True)
FILTERS: list[tuple[Filter, Callable[[Explained], bool]]] = [
    (ORDINARY, lambda r: True),
    (Filter(), lambda r: r.finding.slow or failed(r)),
    (Filter(slow=True), lambda r: r.finding.slow),
    (Filter(slow=False, ordinary=True), lambda r: not r.finding.slow),
    (Filter(failed=True), failed),
    (Filter(failed=False), lambda r: r.finding.slow and not failed(r)),
    (Filter(service="chat", ordinary=True), lambda r: r.finding.request.service == "chat"),
    (Filter(service="%", ordinary=True), lambda r: r.finding.request.service == "%"),
    (Filter(cause="cpu"), lambda r: cause_of(r).startswith("cpu.")),
    (Filter(cause="cpu.runqueue"), lambda r: cause_of(r) == "cpu.runqueue"),
    (Filter(culprit="etl", ordinary=True), lambda r: r.finding.verdict.culprit.name == "etl"),
    (Filter(tenant="acme", ordinary=True), lambda r: r.finding.request.tenant == "acme"),
    (Filter(model="llama", ordinary=True), lambda r: r.finding.engine is not None and r.finding.engine.model != ""),
    (Filter(route="/b", slow=True), lambda r: r.finding.slow and r.finding.request.route == "/b"),
    (Filter(outcome="reset"), lambda r: r.finding.request.outcome == "reset"),
    (Filter(since_unix_ns=NOW + 10 * S, ordinary=True), lambda r: r.start_unix_ns >= NOW + 10 * S),
    (Filter(until_unix_ns=NOW + 20 * S, ordinary=True), lambda r: r.start_unix_ns < NOW + 20 * S),
    (Filter(min_ms=20.0, max_ms=50.0, ordinary=True), lambda r: 20_000_000 <= r.finding.wall_ns < 50_000_000),
    (Filter(since_unix_ns=1 << 70), lambda r: False),
    (Filter(service="chat' OR 1=1 --"), lambda r: False),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "holds"), FILTERS)
def test_filters_take_what_they_say(
    made: tuple[Path, list[Explained]], wanted: Filter, holds: Callable[[Explained], bool]
) -> None:
    path, records = made
    reader = Reader(path)
    found = reader.requests.page(wanted, limit=1000)
    assert {r.id for r in found.rows} == {r.id for r in records if holds(r)}
    assert (found.total, found.cursor) == (len(found.rows), "")
    starts = [r.start_unix_ns for r in found.rows]
    assert starts == sorted(starts, reverse=True)
    reader.close()


VALUES: dict[str, Callable[[Listed], Any]] = {
    "start": lambda r: r.start_unix_ns,
    "latency": lambda r: r.latency_ns,
    "ttft": lambda r: -1 if r.ttft_ns is None else r.ttft_ns,
    "excess": lambda r: r.excess_ms,
    "share": lambda r: r.share,
    "confidence": lambda r: r.confidence,
    "status": lambda r: r.status,
    "service": lambda r: r.service,
    "route": lambda r: r.route,
    "cause": lambda r: r.cause,
    "culprit": lambda r: r.culprit,
    "phase": lambda r: r.phase,
}


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", SORTS)
def test_pages_in_any_order_hold_everything_once(reader: Reader, sort: str, order: str) -> None:
    rows: list[Listed] = []
    cursor, pages = "", 0
    while pages == 0 or cursor:
        page = reader.requests.page(ORDINARY, sort=sort, order=order, limit=7, cursor=cursor)
        assert page.total == COUNT
        rows += page.rows
        cursor, pages = page.cursor, pages + 1
    assert pages == -(-COUNT // 7)
    assert len({r.id for r in rows}) == len(rows) == COUNT
    keys = [(VALUES[sort](r), r.start_unix_ns, r.id) for r in rows]
    assert keys == sorted(keys, reverse=order == "desc")


def test_a_page_goes_on_where_it_was_while_requests_come(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    write(path, [explained(make_finding, n) for n in range(40)])
    reader = Reader(path)
    first = reader.requests.page(ORDINARY, limit=10)
    write(path, [explained(make_finding, 49)._replace(start_unix_ns=NOW + 1000 * S)])
    second = reader.requests.page(ORDINARY, limit=100, cursor=first.cursor)
    assert len(second.rows) == 30
    assert not {r.id for r in first.rows} & {r.id for r in second.rows}
    reader.close()


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(
        st.text(min_size=1, max_size=80),
        st.binary(min_size=1, max_size=60).map(lambda b: base64.urlsafe_b64encode(b).decode()),
    )
)
def test_a_cursor_that_is_none_is_refused(reader: Reader, cursor: str) -> None:
    with pytest.raises(QueryError, match="cursor"):
        reader.requests.page(ORDINARY, cursor=cursor)


@pytest.mark.parametrize(
    "said",
    [
        ["start", "desc", 1],
        ["start", "desc", 1 << 80, "x"],
        ["start", "asc", 1, "x"],
        ["latency", "desc", 1, 2, "x"],
        {"start": 1},
        ["start", "desc", None, "x"],
        ["start", "desc", [1], "x"],
    ],
)
def test_a_cursor_of_another_list_is_refused(reader: Reader, said: object) -> None:
    with pytest.raises(QueryError, match="cursor"):
        reader.requests.page(ORDINARY, cursor=base64.urlsafe_b64encode(msgspec.json.encode(said)).decode())
    with pytest.raises(QueryError, match="cursor"):
        reader.requests.page(ORDINARY, cursor="A" * 10_000)
    with pytest.raises(QueryError, match="cursor"):  # half a character in JSON
        text = base64.urlsafe_b64encode(rb'["start","desc",1,"\ud800"]').decode()
        reader.requests.page(ORDINARY, cursor=text)


def test_questions_that_make_no_sense_are_refused(reader: Reader) -> None:
    with pytest.raises(QueryError, match="sort: 'id; DROP TABLE findings' is none of start, latency"):
        reader.requests.page(ORDINARY, sort="id; DROP TABLE findings")
    with pytest.raises(QueryError, match="order"):
        reader.requests.page(ORDINARY, order="up")
    with pytest.raises(QueryError, match="not text"):
        reader.requests.page(Filter(service="\ud800"))
    assert reader.requests.get("\ud800") is None
    assert reader.get("\ud800") is None
    assert reader.get("nothing") is None


def test_facets_are_what_is_there_most_frequent_first(made: tuple[Path, list[Explained]]) -> None:
    path, records = made
    reader = Reader(path)
    found = reader.requests.facets(ORDINARY)
    services = [r.finding.request.service for r in records]
    assert set(found) == set(FACETS)
    assert found["service"] == sorted(set(services), key=lambda s: (-services.count(s), s))
    assert "" not in found["tenant"]
    # What is chosen can be changed: the other services stay.
    chosen = reader.requests.facets(Filter(ordinary=True, service="chat", tenant="acme"))
    assert set(chosen["service"]) == {
        r.finding.request.service for r in records if r.finding.request.tenant == "acme"
    }
    assert set(chosen["tenant"]) <= {"acme", "globex"}
    assert len(reader.requests.facets(ORDINARY, limit=1)["cause"]) == 1
    reader.close()


def test_texts_are_stored_as_they_are_and_cut_off(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    write(
        path,
        [
            Explained(f"i-{n}", NOW + n, make_finding(n, service=text, route=text))
            for n, text in enumerate(EVIL)
        ],
    )
    reader = Reader(path)
    for text in EVIL:
        shown = text[:200]
        (row,) = reader.requests.page(Filter(service=shown)).rows
        assert (row.service, row.route) == (shown, shown)
    reader.close()


def test_numbers_that_are_none_do_not_stop_the_others(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    records = [explained(make_finding, n) for n in (1, 2)]
    records[0].finding.verdict.excess_ms = float("nan")
    records[0].finding.verdict.share = float("inf")
    records[0].finding.wall_ns = 1 << 63
    write(path, records)
    reader = Reader(path)
    found = {r.id: r for r in reader.requests.page(ORDINARY).rows}
    assert (found["i-1"].excess_ms, found["i-1"].share) == (0.0, 0.0)
    assert set(found) == {"i-1", "i-2"}
    reader.close()


def test_a_resend_and_a_removal_keep_the_list_in_step(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    records = [explained(make_finding, n) for n in range(30)]
    write(path, records)
    write(path, records)
    reader = Reader(path)
    assert reader.requests.page(ORDINARY).total == 30
    reader.close()
    store = Store(path, max_age_ns=10 * S, max_bytes=64 << 20, now=lambda: NOW + 25 * S)  # prunes
    store.close()
    reader = Reader(path)
    left = reader.requests.page(ORDINARY)
    assert {r.id for r in left.rows} == {s.id for s in reader.newest(ordinary=True, limit=100)}
    assert left.total == 15
    assert sum(n for _, _, n, _ in reader.requests.by_step(ORDINARY, S)) < 15
    reader.close()


def downgrade(path: Path) -> None:
    """Make of a store one that whyspan of before wrote: version 2."""
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(
        "BEGIN; DROP TABLE requests; DROP TRIGGER IF EXISTS findings_gone; DROP TABLE intervals;"
        "DROP TABLE host_samples; CREATE INDEX findings_slow ON findings (slow, start_unix_ns);"
        "PRAGMA user_version = 2; COMMIT;"
    )
    db.close()


def test_a_store_of_before_lists_the_same(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    records = [explained(make_finding, n) for n in range(40)]
    write(path, records)
    reader = Reader(path)
    new = reader.requests.page(ORDINARY, sort="excess"), reader.requests.facets(ORDINARY)
    reader.close()
    downgrade(path)
    old = Reader(path)
    assert (old.requests.page(ORDINARY, sort="excess"), old.requests.facets(ORDINARY)) == new
    assert old.requests.get("i-7") == next(r for r in new[0].rows if r.id == "i-7")
    assert [*old.history.samples(0, NOW, S)] == []
    assert old.history.first_unix_ns() is None
    # The exporter of before goes on writing and forgetting beside us.
    db = sqlite3.connect(path)
    db.execute("DELETE FROM findings WHERE id = 'i-7'")
    db.execute("UPDATE findings SET finding = x'00' WHERE id = 'i-8'")
    db.commit()
    db.close()
    assert old.requests.page(ORDINARY).total == 39
    # The exporter of now brings it up to date, while we read; a finding that is broken is not listed.
    write(path, [explained(make_finding, 41)])
    assert old.requests.page(ORDINARY).total == 40
    old.close()
    reader = Reader(path)
    assert {r.id for r in reader.requests.page(ORDINARY).rows} == {
        r.id for r in (*records, explained(make_finding, 41))
    } - {"i-7", "i-8"}
    assert reader.requests.get("i-9") in new[0].rows
    reader.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    db.close()


def test_lists_use_the_indices(made: tuple[Path, list[Explained]]) -> None:
    db = sqlite3.connect(made[0])

    def plan(wanted: Filter, by: str = "start_unix_ns desc, id desc") -> str:
        where, values = wanted.where()
        query = f"EXPLAIN QUERY PLAN SELECT * FROM requests WHERE {where} ORDER BY {by} LIMIT 10"
        return str(db.execute(query, values).fetchall())

    assert "requests_slow" in plan(Filter())
    assert "USING INDEX requests_" in plan(ORDINARY)
    for wanted in (Filter(), ORDINARY):
        assert "TEMP B-TREE" not in plan(wanted)
    assert "requests_service (service=?" in plan(Filter(service="chat", ordinary=True))
    db.close()
