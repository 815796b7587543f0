"""The schema of the local store, shared by its writer and its reader."""

from __future__ import annotations

#: ``PRAGMA user_version``. The writer brings a store of `UPGRADES` up to date, the reader takes it as it is; any other
#: version is refused.
VERSION = 2
SLOW_BIT, FAILED_BIT = 1, 2

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
CREATE INDEX findings_slow ON findings (slow, start_unix_ns);
CREATE INDEX findings_trace ON findings (trace_id);
CREATE INDEX findings_request ON findings (request_id) WHERE request_id != '';
CREATE INDEX findings_engine ON findings (engine_request) WHERE engine_request IS NOT NULL;
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
PRAGMA user_version = {VERSION};
"""

#: What makes the next version of an older one. The findings in it know of no engine.
UPGRADES = {
    1: """
ALTER TABLE findings ADD COLUMN engine_request TEXT;
CREATE INDEX findings_engine ON findings (engine_request) WHERE engine_request IS NOT NULL;
PRAGMA user_version = 2;
"""
}
