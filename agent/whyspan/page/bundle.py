"""Makes one script of ES modules, for a file that stands alone. No parser: the modules keep to a few forms.

Each module becomes a function that is called once, in the order of the imports, and returns what it exports; an import
takes names out of what another returned. The scopes stay apart, so no name can collide. What the forms are:

* at the beginning of a line, ``import { a, b as c } from "./other.js";`` (over several lines too);
* at the beginning of a line, ``export`` before ``function``, ``async function``, ``class`` or ``const NAME``, or
  ``export { a };``;
* no cycles, no ``import()``, no default, no ``let`` that changes after another module took it.

Anything else is a `BundleError`, never a script that does something else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_NAME: Final = r"[A-Za-z_$][\w$]*"
_LIST: Final = rf"\{{\s*(?P<names>(?:{_NAME}(?:\s+as\s+{_NAME})?\s*,?\s*)*)\}}"
_IMPORT: Final = re.compile(rf'^import {_LIST} from "(?P<path>\.[^"\n]+)";[ \t]*(?://[^\n]*)?$', re.M)
_DECLARED: Final = re.compile(
    rf"^export (?=(?:async )?function\*? (?P<f>{_NAME})|class (?P<c>{_NAME})|const (?P<v>{_NAME})\b)", re.M
)
_LISTED: Final = re.compile(rf"^export {_LIST};[ \t]*$", re.M)
_LEFT: Final = re.compile(r"^(?:import|export)\b.*$", re.M)
#: In comments, import() is a type.
_COMMENT: Final = re.compile(r"/\*.*?\*/|^[ \t]*//[^\n]*", re.M | re.S)
_DYNAMIC: Final = re.compile(r"^.*\bimport\s*[(.].*$", re.M)


class BundleError(Exception):
    """A module has a form that is not known here; the text names it."""


def bundle(entry: Path) -> str:
    """Return the script that does what the module *entry* does.

    Raises:
        BundleError: A module has another form, is not there, or they import each other in a circle.
    """
    order: dict[Path, str] = {}
    _visit(entry.resolve(), entry.resolve().parent, order, ())
    return '"use strict";\n' + "\n".join(order.values())


def _visit(path: Path, root: Path, order: dict[Path, str], above: tuple[Path, ...]) -> None:
    if path in order:
        return
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    if path in above:
        raise BundleError(f"{name} imports itself, through others")
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise BundleError(f"{name}: {exc.strerror}") from exc
    for match in _IMPORT.finditer(source):
        _visit((path.parent / match["path"]).resolve(), root, order, (*above, path))
    numbers = {p: i for i, p in enumerate(order)}

    def taken(match: re.Match[str]) -> str:
        number = numbers[(path.parent / match["path"]).resolve()]
        return f"const {{ {', '.join(_renamed(match['names'], ': '))} }} = module{number};"

    exports: list[str] = []
    for match in _DECLARED.finditer(source):
        exports.append(match["f"] or match["c"] or match["v"])
    for match in _LISTED.finditer(source):
        exports += [": ".join(reversed(pair.split(": "))) for pair in _renamed(match["names"], ": ")]
    body = _LISTED.sub("", _DECLARED.sub("", _IMPORT.sub(taken, source)))
    for odd in (*_LEFT.finditer(body), *_DYNAMIC.finditer(_COMMENT.sub("", body))):
        raise BundleError(f"{name}: not a form that can be bundled: {odd[0].strip()[:100]}")
    given = ", ".join(exports)
    order[path] = (
        f"// {name}\nconst module{len(order)} = (() => {{\n{body.rstrip()}\nreturn {{ {given} }};\n}})();\n"
    )


def _renamed(names: str, by: str) -> list[str]:
    """Return ``a``, ``b as c`` as ``a``, ``b: c``."""
    return [re.sub(r"\s+as\s+", by, name.strip()) for name in names.split(",") if name.strip()]
