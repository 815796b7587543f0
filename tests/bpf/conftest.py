"""The tier ``bpf``: real programs on this kernel, on children whose work is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whyspan_probes.registry import Found, discover

from tests.bpf.child import Child
from tests.bpf.watcher import Watcher
from tests.conftest import lacking
from tests.tracefs import mounted

Watch = Callable[..., Watcher]
Spawn = Callable[..., Child]


@pytest.fixture(scope="session", autouse=True)
def tracefs() -> Iterator[None]:
    """Syscall tracepoints need tracefs: mount it where it is missing, and leave the host as it was found."""
    if lacking("bpf"):
        yield
        return
    with mounted():
        yield


@pytest.fixture(scope="session")
def probes() -> dict[str, Found]:
    """Every probe of the package, by name; they must have been built."""
    found = {f.probe.name: f for f in discover()}
    missing = [f.object_path.name for f in found.values() if not f.object_path.exists()]
    assert not missing, f"not built: {missing}; run `make build`"
    return found


@pytest.fixture
def watch(probes: dict[str, Found]) -> Iterator[Watch]:
    """``watch("sched", "edges", ring_bytes=..., config=...)`` attaches these probes until the test ends."""
    open_watchers: list[Watcher] = []

    def attach(*names: str, **options: object) -> Watcher:
        watcher = Watcher([probes[n] for n in names], **options)  # type: ignore[arg-type]
        open_watchers.append(watcher)
        return watcher

    yield attach
    for watcher in open_watchers:
        watcher.close()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """``spawn("sleeps", 23)`` starts a workload that waits for its ``go``; it is killed when the test ends."""
    children: list[Child] = []

    def start(name: str, *arguments: object, **options: object) -> Child:
        child = Child(name, *arguments, **options)  # type: ignore[arg-type]
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A folder on a file system that lives on a block device; skips where there is none."""
    from tests.bpf.disk import disk_of

    if disk_of(tmp_path) is None:
        pytest.skip(f"{tmp_path} is not on a block device")
    return tmp_path
