"""Names of functions as people read them: without parameters, and templates only as long as they are short."""

from __future__ import annotations

import re
from typing import Final

#: Longer names lose what stands in their angle brackets.
_LONG: Final = 80
_MAX: Final = 2048
#: What compilers append to parts and copies of a function, as it is and as it is demangled.
_COPY: Final = re.compile(
    r"(?:\.(?:isra|part|constprop|cold|lto_priv|localalias|llvm|clone|warm|hot|unlikely)(?:\.\d+)*)+$"
    r"|(?: \[clone [^]]*\])+$|(?: \(\.[\w.]+\))+$"
)
_RUST_HASH: Final = re.compile(r"::h[0-9a-f]{16}$")
_RUST: Final = {
    "$LT$": "<",
    "$GT$": ">",
    "$RF$": "&",
    "$BP$": "*",
    "$LP$": "(",
    "$RP$": ")",
    "$C$": ",",
    "$u20$": " ",
    "$u7b$": "{",
    "$u7d$": "}",
    "$u27$": "'",
    "$u5b$": "[",
    "$u5d$": "]",
    "..": "::",
}
_ESCAPED: Final = re.compile("|".join(re.escape(k) for k in _RUST))
#: Brackets in the name of an operator are not those of parameters or templates: they stand aside meanwhile.
_OPERATOR: Final = re.compile(
    r"\boperator *(\(\)|<=>|<<=|>>=|->\*|<<|>>|<=|>=|->|<|>|new\[\]|delete\[\]|new|delete)"
)
_QUALIFIERS: Final = re.compile(r"(?: (?:const|volatile)| ?&{1,2}| noexcept)+$")
_ASIDE: Final = str.maketrans("()<> ", "\ue000\ue001\ue002\ue003\ue004")
_BACK: Final = str.maketrans("\ue000\ue001\ue002\ue003\ue004", "()<> ")


def shorten(name: str) -> str:
    """Return the qualified name of a function: ``void a::f<int>(char*) [clone .cold]`` is ``a::f<int>``.

    Names of C pass as they are. What is no name at all comes back as something, too.
    """
    name = _COPY.sub("", name[:_MAX])
    if _RUST_HASH.search(name):
        return _fold(_ESCAPED.sub(lambda m: _RUST[m[0]], _RUST_HASH.sub("", name).removeprefix("_")))
    if "(" not in name and "<" not in name:
        return name
    text = _OPERATOR.sub(lambda m: m[0].translate(_ASIDE), name)
    text = text.replace("(anonymous namespace)", "{anonymous}").replace(" <", "<")
    text = _without_parameters(text)
    return _fold(text).translate(_BACK) or name


def _without_parameters(text: str) -> str:
    """Leave out what stands in round brackets outside angle ones, what follows them, and what the function returns."""
    out: list[str] = []
    angle = round_ = blank = 0
    for c in text:
        if not angle and c in "()":
            round_ = max(0, round_ + (1 if c == "(" else -1))
        elif not round_:
            angle = max(0, angle + (c == "<") - (c == ">"))
            out.append(c)
    kept = _QUALIFIERS.sub("", "".join(out))
    angle = 0
    end = kept.find("operator ")  # of a conversion: the type follows
    for i, c in enumerate(kept if end < 0 else kept[:end]):
        angle = max(0, angle + (c == "<") - (c == ">"))
        if c == " " and not angle:
            blank = i + 1
    return kept[blank:]


def _fold(text: str) -> str:
    """Empty the outermost angle brackets of a name that is long; at its beginning they hold a type of Rust's."""
    if len(text) <= _LONG or text.startswith("<"):
        return text
    out: list[str] = []
    angle = 0
    for c in text:
        if c == "<":
            angle += 1
            if angle == 1:
                out.append("<…>")
        elif c == ">" and angle:
            angle -= 1
        elif not angle:
            out.append(c)
    return "".join(out)
