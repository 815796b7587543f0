"""The schema of the local store, shared by its writer and its reader."""

from __future__ import annotations

#: ``PRAGMA user_version``. The writer brings a store of `UPGRADES` up to date, the reader takes it as it is; any other
#: version is refused.
VERSION = 3
SLOW_BIT, FAILED_BIT = 1, 2
#: How long the requests counted in a row of ``intervals`` took to end, and how far samples of the host are apart.
SLOT_NS = 10_000_000_000

# Engine ids came with version 2.
_ENGINES = "CREATE INDEX findings_engine ON findings (engine_request) WHERE engine_request IS NOT NULL;"

#: What a list of requests shows and is filtered and sorted by: see `listed`. Apart from the blobs, so that a scan of
#: all of them reads a few MB; kept in step with ``findings`` by the writer and, where rows go, by the trigger.
REQUESTS = """
CREATE TABLE requests (
    id TEXT PRIMARY KEY,
    trace_id TEXT NOT NULL,
    service TEXT NOT NULL,
    method TEXT NOT NULL,
    route TEXT NOT NULL,
    model TEXT NOT NULL,
    tenant TEXT NOT NULL,
    start_unix_ns INTEGER NOT NULL,
    latency_ns INTEGER NOT NULL,
    ttft_ns INTEGER,
    status INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    slow INTEGER NOT NULL,
    cause TEXT NOT NULL,
    excess_ms REAL NOT NULL,
    share REAL NOT NULL,
    confidence REAL NOT NULL,
    culprit_kind TEXT NOT NULL,
    culprit TEXT NOT NULL,
    phase TEXT NOT NULL
);
"""
_REQUESTS = f"""{REQUESTS}
CREATE INDEX requests_start ON requests (start_unix_ns, id);
CREATE INDEX requests_slow ON requests (start_unix_ns, id) WHERE slow > 0;
CREATE INDEX requests_service ON requests (service, start_unix_ns);
CREATE INDEX requests_cause ON requests (cause, start_unix_ns);
CREATE TRIGGER findings_gone AFTER DELETE ON findings BEGIN DELETE FROM requests WHERE id = old.id; END;
"""

# latency and ttft are JSON arrays: requests by bucket of tally.BOUNDS_S. sample is a JSON object: see `history`.
_HISTORY = """
CREATE TABLE intervals (
    start_unix_ns INTEGER NOT NULL,
    service TEXT NOT NULL,
    requests INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    latency TEXT NOT NULL,
    ttft TEXT NOT NULL,
    PRIMARY KEY (start_unix_ns, service)
) WITHOUT ROWID;
CREATE TABLE host_samples (
    start_unix_ns INTEGER NOT NULL,
    instance TEXT NOT NULL,
    sample TEXT NOT NULL,
    PRIMARY KEY (start_unix_ns, instance)
) WITHOUT ROWID;
"""

# latency_ns and ttft_ns are of the request (ttft_ns NULL when no body byte was sent); finding is msgpack of
# model.Finding; slow holds SLOW_BIT and FAILED_BIT; engine_request is the engine's id of the request, NULL when not
# known. Rowid table: the blobs are too big for WITHOUT ROWID.
TABLES = f"""
CREATE TABLE findings (
    id TEXT PRIMARY KEY,
    trace_id TEXT NOT NULL,
    service TEXT NOT NULL,
    request_id TEXT NOT NULL,
    start_unix_ns INTEGER NOT NULL,
    latency_ns INTEGER NOT NULL,
    ttft_ns INTEGER,
    status INTEGER NOT NULL,
    slow INTEGER NOT NULL,
    cause TEXT NOT NULL,
    finding BLOB NOT NULL,
    engine_request TEXT
);
CREATE INDEX findings_start ON findings (start_unix_ns);
CREATE INDEX findings_trace ON findings (trace_id);
CREATE INDEX findings_request ON findings (request_id) WHERE request_id != '';
{_ENGINES}
CREATE TABLE counters (
    instance TEXT NOT NULL,
    name TEXT NOT NULL,
    service TEXT NOT NULL,
    label TEXT NOT NULL,
    value INTEGER NOT NULL,
    updated_unix_ns INTEGER NOT NULL,
    PRIMARY KEY (instance, name, service, label)
) WITHOUT ROWID;
CREATE TABLE status (
    instance TEXT PRIMARY KEY,
    updated_unix_ns INTEGER NOT NULL,
    status TEXT NOT NULL
) WITHOUT ROWID;
{_REQUESTS}
{_HISTORY}
PRAGMA user_version = {VERSION};
"""

#: What makes the next version of an older one. The findings of version 1 know of no engine. The writer fills
#: ``requests`` of the findings that a store of version 2 has.
UPGRADES = {
    1: f"""
ALTER TABLE findings ADD COLUMN engine_request TEXT;
{_ENGINES}
PRAGMA user_version = 2;
""",
    2: f"""
DROP INDEX findings_slow;
{_REQUESTS}
{_HISTORY}
PRAGMA user_version = 3;
""",
}
