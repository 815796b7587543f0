"""``python -m tests.faults.host.incidents RECORDINGS``: make regression tests of the bench's recordings.

Of each fault the smallest recording, without a decoy if there is one, whose slow requests replay with the right cause
goes to ``tests/unit/incidents``, with what it must yield in ``index.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from whyspan.model import Finding
from whyspan.pipeline.replay import replay

from tests.faults.host import registry
from tests.faults.host.cut import cut

FOLDER = Path(__file__).resolve().parents[2] / "unit" / "incidents"
MAX_BYTES = 400_000
LEAST = 3


def slow(path: Path) -> list[Finding]:
    """Return what a recording yields of slow and failed requests."""
    return [f for f in replay(path).findings if f.slow or f.request.outcome in ("error", "killed", "reset")]


def expected(path: Path, causes: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what a recording must yield; None where it is no good: too few requests, or another cause."""
    found = slow(path)
    right = [f for f in found if f.verdict.cause in causes]
    if len(right) < LEAST or len(right) < len(found):
        return None
    who = Counter((f.verdict.culprit.kind, f.verdict.culprit.name) for f in right).most_common(1)[0]
    return {"causes": list(causes), "requests": len(right), "culprit": list(who[0]), "named": who[1]}


def main() -> None:
    """Choose, copy and index."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.host.incidents", description=__doc__)
    parser.add_argument("recordings", type=Path)
    args = parser.parse_args()
    faults, _ = registry.load_all()
    FOLDER.mkdir(exist_ok=True)
    index_path = FOLDER / "index.json"
    index: dict[str, Any] = json.loads(index_path.read_text()) if index_path.exists() else {}
    for fault in faults.values():
        candidates = [
            p
            for p in args.recordings.glob("*.rec")
            if fault.id in p.stem.split("-") and p.stat().st_size <= MAX_BYTES
        ]
        for path in sorted(candidates, key=lambda p: (p.stem.count("-"), p.stat().st_size)):
            moved = args.recordings / "moved" / path.name
            moved.parent.mkdir(exist_ok=True)
            cut(path, moved, 0, 1 << 62)
            wanted = expected(moved, fault.causes)
            if wanted is not None:
                shutil.copy(moved, FOLDER / f"{fault.id}.rec")
                index[fault.id] = wanted
                print(f"{fault.id}: {path.name}, {moved.stat().st_size >> 10} KiB, {wanted}")
                break
        else:
            print(f"{fault.id}: none of {len(candidates)}")
    index_path.write_text(json.dumps(dict(sorted(index.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
