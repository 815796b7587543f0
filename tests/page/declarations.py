"""Writes the page's TypeScript declarations (`assets/shapes.d.ts`) from the structs that the server sends.

``python -m tests.page.declarations`` after a change of ``whyspan.views.shapes``; a test says when it was forgotten.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from whyspan import page
from whyspan.views import shapes

PATH: Final = Path(page.__file__).with_name("assets") / "shapes.d.ts"
_HEAD: Final = (
    "// Made from agent/whyspan/views/shapes.py by `python -m tests.page.declarations`."
    " Types only: no file of this name is loaded.\n"
)
_PLAIN: Final[dict[Any, str]] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    Any: "any",
    type(None): "null",
}


def written() -> str:
    """Return the declarations of all structs."""
    structs = [
        s
        for s in vars(shapes).values()
        if isinstance(s, type) and issubclass(s, msgspec.Struct) and s is not msgspec.Struct
    ]
    return _HEAD + "".join(_struct(s) for s in structs)


def _struct(struct: type[msgspec.Struct]) -> str:
    hints = get_type_hints(struct)
    fields = [(name, _type(hints[name])) for name in struct.__struct_fields__]
    text = " ".join((struct.__doc__ or "").split("\n\n")[0].split())
    doc = f"\n/** {text} */\n" if text else "\n"
    if struct.__struct_config__.array_like:
        return f"{doc}export type {struct.__name__} = [{', '.join(f'{n}: {t}' for n, t in fields)}];\n"
    body = "".join(f"  {n}: {t};\n" for n, t in fields)
    return f"{doc}export interface {struct.__name__} {{\n{body}}}\n"


def _type(hint: Any) -> str:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is list:
        inner = _type(args[0])
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if origin is dict:
        return f"Record<{_type(args[0])}, {_type(args[1])}>"
    if origin is tuple:
        return f"[{', '.join(_type(a) for a in args)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(_type(a) for a in args)
    if origin is Literal:
        return " | ".join(f'"{a}"' for a in args)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint.__name__
    raise TypeError(f"{hint} has no TypeScript type here")


if __name__ == "__main__":
    PATH.write_text(written())
