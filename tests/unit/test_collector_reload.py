"""A reload of the collector, part by part; the whole of it is in ``tests/bpf/test_service.py``."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from whyspan.config import Collector, Config, Feeds, Run, Slo, Targets
from whyspan.errors import ConfigError, WhyspanError
from whyspan.pipeline import reload
from whyspan.pipeline.collector import Life, supervisor
from whyspan.pipeline.source import LiveSource
from whyspan.reloading import changes
from whyspan.systemd import Notifier


class Part:
    """Stands for any part: remembers what it was told."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls
        self.instance = "i"

    def __getattr__(self, method: str) -> Any:
        def call(*_: object) -> list[int]:
            self._calls.append(f"{self._name}.{method}")
            return []

        return call


def applied(new: Config) -> list[str]:
    calls: list[str] = []
    parts = reload.Parts(*(cast(Any, Part(name, calls)) for name in reload.Parts._fields))
    reload.apply(new, changes(Config(), new), parts)
    return calls


@pytest.mark.parametrize(
    ("new", "calls"),
    [
        (Config(), []),
        (Config(slo=Slo(ttft_ms=5)), ["engine.reconfigure"]),
        (
            Config(collector=Collector(budget_core_ratio=0.5)),
            ["governor.rebudget", "engine.reconfigure"],
        ),
        (
            Config(collector=Collector(explain_core_ratio=0.5)),
            ["budget.reconfigure", "engine.reconfigure"],
        ),
        (Config(collector=Collector(header_allow=())), ["engine.reconfigure", "source.allow_headers"]),
        (Config(collector=Collector(queue_findings=5)), ["engine.reconfigure", "client.resize"]),
        (Config(feeds=Feeds(enabled=False)), ["feeds.reconfigure"]),
        (Config(targets=Targets(auto=False)), ["source.retarget", "engine.unwatched"]),
    ],
)
def test_only_the_parts_concerned_are_told(new: Config, calls: list[str]) -> None:
    assert applied(new) == calls


def test_what_only_a_start_can_take_over_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, found = reload.read(
            lambda: Config(run=Run("/new"), slo=Slo(ttft_ms=1)), Config(run=Run("/old"))
        )
    assert (config.run.state_dir, config.slo.ttft_ms, found.live) == ("/old", 1, ["slo.ttft_ms"])
    assert "run.state_dir: taken over at the next start" in caplog.text


def ring(*positions: int | None) -> SimpleNamespace:
    steps = iter(positions)

    class Ring(SimpleNamespace):
        @property
        def waiting_at(self) -> int | None:
            return next(steps)

    return Ring()


def test_a_ring_that_a_record_holds_up_is_no_progress() -> None:
    rings = [
        ring(None, 64, 128, 128, 192, None),  # emptied, moved on twice, stuck, moved on, emptied
        ring(None, None, None, None, None, None),
    ]
    source = SimpleNamespace(_positions=[], session=SimpleNamespace(maps=SimpleNamespace(rings=rings)))
    moving = [LiveSource.moving(cast(LiveSource, source)) for _ in range(6)]
    assert moving == [True, True, True, False, True, True]


class Fake:
    """A collector that ends at once, with what the test has put in."""

    made: ClassVar[list[Config]] = []
    ends: ClassVar[list[Config | Exception | None]] = []
    asked: ClassVar[int] = 0

    def __init__(self, config: Config, *_: object) -> None:
        Fake.made.append(config)
        end = Fake.ends[0]
        if isinstance(end, Exception):
            del Fake.ends[0]
            raise end

    def request_reload(self) -> None:
        Fake.asked += 1

    def run(self) -> Config | None:
        end = Fake.ends.pop(0)
        assert not isinstance(end, Exception)
        return end

    def stop(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """`Fake` in the collector's place."""
    Fake.made, Fake.ends, Fake.asked = [], [], 0
    monkeypatch.setattr("whyspan.pipeline.collector.Collector", Fake)
    return Fake


OLD, NEW = Config(slo=Slo(ttft_ms=1)), Config(slo=Slo(ttft_ms=2))


def test_the_next_collector_has_the_new_configuration(fake: type[Fake]) -> None:
    fake.ends = [NEW, None]
    Life(lambda: OLD, Notifier({})).run()
    assert fake.made == [OLD, NEW]


def test_a_new_configuration_that_fails_gives_way_to_the_old_one(
    fake: type[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake.ends = [NEW, ConfigError("cannot write"), None]
    Life(lambda: OLD, Notifier({})).run()
    assert fake.made == [OLD, NEW, OLD]
    assert "not reloaded, back to the old configuration: cannot write" in caplog.text


def test_a_first_configuration_that_fails_is_an_error(fake: type[Fake]) -> None:
    fake.ends = [ConfigError("cannot write")]
    with pytest.raises(WhyspanError, match="cannot write"):
        Life(lambda: OLD, Notifier({})).run()


def test_an_old_configuration_that_fails_too_is_an_error(fake: type[Fake]) -> None:
    fake.ends = [NEW, ConfigError("new"), ConfigError("old")]
    with pytest.raises(WhyspanError, match="old"):
        Life(lambda: OLD, Notifier({})).run()


def test_a_reload_while_it_attaches_is_not_forgotten(fake: type[Fake]) -> None:
    fake.ends = [None]
    life = Life(lambda: OLD, Notifier({}))

    def attach(collector: Fake, config: Config, *_: object) -> None:
        Fake.made.append(config)
        life.reload()  # the signal comes in the middle of it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fake, "__init__", attach)
        life.run()
    assert fake.asked == 1


def test_process_1_is_nobodys_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its children are every service of the host: those to watch.
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert supervisor() == 0
    monkeypatch.setenv("WHYSPAN_SUPERVISOR", "7")
    assert supervisor() == 0
    monkeypatch.setattr("os.getppid", lambda: 7)
    assert supervisor() == 7
