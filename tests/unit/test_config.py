"""Configuration: defaults, errors that name the key, overrides."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from whyspan.config import Config, Objectives, load_config
from whyspan.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "packaging" / "whyspan.toml"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whyspan.config.SYSTEM_PATH", Path("/nonexistent/whyspan.toml"))
    for name in ("WHYSPAN_CONFIG", "WHYSPAN_OVERRIDES"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "whyspan.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[colector]", "unknown key colector; did you mean collector?"),
        ("[collector]\nwindow=3", "unknown key collector.window; did you mean collector.window_s?"),
        (
            "[[targets.match]]\npidd=3",
            "unknown key targets.match[0].pidd; did you mean targets.match[0].pid?",
        ),
        (
            "[slo.services.chat]\nttft=1",
            "unknown key slo.services.chat.ttft; did you mean slo.services.chat.ttft_ms?",
        ),
        ("[collector]\nwindow_s='x'", "collector.window_s: expected int, got str"),
        ("[collector]\nring_bytes=16777217", "collector.ring_bytes: expected int <= 16777216"),
        ("[collector]\nheader_allow=[3]", "collector.header_allow[0]: expected str, got int"),
        (
            f"[collector]\ntemplate_allow={[str(n) for n in range(33)]}",
            "collector: template_allow has more than 32 tags",
        ),
        ("[slo]\nttft_ms=-1", "slo.ttft_ms: expected float >= 0.0"),
        ("collector=3", "collector: expected object, got int"),
        ("[[targets.match]]\nservice='x'", "targets.match[0]: a target needs one of pid, comm, unit, cgroup"),
        ("x=", "Invalid value (at end of document)"),
    ],
)
def test_mistakes_are_one_line_with_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {says}"


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHYSPAN_CONFIG", str(write(tmp_path, "[collector]\nwindow_s=30")))
    assert load_config().collector.window_s == 30


def test_overrides_win_and_leave_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[collector]\nwindow_s=30\nrecorder_mb=8")
    monkeypatch.setenv("WHYSPAN_OVERRIDES", json.dumps({"collector": {"window_s": 20}}))
    collector = load_config(path).collector
    assert (collector.window_s, collector.recorder_mb) == (20, 8)
    assert load_config(path, {}).collector.window_s == 30


@pytest.mark.parametrize("text", ["{", "[]", '{"colector": {}}', '{"collector": {"window_s": "x"}}'])
def test_wrong_overrides_are_blamed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHYSPAN_OVERRIDES", text)
    with pytest.raises(ConfigError, match=r"WHYSPAN_OVERRIDES|command line"):
        load_config()


def test_service_objectives_inherit(tmp_path: Path) -> None:
    text = "[slo]\nttft_ms=500\ne2e_ms=9000\n[slo.services.chat]\nttft_ms=0\n"
    slo = load_config(write(tmp_path, text)).slo
    assert slo.objectives("chat") == Objectives(ttft_ms=0, e2e_ms=9000)
    assert slo.objectives("other") == Objectives(ttft_ms=500, e2e_ms=9000)


def test_derived_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(None, {"run": {"state_dir": "/x"}})
    assert (str(config.store_path), str(config.socket_path)) == ("/x/whyspan.db", "/x/exporter.sock")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(Config().state_dir) == "/var/lib/whyspan"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr("whyspan.config.SYSTEM_STATE", tmp_path / "none")
    assert str(Config().state_dir) == "/home/u/.local/state/whyspan"
    monkeypatch.setattr(
        "whyspan.config.SYSTEM_STATE", tmp_path
    )  # the services and their group can read there
    assert Config().state_dir == tmp_path
    assert Config().collector_dir == tmp_path / "collector"
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        _ = load_config(None, {"run": {"state_dir": "/" + "x" * 120}}).socket_path


def _keys(kind: Any, prefix: str = "") -> set[str]:
    out = set()
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            out |= _keys(field.type, f"{prefix}{field.name}.")
        else:
            out.add(prefix + field.name)
    return out


def test_example_is_the_defaults() -> None:
    text = EXAMPLE.read_text()
    assert load_config(EXAMPLE) == Config()
    active = re.sub(r"(?m)^#(?=\w)", "", text)
    data = tomllib.loads(active)
    assert msgspec.convert(data, Config) == Config()
    named = {f"{section}.{key}" for section, keys in data.items() for key in keys}
    # These are tables, shown in the indented samples.
    assert named | {"targets.match", "slo.services", "feeds.named"} == _keys(Config)


def test_samples_in_the_example_load(tmp_path: Path) -> None:
    active = re.sub(r"(?m)^#(?=\w|    )", "", EXAMPLE.read_text())
    config = load_config(write(tmp_path, active))
    assert config.targets.match[0].unit == "chat.service"
    assert config.slo.objectives("chat").ttft_ms == 500
