"""Errors of the probe framework, by who can fix them."""

from __future__ import annotations


class ProbeFrameworkError(Exception):
    """Base class; its text is one clear line."""


class LibbpfMissingError(ProbeFrameworkError):
    """No libbpf >= 1.3 was found; reinstall the package or name one in WHYSPAN_LIBBPF."""


class PrivilegeError(ProbeFrameworkError):
    """The kernel refused for lack of CAP_BPF or CAP_PERFMON; run as root or grant them."""


class BtfFileError(ProbeFrameworkError):
    """The file that was named as the kernel's BTF cannot serve; the user names another."""


class ProbeError(ProbeFrameworkError):
    """A probe's object and its declaration disagree, or it cannot be opened; a developer fixes it.

    ``log`` holds the tail of the verifier's or libbpf's output, for ``doctor`` and ``--verbose``.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
