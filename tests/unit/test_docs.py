"""The documentation: what is made from the code is up to date, links lead somewhere, commands and keys exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from msgspec import inspect
from whyspan import cli, config_docs
from whyspan.config import Config
from whyspan.reloading import Effect, effect

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ]
)
PAGES = [p for p in PAGES if p.exists()]
#: Pages for who runs whyspan; what they name must exist.
GUIDES = [
    DOCS / f"{n}.md" for n in ("install", "configure", "upgrade", "uninstall", "troubleshooting", "sizing")
]
EXAMPLE = ROOT / "packaging" / "whyspan.toml"

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")


def prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def test_configure_is_made_from_the_code_and_the_example() -> None:
    made = config_docs.page(EXAMPLE.read_text())
    assert (DOCS / "configure.md").read_text() == made, "run `make generated`"


def test_configure_has_every_key_once() -> None:
    text = (DOCS / "configure.md").read_text()
    assert len(list(config_docs.all_keys())) > 50
    for name, field in config_docs.all_keys():
        section, _, key = name.partition(".")
        part = text.partition(f"## [{section}]\n")[2].partition("\n## [")[0]
        nested = config_docs._nested(field.type)
        assert part.count(f"### {name}\n") == (nested is not None)
        if nested is None:
            own = part.partition("\n### ")[0]  # tables in the section have keys of the same names
            (line,) = (ln for ln in own.splitlines() if ln.startswith(f"| `{key}` |"))
            assert line.endswith(f"| *{effect(name).name.lower()}* |")
            cells = [c.strip() for c in line.strip("|").split(" | ")]
            assert all(cells), name  # each has a type, a default, and a word on what it is for
    assert all(f"* *{e.name.lower()}*: " in text for e in Effect)


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("collector.ring_bytes", "integer ≥ 65,536, ≤ 16,777,216", "`8388608`"),
        ("collector.budget_core_ratio", "number > 0, ≤ 1", "`0.01`"),
        ("collector.template_allow", "list of strings", "`[]`"),
        ("otlp.headers", "table of strings", "`{}`"),
        ("feeds.enabled", "true or false", "`true`"),
    ],
)
def test_types_bounds_and_defaults(name: str, kind: str, default: str) -> None:
    field: inspect.Field = dict(config_docs.all_keys())[name]
    assert (config_docs._type(field.type), config_docs._default(field)) == (kind, default)


def test_a_comment_is_for_the_keys_below_it() -> None:
    text = "# intro\n\n[a]\n# One.\n#x = 1\n#y = 2\n# Two,\n# more.\n#z = 3\n"
    text += "# Tables.\n#    [[a.t]]\n#    k = 1\n#w = 4\n"
    found = config_docs.read(text)
    assert {k: e.prose for k, e in found.items()} == {
        "a.x": "One.",
        "a.y": "One.",
        "a.z": "Two, more.",
        "a.t": "Tables.",
        "a.w": "",
    }
    assert found["a.t"].code == "[[a.t]]\nk = 1"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert path.is_relative_to(ROOT), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    linked = {(DOCS / t.partition("#")[0]).resolve() for t in _LINK.findall((DOCS / "README.md").read_text())}
    assert {p for p in DOCS.glob("*.md") if p.name != "README.md"} <= linked


def _commands(path: Path) -> Iterator[list[str]]:
    """Every whyspan command line of a page, in fences and in the text, without what follows it."""
    text = path.read_text()
    lines = [line for block in _FENCE.findall(text) for line in block.splitlines()]
    for line in [*lines, *_INLINE.findall(prose(path))]:
        m = re.match(r"(?:\$ )?(?:sudo )?(?:\S*/bin/)?whyspan ([^|#&;]*)", line)
        if m and re.match(r"[a-z]+(\s|$)", m[1]):
            yield shlex.split(m[1].replace("'", ""))


def _described(words: list[str]) -> str:
    """Why a command line is not one; empty when it is."""
    context = click.Context(cli.group)
    command: click.Command = cli.group
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest.pop(0))
        if found is None:
            return "no such command"
        command = found
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    wrong = [w for w in rest if w.startswith("--") and w.partition("=")[0] not in known]
    return f"no option {', '.join(wrong)}" if wrong else ""


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=lambda p: p.name)
def test_commands_and_options_exist(page: Path) -> None:
    wrong = {" ".join(words): why for words in _commands(page) if (why := _described(words))}
    assert wrong == {}


def test_a_wrong_command_is_found() -> None:
    assert _described(["slow", "--since", "10m"]) == ""
    assert _described(["slow", "--sinse", "10m"]) == "no option --sinse"
    assert _described(["slowly"]) == "no such command"
    assert _described(["burst", "malloc", "--pid", "1"]) == ""


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.name)
def test_keys_exist(page: Path) -> None:
    sections = {field.name for field in inspect.type_info(Config).fields}  # type: ignore[attr-defined]
    known = {name for name, _ in config_docs.all_keys()}
    for text in _INLINE.findall(prose(page)):
        m = re.match(r"(\w+)\.(\w+)(?: = .*)?$", text)
        if m and m[1] in sections:
            assert f"{m[1]}.{m[2]}" in known, text


def test_what_doctor_groups_is_documented() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    for group in ("kernel", "privilege", "install", "host", "place", "service", "network", "probe", "server"):
        assert f"`{group}`" in text
    for status in (0, 1, 2, 3, 4):
        assert f"| {status} |" in text


@pytest.mark.parametrize(
    "figure",
    [
        "1.89%",
        "1.64%",
        "7.3%",
        "22%",
        "134 MB",
        "0.99 s",
        "0.80 s",
        "11.5 million",
        "62,000",
        "23,700",
        "48,212",
        "532",
    ],
)
def test_sizing_quotes_what_the_readme_measured(figure: str) -> None:
    assert figure in (ROOT / "README.md").read_text(), (
        f"{figure} is no longer in the README: mend docs/sizing.md"
    )
    assert figure in (DOCS / "sizing.md").read_text()
