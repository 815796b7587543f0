"""Spans through the spool: ``python -m tests.bench.spool [--spans N]``: rates, resident memory, bytes on disk.

N spans of findings are made and encoded as the sink does it, 64 findings at a time, and put into an outbox while nobody
listens; then a real receiver in another process comes up and takes them all. Both protocols.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from whyspan import selfuse
from whyspan.config import Otlp
from whyspan_exporters.otlp import transport
from whyspan_exporters.otlp.encode import encode
from whyspan_exporters.otlp.outbox import Outbox
from whyspan_exporters.otlp.settings import resolve
from whyspan_exporters.otlp.spans import to_spans
from whyspan_exporters.records import Explained

from tests.unit.conftest import build_finding
from tests.unit.receivers import RECEIVERS

BATCH_FINDINGS = 64  # the exporter's
_SERVE = """
import sys
from tests.unit.receivers import RECEIVERS
receiver = RECEIVERS[sys.argv[1]](int(sys.argv[2]))
print("up", flush=True)
sys.stdin.read()
print(len({(s.trace_id, s.span_id) for s in receiver.spans()}), flush=True)
receiver.stop()
"""


def run(folder: Path, protocol: str, spans: int) -> dict[str, Any]:
    """Return the figures of *spans* spans over *protocol*."""
    receiver = RECEIVERS[protocol]()
    receiver.stop()  # its port is free now
    section = Otlp(endpoint=receiver.endpoint, protocol=protocol, metrics=False)
    targets = [t for t in (resolve(section, {}).traces,) if t is not None]
    transport.load(targets[0])
    resource = Resource({"service.name": "chat"})
    base_bytes = selfuse.rss_bytes()
    outbox = Outbox(targets, folder / "spool.db", section.spool_mb << 20)
    began, cpu = time.monotonic(), selfuse.cpu_s()
    n = put = 0
    put_s = 0.0
    while put < spans:
        groups = [
            to_spans(Explained(f"i-{k}", 1_700_000_000_000_000_000, build_finding(k)), resource)
            for k in range(n + 1, n + 1 + BATCH_FINDINGS)
        ]
        n += BATCH_FINDINGS
        for request in encode(groups):
            at = time.monotonic()
            outbox.put("traces", request.payload, request.items)
            put_s += time.monotonic() - at
            put += request.items
    filled_s, filled_cpu = time.monotonic() - began, selfuse.cpu_s() - cpu
    full = outbox.figures()
    full_rss = selfuse.rss_bytes()
    serve = subprocess.Popen(
        [sys.executable, "-c", _SERVE, protocol, str(receiver.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert serve.stdout is not None
    assert serve.stdout.readline() == "up\n"
    outbox.start()
    began, cpu = time.monotonic(), selfuse.cpu_s()
    while outbox.figures().batches:
        time.sleep(0.05)
    drained_s, drained_cpu = time.monotonic() - began, selfuse.cpu_s() - cpu
    drained_rss = selfuse.rss_bytes()
    outbox.close(2.0)
    got, _ = serve.communicate("")
    assert int(got) == put, (got, put)
    on_disk = sum(f.stat().st_size for f in folder.iterdir())
    return {
        "spans": put,
        "made_encoded_and_put_per_s": round(put / filled_s),
        "made_encoded_and_put_per_cpu_s": round(put / filled_cpu),
        "put_alone_per_s": round(put / put_s),
        "bytes_on_disk": full.size_bytes,
        "bytes_per_span": round(full.size_bytes / put, 1),
        "sent_per_s": round(put / drained_s),
        "sent_per_cpu_s": round(put / drained_cpu),
        "rss_mib_before": round(base_bytes / 2**20, 1),
        "rss_mib_full": round(full_rss / 2**20, 1),
        "rss_mib_drained": round(drained_rss / 2**20, 1),
        "bytes_on_disk_after": on_disk,
    }


def main() -> None:
    """Print the figures of both protocols as JSON; each in a process of its own."""
    parser = argparse.ArgumentParser(prog="tests.bench.spool", description=__doc__)
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--protocol", choices=list(RECEIVERS))
    args = parser.parse_args()
    if args.protocol is None:
        for protocol in RECEIVERS:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.bench.spool",
                    "--spans",
                    str(args.spans),
                    "--protocol",
                    protocol,
                ],
                check=True,
            )
        return
    with tempfile.TemporaryDirectory(prefix="whyspan-spool-") as folder:
        print(json.dumps({args.protocol: run(Path(folder), args.protocol, args.spans)}, indent=2))


if __name__ == "__main__":
    main()
