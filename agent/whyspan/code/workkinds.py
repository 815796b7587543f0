"""What kind of work a stack does: tokenisation, JSON, logging, ..., from a data file of known frames."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from whyspan.errors import ConfigError
from whyspan.model import CodeFrame

BUILT_IN: Final = Path(__file__).with_name("known_frames.toml")
_MAX_BYTES: Final = 1 << 20
_CACHED: Final = 16384
#: The interpreter's own function that runs frames of Python: what lies below it is the interpreter.
_EVALUATION: Final = re.compile(r"_PyEval_|PyEval_|_TAIL_CALL_")
_NAMED: Final = re.compile(r"(.+) \[(.+)\]")

_Pattern = Annotated[str, Meta(min_length=1, max_length=200)]


class _Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=60)]
    frames: list[_Pattern] = []
    native: list[_Pattern] = []
    fix: Annotated[str, Meta(max_length=300)] = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: list[_Kind]


class Kind(NamedTuple):
    """A kind of work, and what may be done about it."""

    name: str
    fix: str


def load(path: Path) -> list[_Kind]:
    """Read a file of known frames.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as f:
            data = f.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"known frames: {path} is larger than {_MAX_BYTES >> 20} MiB")
        return msgspec.toml.decode(data, type=_File).kind
    except OSError as e:
        raise ConfigError(f"known frames: cannot read {path}: {e.strerror}") from e
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as e:
        raise ConfigError(f"known frames: {path}: {e}") from e


def _any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    # The end of a path: a pattern begins at the whole or behind a slash.
    return re.compile("|".join(f"(?:.*/)?{fnmatch.translate(p)}" for p in patterns))


class WorkKinds:
    """Tells kinds. Files given later come first: a frame that the user lists is of the user's kind."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Read the built-in file, and others of that form.

        Raises:
            ConfigError: one cannot be read, or is none.
        """
        kinds = [k for path in [*reversed(list(files)), BUILT_IN] for k in load(path)]
        self._frames = [(Kind(k.name, k.fix), p) for k in kinds if (p := _any_of(k.frames)) is not None]
        self._native = [(Kind(k.name, k.fix), p) for k in kinds if (p := _any_of(k.native)) is not None]
        self._of_frame = lru_cache(_CACHED)(self._look_at_frame)
        self._of_native = lru_cache(_CACHED)(self._look_at_native)

    def of(self, python: Sequence[CodeFrame], native: Sequence[str]) -> Kind | None:
        """Return the kind of a stack, frames as of `StackFact`; None when no frame is known."""
        for name in native:
            if python and _EVALUATION.match(name):
                break
            if (kind := self._of_native(name)) is not None:
                return kind
        return next((k for f in python if (k := self._of_frame(f.file, f.function)) is not None), None)

    def _look_at_frame(self, file: str, function: str) -> Kind | None:
        text = f"{file}:{function}"
        return next((kind for kind, pattern in self._frames if pattern.match(text)), None)

    def _look_at_native(self, name: str) -> Kind | None:
        named = _NAMED.fullmatch(name)
        text = f"{named[2]}:{named[1]}" if named else name
        return next((kind for kind, pattern in self._native if pattern.match(text)), None)
