"""What is refused: other names, other sites, other methods, paths that climb; and what every answer carries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from whyspan.page.auth import COOKIE, TokenAuth
from whyspan.page.security import CSP

from tests.unit.page.conftest import Client

TOKEN = "correct-horse-battery"
EVERYWHERE = (
    "/",
    "/api/requests",
    "/api/nothing",
    "/assets/main.js",
    "/assets/none.js",
    "/openapi.json",
    "/nothing",
)


@pytest.mark.parametrize(
    "settings", [{}, {"token": TOKEN}, {"prefix": "/why"}], ids=["open", "token", "prefix"]
)
def test_every_answer_carries_the_policy(client: Client, settings: dict[str, str]) -> None:
    c = client(**settings)
    for path in EVERYWHERE:
        for headers in ({}, {"host": "evil.example"}):
            found = c.get(path, headers=headers).headers
            assert found["content-security-policy"] == CSP, path
            assert found["x-content-type-options"] == "nosniff"
            assert found["cross-origin-resource-policy"] == "same-origin"
            assert found["cache-control"] in ("no-store", "no-cache")
            assert not [name for name in found if name.startswith("access-control-")]
    assert "unsafe" not in CSP
    assert "frame-ancestors 'none'" in CSP


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9466", 200),
        ("localhost.", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9466", 200),
        ("why.example:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example:127.0.0.1", 400),
        ("localhost, evil.example", 400),
        ("localhost@evil.example", 400),
        ("[::1", 400),
        ("localhost:port", 400),
        ("", 400),
    ],
)
def test_only_known_names_are_answered(client: Client, host: str, status: int) -> None:
    c = client(hosts=frozenset({"localhost", "127.0.0.1", "::1", "why.example"}))
    assert c.get("/api/health", headers={"host": host}).status_code == status


def test_one_host_header_it_is(client: Client) -> None:
    two = [("host", "localhost"), ("host", "localhost")]
    assert client().get("/api/health", headers=two).status_code == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("path", ["/", "/api/requests", "/login", "/assets/main.js"])
def test_only_reading(client: Client, method: str, path: str) -> None:
    assert client().request(method, path).status_code == 405


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link in a chat
        ("/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/api/requests", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("/api/requests", {"sec-fetch-site": "same-site"}, 403),  # another port of this host
        ("/assets/main.js", {"sec-fetch-site": "cross-site"}, 403),
        ("/api/requests", {"sec-fetch-site": "same-origin"}, 200),
        ("/api/requests", {"sec-fetch-site": "none"}, 200),
        ("/api/requests", {"origin": "http://evil.example"}, 403),
        ("/api/requests", {"origin": "http://localhost:1"}, 403),
        ("/api/requests", {"origin": "null"}, 403),
        ("/api/requests", {"origin": "http://localhost:9466"}, 200),
    ],
)
def test_other_sites_learn_nothing(client: Client, path: str, headers: dict[str, str], status: int) -> None:
    assert client().get(path, headers=headers).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e%2f%2e%2e%2fconfig.py",
        "/assets//etc/passwd",
        "/assets/%2fetc/passwd",
        "/assets/..%5capp.py",
        "/assets/%00",
        "/assets/.",
        "/assets/",
        "/assets/timeline",
        "/assets/" + "x" * 5000,
        "/api/requests/..%2f..%2fetc%2fpasswd",
        "/api/requests/%00",
        "/api/requests/" + "x" * 5000,
        "/app.py",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_paths_do_not_climb(client: Client, path: str) -> None:
    found = client().get(path)
    assert found.status_code == 404
    assert re.fullmatch(r'\{"error":"[^\n]{1,400}"\}', found.text)


def test_a_link_in_the_folder_is_not_followed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "a.js").write_text("1")
    (folder / "b.js").symlink_to("/etc/passwd")
    monkeypatch.setattr("whyspan.page.assets.FOLDER", folder)
    c = client()
    assert (c.get("/assets/a.js").text, c.get("/assets/b.js").status_code) == ("1", 404)


def test_who_has_no_token_sees_no_data(client: Client) -> None:
    c = client(token=TOKEN)
    first = c.get("/")
    assert (first.status_code, 'action="login"' in first.text) == (401, True)
    assert c.get("/assets/login.js").status_code == 200
    for path in ("/api/requests", "/api/live", "/openapi.json", "/api/nothing", "/nothing"):
        assert c.get(path).status_code == 401, path
    for given in ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xff"):
        assert (
            c.get("/api/requests", headers={b"authorization": given.encode("latin-1")}).status_code == 401
        ), given
    assert c.get("/api/requests", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200


def login(c: TestClient, token: str, prefix: str = "") -> str:
    found = c.post(f"{prefix}/login", data={"token": token})
    assert found.status_code == 303
    return found.headers["location"]


def test_login_gives_a_cookie_that_is_not_the_token(client: Client) -> None:
    c = client(token=TOKEN, prefix="/why")
    assert login(c, "wrong", "/why") == "./#wrong"
    assert not c.cookies
    found = c.post("/why/login", data={"token": f" {TOKEN}\n"})
    assert found.headers["location"] == "./"
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert "Path" not in cookie and "Secure" not in cookie
    assert TOKEN not in cookie
    # The client of the tests keeps a cookie without a path for the folder it came from, as a browser does.
    assert c.get("/why/api/requests").status_code == 200
    assert (
        "Secure"
        in client(token=TOKEN, certificate=Path("x"))
        .post("/login", data={"token": TOKEN})
        .headers["set-cookie"]
    )


def test_cookies_that_were_made_up_or_are_old(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    c = client(token=TOKEN)
    assert login(c, TOKEN) == "./"
    good = c.cookies[COOKIE]
    until, signature = good.split(".")
    c.cookies.clear()
    for bad in (
        "",
        ".",
        until,
        f"{int(until) + 1}.{signature}",
        f"{until}.{'0' * 64}",
        f".{signature}",
        "²." + "0" * 64,
    ):
        headers = {b"cookie": f"{COOKIE}={bad}".encode()}
        assert c.get("/api/health", headers=headers).status_code == 401, bad
    headers = {b"cookie": f"{COOKIE}={good}".encode()}
    assert c.get("/api/health", headers=headers).status_code == 200
    other = client(token=TOKEN + "x")
    assert other.get("/api/health", headers=headers).status_code == 401
    monkeypatch.setattr(TokenAuth.__init__, "__kwdefaults__", {"now": lambda: float(until)})
    assert client(token=TOKEN).get("/api/health", headers=headers).status_code == 401


def test_login_takes_little_and_only_from_the_page(client: Client) -> None:
    c = client(token=TOKEN)
    assert c.post("/login", content=b"token=" + b"x" * 100_000).status_code == 413
    for body in (b"", b"token", b"\xff\xfe=\x00", b"&" * 4000, b"a=1&" * 900):
        assert c.post("/login", content=body).status_code in (303, 400), body
    foreign = {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}
    assert c.post("/login", data={"token": TOKEN}, headers=foreign).status_code == 403
    assert c.get("/login").status_code == 401


def test_prefix(client: Client) -> None:
    c = client(prefix="/a/why")
    assert c.get("/a/why/api/health").status_code == 200
    assert c.get("/a/why/").status_code == 200
    there = c.get("/a/why")
    assert (there.status_code, there.headers["location"]) == (307, "why/")  # relative to /a/
    for path in ("/", "/api/health", "/a/whynot/", "/a", "/b/a/why/"):
        assert c.get(path).status_code == 404, path
    # What a stranger says of a prefix does not matter.
    assert c.get("/api/health", headers={"x-forwarded-prefix": "/a/why"}).status_code == 404
