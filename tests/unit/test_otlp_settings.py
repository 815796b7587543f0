"""Where OTLP goes: the file, the environment, and which of them wins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whyspan.config import Otlp, load_config
from whyspan.errors import ConfigError
from whyspan_exporters.otlp.settings import Settings, resolve
from whyspan_exporters.sinks import otlp

GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"


def targets(section: dict[str, Any], env: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The destinations that are on: signal to (endpoint, protocol)."""
    settings = resolve(Otlp(**section), env)
    return {t.signal: (t.endpoint, t.protocol) for t in (settings.traces, settings.metrics) if t is not None}


def both(base: str, protocol: str) -> dict[str, tuple[str, str]]:
    if protocol == "grpc":
        return {"traces": (base, protocol), "metrics": (base, protocol)}
    return {"traces": (f"{base}/v1/traces", protocol), "metrics": (f"{base}/v1/metrics", protocol)}


@pytest.mark.parametrize(
    ("section", "env", "expected"),
    [
        ({}, {}, {}),
        ({"protocol": "grpc", "headers": {"a": "b"}}, {}, {}),
        # the file alone: the port tells the protocol, else it is the SDK's default
        ({"endpoint": "http://c:4317"}, {}, both("http://c:4317", "grpc")),
        ({"endpoint": "http://c:4318"}, {}, both("http://c:4318", "http/protobuf")),
        ({"endpoint": "https://c"}, {}, both("https://c", "grpc")),
        ({"endpoint": "http://c:4318", "protocol": "grpc"}, {}, both("http://c:4318", "grpc")),
        (
            {"endpoint": "http://c:9/x/", "protocol": "http/protobuf"},
            {},
            both("http://c:9/x", "http/protobuf"),
        ),
        ({"endpoint": "http://c:4317", "metrics": False}, {}, {"traces": ("http://c:4317", "grpc")}),
        # the environment alone
        ({}, {GENERAL: "http://e:4317"}, both("http://e:4317", "grpc")),
        ({}, {GENERAL: "http://e:4318/"}, both("http://e:4318", "http/protobuf")),
        ({}, {GENERAL: "e:4317"}, both("e:4317", "grpc")),
        (
            {},
            {GENERAL: "http://e:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            both("http://e:1", "http/protobuf"),
        ),
        (
            {},
            {
                GENERAL: "http://e:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            {"traces": ("http://e:1", "grpc"), "metrics": ("http://e:1/v1/metrics", "http/protobuf")},
        ),
        (
            {},
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4318/in?key=k"},
            {"traces": ("http://t:4318/in?key=k", "http/protobuf")},
        ),
        (
            {},
            {GENERAL: "http://e:4317", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:4318/v1/metrics"},
            {"traces": ("http://e:4317", "grpc"), "metrics": ("http://m:4318/v1/metrics", "http/protobuf")},
        ),
        (
            {},
            {GENERAL: "http://e:4317", "OTEL_TRACES_EXPORTER": "none"},
            {"metrics": ("http://e:4317", "grpc")},
        ),
        (
            {},
            {GENERAL: "http://e:4317", "OTEL_METRICS_EXPORTER": "none"},
            {"traces": ("http://e:4317", "grpc")},
        ),
        ({}, {GENERAL: "   "}, {}),
        # both: the file wins, key by key
        (
            {"endpoint": "http://c:1"},
            {GENERAL: "http://e:2", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:3"},
            both("http://c:1", "grpc"),
        ),
        (
            {"endpoint": "http://c:1"},
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            both("http://c:1", "http/protobuf"),
        ),
        (
            {"protocol": "grpc"},
            {GENERAL: "http://e:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            both("http://e:4318", "grpc"),
        ),
        # disabled wins over everything
        ({"endpoint": "http://c:1"}, {"OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({"endpoint": "http://c:4317"}, {"OTEL_SDK_DISABLED": "false"}, both("http://c:4317", "grpc")),
    ],
)
def test_who_wins(section: dict[str, Any], env: dict[str, str], expected: dict[str, tuple[str, str]]) -> None:
    assert targets(section, env) == expected
    assert resolve(Otlp(**section), env).problem == ""


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({GENERAL: "not a url"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'not a url' is not a URL"),
        ({GENERAL: "http://"}, "is not a URL"),
        ({GENERAL: "http://h:port"}, "is not a URL"),
        ({GENERAL: "http://h:99999"}, "is not a URL"),
        ({GENERAL: "ftp://h:1"}, "must begin with http:// or https://"),
        ({GENERAL: "h:4318"}, "must begin with http:// or https://"),
        ({GENERAL: "http://h\x1b[31m:1"}, "is not a URL"),
        (
            {GENERAL: "http://h:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL 'http/json' is not one of grpc, http/protobuf",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_a_reported_state(env: dict[str, str], problem: str) -> None:
    settings = resolve(Otlp(), env)
    assert (settings.traces, settings.metrics) == (None, None)
    assert problem in settings.problem
    assert settings.problem.isprintable()


def test_a_mistake_in_the_environment_does_not_touch_the_file() -> None:
    settings = resolve(Otlp(endpoint="http://c:1", protocol="grpc"), {GENERAL: "x y"})
    assert settings.traces is not None
    assert settings.problem == ""


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"endpoint": "c:4317"}, "otlp.endpoint: 'c:4317' must begin with http:// or https://"),
        ({"endpoint": "http://c:4317?key=x"}, "otlp.endpoint: give the address without a query"),
        ({"endpoint": "nonsense here"}, "otlp.endpoint: 'nonsense here' is not a URL"),
        (
            {"endpoint": "https://c", "certificate": "/nonexistent/ca.pem"},
            "otlp.certificate: cannot read /nonexistent/ca.pem: No such file",
        ),
        (
            {"endpoint": "https://c", "client_certificate": "/x.pem"},
            "otlp.client_certificate and otlp.client_key: give both, or none",
        ),
        (
            {"endpoint": "https://c", "client_certificate": "/nonexistent/c", "client_key": "/nonexistent/k"},
            "otlp.client_certificate: cannot read /nonexistent/c: No such file",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Otlp(**section), {})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("protocol='http/json'", "otlp: protocol 'http/json' is not one of grpc, http/protobuf"),
        ("compression='zstd'", "otlp: compression 'zstd' is not one of gzip, none"),
        ("timeout_s=-1", "otlp.timeout_s: expected float >= 0.0"),
        ("spool_mb=1", "otlp.spool_mb: expected int >= 16"),
        ("headers={a=1}", "otlp.headers.*: expected str, got int"),
        ("endpont='x'", "unknown key otlp.endpont; did you mean otlp.endpoint?"),
    ],
)
def test_wrong_values_in_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[otlp]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("section", "env", "interval_s", "problem"),
    [
        ({}, {}, 60.0, ""),
        ({}, {"OTEL_METRIC_EXPORT_INTERVAL": "5000"}, 5.0, ""),
        ({"metrics_interval_s": 7}, {"OTEL_METRIC_EXPORT_INTERVAL": "5000"}, 7.0, ""),
        ({}, {"OTEL_METRIC_EXPORT_INTERVAL": "5s"}, 60.0, "'5s' is not a number of ms"),
        ({}, {"OTEL_METRIC_EXPORT_INTERVAL": "-1"}, 60.0, "'-1' is not a number of ms"),
        ({}, {"OTEL_METRIC_EXPORT_INTERVAL": "inf"}, 60.0, "'inf' is not a number of ms"),
        ({"metrics_interval_s": 1e-9}, {}, 0.1, ""),
    ],
)
def test_interval(section: dict[str, Any], env: dict[str, str], interval_s: float, problem: str) -> None:
    settings = resolve(Otlp(endpoint="http://c:1", **section), env)
    assert settings.interval_s == interval_s
    assert problem in settings.problem


ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_HEADERS": "a=b%20c,key=v",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca",
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "/cert",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/key",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "7",
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "8.5",
}


def details(signal: str, section: dict[str, Any], env: dict[str, str]) -> tuple[Any, ...]:
    found = resolve(Otlp(endpoint="http://c:1", **section), env)
    assert found.problem == ""
    t = found.traces if signal == "traces" else found.metrics
    assert t is not None
    return (dict(t.headers), t.certificate, t.client_certificate, t.client_key, t.compression, t.timeout_s)


def test_details_come_from_the_file_then_the_signal_then_the_environment(tmp_path: Path) -> None:
    pem = str(tmp_path / "x.pem")
    Path(pem).touch()
    mine: dict[str, Any] = {"headers": {"X-A": "b"}, "certificate": pem, "client_certificate": pem}
    mine |= {"client_key": pem, "compression": "none", "timeout_s": 3}
    assert details("traces", {}, {}) == ({}, "", "", "", "none", 10.0)
    env_headers = {"a": "b c", "key": "v"}
    assert details("traces", {}, ENVIRONMENT) == (env_headers, "/ca", "/cert", "/key", "gzip", 7.0)
    assert details("metrics", {}, ENVIRONMENT) == (env_headers, "/ca", "/cert", "/key", "gzip", 8.5)
    assert details("traces", mine, ENVIRONMENT) == ({"x-a": "b"}, pem, pem, pem, "none", 3.0)


@pytest.mark.parametrize(
    ("env", "problem", "on"),
    [
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "'zstd' is not one of gzip, deflate, none", False),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "'soon' is not a number of s; 10 s used", True),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "nan"}, "'nan' is not a number of s; 10 s used", True),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b,s3cret"}, "1 of its entries are not name=value", True),
    ],
)
def test_a_detail_that_is_wrong_in_the_environment(
    env: dict[str, str], problem: str, on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = resolve(Otlp(endpoint="http://c:1"), env)
    assert problem in found.problem
    assert (found.traces is not None) is on
    assert "s3cret" not in found.problem + caplog.text


@pytest.mark.parametrize(
    ("endpoint", "env", "insecure", "authority"),
    [
        ("http://c:1/x", {}, True, "c:1"),
        ("https://c", {}, False, "c"),
        ("c:4317", {}, False, "c:4317"),
        ("c:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "True"}, True, "c:4317"),
        ("https://u:p@[::1]:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "true"}, False, "[::1]:4317"),
    ],
)
def test_where_grpc_connects(endpoint: str, env: dict[str, str], insecure: bool, authority: str) -> None:
    target = resolve(Otlp(), env | {GENERAL: endpoint}).traces
    assert target is not None
    assert (target.insecure, target.authority) == (insecure, authority)


def test_secrets_are_not_shown() -> None:
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://user:passw0rd@h:4318/v1/traces?key=hush#x",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20t0ken,x=y",
    }
    assert "hush" not in resolve(Otlp(), env).problem
    env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "https://user:passw0rd@h:4318/v1/traces?key=hush"
    target = resolve(Otlp(headers={"api-key": "s3cret"}), env).traces
    assert target is not None
    assert target.shown == "https://h:4318/v1/traces"
    said = f"failed: {target.endpoint} Bearer%20t0ken 'Bearer t0ken' s3cret"
    assert target.redact(said) == "failed: https://***:***@h:4318/v1/traces?*** *** '***' ***"


def test_off_is_no_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    assert resolve(Otlp(), os.environ) == Settings(None, None, 60.0)
    assert otlp.open(load_config(None, {})) is None


@pytest.mark.parametrize(
    ("overrides", "loaded"),
    [
        ("{}", set()),
        ('{"otlp": {"endpoint": "http://127.0.0.1:4318"}}', {"opentelemetry", "requests"}),
        ('{"otlp": {"endpoint": "http://127.0.0.1:4317"}}', {"opentelemetry", "grpc"}),
    ],
)
def test_only_what_is_spoken_is_loaded(overrides: str, loaded: set[str]) -> None:
    code = (
        "import sys; from whyspan.config import load_config; from whyspan_exporters.sinks import otlp\n"
        "otlp.open(load_config())\n"
        "print(sorted({'opentelemetry', 'grpc', 'requests', 'numpy'} & set(sys.modules)))\n"
        "import threading; print(threading.active_count())"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    env |= {"WHYSPAN_OVERRIDES": overrides, "WHYSPAN_CONFIG": "/dev/null"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(sorted(loaded)), "1"]
