"""The page as a browser has it from the real server: login, prefix, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.conftest import OpenPage, Shoot, every_look
from tests.page.served import serve
from tests.unit.viewlab import Written

TOKEN = "0123456789abcdef-test"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@every_look
def test_login(  # noqa: PLR0917
    lab: Written,
    token_file: Path,
    open_page: OpenPage,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: str,
    size: tuple[int, int],
) -> None:
    with serve(lab.path, "--token-file", str(token_file), "--prefix", "/why") as s:
        # The 401 of the form itself is an error to the console.
        page = open_page(base=s.url, scheme=scheme, size=size, errors=False)  # type: ignore[arg-type]
        assert page.locator("#wrong").is_hidden()
        assert axe(page) == []
        page.fill("#token", "x" * 20)
        page.click("button")
        page.wait_for_selector("#wrong:visible")
        assert axe(page) == []
        shoot(page, f"login-{scheme}-{size[0]}")
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
        page.wait_for_selector("#main")
        assert page.evaluate("document.cookie") == ""  # no script reads it
        page.goto(f"{s.url}#token={TOKEN}")  # not needed any more
        page.wait_for_url(lambda url: "#" in url and "token" not in url)
        # The link with the token opens the page, and leaves nothing in the address.
        other = open_page(f"#token={TOKEN}", base=s.url, errors=False)
        other.wait_for_selector("#main")
        assert TOKEN not in other.url
