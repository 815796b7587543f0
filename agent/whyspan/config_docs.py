"""Makes docs/configure.md: ``python -m whyspan.config_docs packaging/whyspan.toml > docs/configure.md``.

What a key is for is said once, in the example file; its type, default, bounds and what a reload does with it come from
the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from whyspan.config import CONFIG_ENV, OVERRIDES_ENV, SYSTEM_PATH, Config
from whyspan.reloading import Effect, effect

_SECTION: Final = re.compile(r"\[(\w+)\]$")
_KEY: Final = re.compile(r"#(\w+) = (.*)$")
_CODE: Final = re.compile(r"#    (.*)$")
_PROSE: Final = re.compile(r"# (\S.*)$")
_TYPES: Final = {
    "IntType": "integer",
    "FloatType": "number",
    "StrType": "string",
    "BoolType": "true or false",
}

_HEAD: Final = f"""# Configure

<!-- Made by `make generated` from packaging/whyspan.toml, and agent/whyspan/config.py and reloading.py. -->

`{SYSTEM_PATH}`, or the file that `--config` or `${CONFIG_ENV}` names, is TOML. Every key has a default: an
empty file, or none, works. A wrong one is refused with one line that names the file and the key:

```
{SYSTEM_PATH}: unknown key collector.window; did you mean collector.window_s?
```

Look at a change before it is used, then have it taken over:

```
sudo /usr/lib/whyspan/bin/python -I -m whyspan.checkconfig --config {SYSTEM_PATH}
sudo systemctl reload whyspan        # a wrong file fails the reload, and the old configuration stays
```

`whyspan run` takes keys on its command line, too, `--set slo.e2e_ms=2000`; these win over the file (as JSON they
are in `${OVERRIDES_ENV}` for the processes that it starts), and a list replaces the file's list. It reloads on SIGHUP.

Secrets, such as a header for the collector, need not be in the file: the exporter's unit reads
`/etc/whyspan/exporter.env` (`OTEL_EXPORTER_OTLP_HEADERS=authorization=...`, owned by root, mode 0600).

**On reload**, by key:

"""


class _Entry(NamedTuple):
    """What the example file says of one key, or by code of a table in a list."""

    prose: str
    code: str


def read(text: str) -> dict[str, _Entry]:
    """Take the example file apart: a comment is for the keys below it, until the next comment."""
    section = ""
    prose: list[str] = []
    code: list[str] = []
    entries: dict[str, _Entry] = {}
    after_key = False
    for line in [*text.splitlines(), ""]:
        if (m := _CODE.match(line)) is not None:
            code.append(m[1])
            continue
        if code:  # the example of a table has ended; its first line names it, [[feeds.named]] or [slo.services.chat]
            name = ".".join(code[0].strip("[]").split(".")[:2])
            entries[name] = _Entry(" ".join(prose), "\n".join(code))
            prose, code = [], []
        if (m := _SECTION.match(line)) is not None:
            section, prose, after_key = m[1], [], False
        elif (m := _KEY.match(line)) is not None:
            entries[f"{section}.{m[1]}"] = _Entry(" ".join(prose), "")
            after_key = True
        elif (m := _PROSE.match(line)) is not None:
            if after_key:
                prose, after_key = [], False
            prose.append(m[1])
    return entries


def all_keys(kind: type[msgspec.Struct] = Config) -> Iterator[tuple[str, inspect.Field]]:
    """Yield every key of the file with its declaration, such as ``slo.ttft_ms``; tables in lists are one key."""
    for section in _struct(kind).fields:
        for field in _struct(section.type).fields:
            yield f"{section.name}.{field.name}", field


def _struct(kind: Any) -> inspect.StructType:
    found = kind if isinstance(kind, inspect.StructType) else inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found


def page(example: str) -> str:
    """Return the whole page."""
    said = read(example)
    parts = [_HEAD, *(f"* *{e.name.lower()}*: {e.value}.\n" for e in Effect)]
    for section in _struct(Config).fields:
        kind = _struct(section.type)
        parts.append(f"\n## [{section.name}]\n\n{_sentence(kind)}\n\n")
        rows, tables = [], []
        for field in kind.fields:
            name = f"{section.name}.{field.name}"
            nested = _nested(field.type)
            if nested is not None:
                tables.append(_table(name, nested, said[name]))
            else:
                rows.append(_row(name, field, said[name].prose))
        if rows:
            parts.append(_rows("| key | type | default | what | on reload |", rows))
        parts += tables
    return "".join(parts)


def _sentence(kind: inspect.StructType) -> str:
    # reST's double backticks are one in Markdown.
    return " ".join((kind.cls.__doc__ or "").split()).replace("``", "`")


def _nested(kind: inspect.Type) -> inspect.StructType | None:
    """Return the type of the tables in a list or a dictionary."""
    inner = getattr(kind, "item_type", None) or getattr(kind, "value_type", None)
    return inner if isinstance(inner, inspect.StructType) else None


def _table(name: str, kind: inspect.StructType, said: _Entry) -> str:
    rows = [f"| `{field.name}` | {_type(field.type)} | {_default(field)} |" for field in kind.fields]
    about = f"{said.prose} ({_sentence(kind)}) On reload: *{effect(name).name.lower()}*."
    table = _rows("| key | type | default |", rows)
    return f"\n### {name}\n\n{about}\n\n```toml\n{said.code}\n```\n\n{table}"


def _row(name: str, field: inspect.Field, prose: str) -> str:
    key = name.partition(".")[2]
    cells = (f"`{key}`", _type(field.type), _default(field), prose, f"*{effect(name).name.lower()}*")
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _rows(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def _type(kind: inspect.Type) -> str:
    name = type(kind).__name__
    if isinstance(kind, inspect.UnionType):
        return _type(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"list of {_type(kind.item_type)}s"
    if isinstance(kind, inspect.DictType):
        return f"table of {_type(kind.value_type)}s"
    bounds = [
        f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value:g}"
        for at, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if (value := getattr(kind, at, None)) is not None
    ]
    return " ".join([_TYPES[name], ", ".join(bounds)]).strip()


def _default(field: inspect.Field) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "that of the section"
    return f"`{json.dumps(msgspec.to_builtins(value))}`"


if __name__ == "__main__":
    print(page(Path(sys.argv[1]).read_text(encoding="utf-8")), end="")
