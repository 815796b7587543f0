"""Where ``tests.roots`` takes other Debian releases from: what apt knows, in both of its formats."""

from __future__ import annotations

from pathlib import Path

from tests.roots import Source, sources

ONE_LINE = """\
# deb http://commented.test/debian trixie main
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://a.test/debian bookworm main
deb-src http://source.test/debian bookworm main
deb http://tools.test/apt stable main
deb http://b.test/debian/ bookworm main
"""
STANZAS = """\
Types: deb
URIs: http://c.test/debian http://security.test/debian-security
Suites: bookworm
Signed-By: /usr/share/keyrings/c.gpg

Types: deb
URIs: http://d.test/debian
Suites: bookworm
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
"""


def test_both_formats_are_read_and_other_archives_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (folder / "more.sources").write_text(STANZAS)
    assert sources(tmp_path) == [
        Source("http://a.test/debian", "/usr/share/keyrings/a.gpg"),
        Source("http://b.test/debian/", ""),
        Source("http://c.test/debian", "/usr/share/keyrings/c.gpg"),
        Source("http://d.test/debian", ""),
    ]


def test_a_machine_without_apt_knows_none(tmp_path: Path) -> None:
    assert sources(tmp_path) == []
