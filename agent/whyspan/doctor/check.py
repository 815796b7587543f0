"""One thing that doctor looked at, and how it judges it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from whyspan.text import clean

_MAX_TEXT = 400


class State(StrEnum):
    """How a check ended, from the best to the worst.

    note: worth knowing, nothing is lost. unknown: it could not be told. limited: something does not work. failed:
    whyspan does not work here.
    """

    OK = "ok"
    NOTE = "note"
    UNKNOWN = "unknown"
    LIMITED = "limited"
    FAILED = "failed"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report.

    Attributes:
        id: group and name, such as ``kernel.btf``; never renamed.
        title: the same for people.
        state: how it ended.
        found: what was there.
        lacks: what does not work for it; empty unless limited or failed.
        remedy: the one line that would change it.
    """

    id: str
    title: str
    state: State
    found: str
    lacks: str = ""
    remedy: str = ""

    @property
    def group(self) -> str:
        """What the id begins with."""
        return self.id.partition(".")[0]


class Subject:
    """What a check is about; its methods return how it ended."""

    def __init__(self, id_: str, title: str) -> None:
        self._id, self._title = id_, title

    def ok(self, found: str) -> Check:
        """All is well."""
        return self._made(State.OK, found)

    def note(self, found: str, remedy: str = "") -> Check:
        """Nothing is lost; *remedy* may make something better."""
        return self._made(State.NOTE, found, remedy=remedy)

    def unknown(self, found: str, remedy: str = "") -> Check:
        """It could not be told, for the reason given as *found*."""
        return self._made(State.UNKNOWN, found, remedy=remedy)

    def limited(self, found: str, lacks: str, remedy: str) -> Check:
        """whyspan works, without what *lacks* says."""
        return self._made(State.LIMITED, found, lacks, remedy)

    def failed(self, found: str, lacks: str, remedy: str) -> Check:
        """whyspan does not work."""
        return self._made(State.FAILED, found, lacks, remedy)

    def _made(self, state: State, found: str, lacks: str = "", remedy: str = "") -> Check:
        # What was found may come from a process that anybody has started.
        return Check(
            id=self._id,
            title=self._title,
            state=state,
            found=clean(found, _MAX_TEXT),
            lacks=clean(lacks, _MAX_TEXT),
            remedy=clean(remedy, _MAX_TEXT),
        )


_ORDER = {state: place for place, state in enumerate(State)}


def worst(checks: Iterable[Check]) -> State:
    """Return the state of all of them together: ok, limited or failed; what is not known makes it limited."""
    states = {State.OK if c.state is State.NOTE else c.state for c in checks}
    states = {State.LIMITED if s is State.UNKNOWN else s for s in states}
    return max(states, key=_ORDER.__getitem__, default=State.OK)
