"""The baseline's file: read at the start, written now and then and at the end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from whyspan.baseline import Baseline

log = logging.getLogger("whyspan.collector")


def load_baseline(path: Path) -> Baseline:
    """Read the baseline of an earlier run; an empty one, with a line in the log, when it cannot be read."""
    try:
        return Baseline.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return Baseline()
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("baseline %s cannot be read, learning anew: %s", path, e)
        return Baseline()


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Write the baseline so that a crash leaves the old one or the new one. Failure is logged."""
    try:
        # One name: a full disk must not collect leftovers.
        temporary = path.with_name(f".{path.name}")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(baseline.to_dict()))
        temporary.replace(path)
    except OSError as e:
        log.warning("baseline is not saved: %s", e.strerror)
