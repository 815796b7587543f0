"""Errors by who can fix them; only the CLI turns them into exit codes."""

from __future__ import annotations


class WhyspanError(Exception):
    """Base class: one clear line for the user."""

    exit_code = 1


class ConfigError(WhyspanError):
    """The configuration or the command line is wrong; the user edits it."""

    exit_code = 2


class RecordingError(WhyspanError):
    """A recording cannot be read: wrong version, or not a recording."""


class StoreError(WhyspanError):
    """The local store cannot be opened, read or written."""


class QueryError(ConfigError):
    """A question to the store that makes no sense; whoever asks it mends it."""
