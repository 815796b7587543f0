"""Where the page may listen: never where others reach it without a token and TLS."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from whyspan.config import PageSection
from whyspan.errors import ConfigError
from whyspan.page.settings import resolve

STORE = Path("/nonexistent/s.db")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "127.9.9.9:80", "[::1]:9466", "localhost:9466", "[::ffff:127.0.0.1]:1"]
)
def test_this_host_needs_nothing(listen: str) -> None:
    found = resolve(PageSection(listen=listen), STORE)
    assert (found.token, found.tls) == ("", False)
    assert {"localhost", "127.0.0.1", "::1"} <= found.hosts


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:9466",
        "[::]:9466",
        "10.1.2.3:9466",
        "[::ffff:0.0.0.0]:1",
        "none.invalid:9466",
        "0:9466",
        "169.254.0.1:1",
    ],
)
def test_other_hosts_need_a_token_and_tls(listen: str, token: Path) -> None:
    both = {"tls_certificate": "c", "tls_key": "k"}
    for given, lacks in (
        ({}, "the page needs a token (token_file) and TLS (tls_certificate, tls_key) there"),
        ({"token_file": str(token)}, "the page needs TLS"),
        (both, "the page needs a token"),
    ):
        with pytest.raises(ConfigError, match="other hosts can reach") as caught:
            resolve(msgspec.convert({"listen": listen, **given}, PageSection), STORE)
        assert lacks in str(caught.value)
    found = resolve(msgspec.convert({"listen": listen, "token_file": str(token), **both}, PageSection), STORE)
    assert (found.token, found.tls) == ("0123456789abcdef", True)


def test_a_socket_is_this_hosts(tmp_path: Path) -> None:
    found = resolve(PageSection(listen="0.0.0.0:1", socket=str(tmp_path / "s"), socket_mode="0660"), STORE)
    assert (found.socket, found.socket_mode) == (tmp_path / "s", 0o660)
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        resolve(PageSection(socket="/" + "x" * 107), STORE)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("0123456789abcde", 0o600, "16 to 1024 characters"),
        ("", 0o600, "16 to 1024 characters"),
        ("x" * 1025, 0o600, "16 to 1024 characters"),
        ("0123456789 abcdef", 0o600, "one word"),
        ("0123456789abcdef\nmore", 0o600, "one word"),
        ("0123456789abcdeé", 0o600, "not plain text"),
        ("0123456789abcdef", 0o644, "every user can read"),
    ],
)
def test_tokens(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        resolve(PageSection(token_file=str(path)), STORE)
    with pytest.raises(ConfigError, match="No such file"):
        resolve(PageSection(token_file=str(path) + "x"), STORE)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"listen": "9466"}, "is not an address and a port"),
        ({"prefix": "why"}, "is not a path"),
        ({"prefix": "/../why"}, "is not a path"),
        ({"prefix": "/why?"}, "is not a path"),
        ({"prefix": "//evil.example"}, "is not a path"),
        ({"socket_mode": "rw"}, "is not a mode"),
        ({"tls_key": "k"}, "go together"),
        ({"trace_url": "javascript:alert(1)//{trace_id}"}, "is not an http"),
        ({"trace_url": "https://traces.example/"}, "is not an http"),
        ({"runbook_url": "https://books.example/{trace_id}"}, "is not an http"),
    ],
)
def test_mistakes(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert(wrong, PageSection)


def test_prefix_and_names() -> None:
    section = PageSection(prefix="/a/why/", hosts=("Why.Example.", "[fe80::1]"))
    found = resolve(section, STORE)
    assert found.prefix == "/a/why"
    assert {"why.example", "fe80::1"} <= found.hosts
    assert resolve(PageSection(prefix="/"), STORE).prefix == ""
