"""How a connection came to its end, from the state changes of its socket."""

from __future__ import annotations

from typing import Any, Final

# include/net/tcp_states.h
FIN_WAIT1: Final = 4
FIN_WAIT2: Final = 5
CLOSE: Final = 7
CLOSE_WAIT: Final = 8
LAST_ACK: Final = 9
CLOSING: Final = 11

RESET_RECEIVED: Final = 1  # aux of sock_state

# errno: the peer reset the connection; the kernel or an administrator cut it off.
_BY_PEER: Final = (32, 104)  # EPIPE, ECONNRESET
_ABORTED: Final = 103  # ECONNABORTED

_CLIENT_FIRST: Final = (CLOSE_WAIT, LAST_ACK)
_SERVER_FIRST: Final = (FIN_WAIT1, FIN_WAIT2, CLOSING)


def client_left(mark: dict[str, Any]) -> bool:
    """Return whether the change is the client closing its side; it may still be reading."""
    return bool(mark["new_state"] == CLOSE_WAIT)


def ended_by(mark: dict[str, Any], left: bool) -> str:
    """Return who ended the connection by this change, or an empty string when it goes on.

    Args:
        mark: A ``sock_state`` event.
        left: The client was seen closing its side before.
    """
    old, new = mark["old_state"], mark["new_state"]
    left = left or old in _CLIENT_FIRST
    if mark["aux"] == RESET_RECEIVED:
        # A client that has closed its socket resets whatever still comes: it left in good order before.
        return "client_close" if left else "client_reset"
    if new in (FIN_WAIT1, LAST_ACK):
        return "client_close" if left or new == LAST_ACK else "server_close"
    if new != CLOSE:
        return ""
    if left:
        return "client_close"
    if old in _SERVER_FIRST:
        return "server_close"
    error = mark.get("error", 0)
    if error in _BY_PEER:
        return "client_reset"
    # Closed at one stroke without an error: with bytes unread, or without lingering. The peer gets a reset.
    return "timeout" if error and error != _ABORTED else "server_reset"
