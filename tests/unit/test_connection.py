"""Who ended a connection, from its state changes."""

from __future__ import annotations

import pytest
from whyspan.connection import client_left, ended_by

ESTABLISHED, FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING = 1, 4, 5, 6, 7, 8, 9, 11
EPIPE, ECONNABORTED, ECONNRESET, ETIMEDOUT, EHOSTUNREACH = 32, 103, 104, 110, 113


def by(old: int, new: int, aux: int = 0, *, error: int = 0, left: bool = False) -> str:
    return ended_by({"old_state": old, "new_state": new, "aux": aux, "error": error}, left)


@pytest.mark.parametrize(
    ("old", "new", "who"),
    [
        (ESTABLISHED, CLOSE_WAIT, ""),  # it may still read
        (FIN_WAIT1, FIN_WAIT2, ""),
        (ESTABLISHED, FIN_WAIT1, "server_close"),
        (CLOSE_WAIT, LAST_ACK, "client_close"),
        (FIN_WAIT1, CLOSE, "server_close"),
        (FIN_WAIT2, CLOSE, "server_close"),
        (CLOSING, CLOSE, "server_close"),
        (CLOSE_WAIT, CLOSE, "client_close"),
        (LAST_ACK, CLOSE, "client_close"),
        (ESTABLISHED, CLOSE, "server_reset"),
    ],
)
def test_without_an_error(old: int, new: int, who: str) -> None:
    assert by(old, new) == who


@pytest.mark.parametrize(
    ("error", "who"),
    [
        (EPIPE, "client_reset"),
        (ECONNRESET, "client_reset"),
        (ECONNABORTED, "server_reset"),
        (ETIMEDOUT, "timeout"),
        (EHOSTUNREACH, "timeout"),
    ],
)
def test_the_errno_tells_resets_from_time_outs(error: int, who: str) -> None:
    assert by(ESTABLISHED, CLOSE, error=error) == who


def test_a_reset_from_a_client_that_had_left_in_good_order() -> None:
    assert by(ESTABLISHED, 0, aux=1) == "client_reset"
    assert by(CLOSE_WAIT, 0, aux=1) == "client_close"
    assert by(0, 0, aux=1, left=True) == "client_close"
    assert by(ESTABLISHED, CLOSE, left=True) == "client_close"


def test_only_a_fin_says_that_the_client_left() -> None:
    assert client_left({"new_state": CLOSE_WAIT})
    assert not client_left({"new_state": LAST_ACK})


def test_recordings_without_the_errno_are_read() -> None:
    assert ended_by({"old_state": ESTABLISHED, "new_state": CLOSE, "aux": 0}, False) == "server_reset"
