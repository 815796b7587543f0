"""A wait for a lock of many sleeps is looked at once, not once for each; shortcuts say what the long way says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whyspan.locks import Locks
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, UNKNOWN_STATE

from tests.unit.test_locks import BITSET, COND, TIMED, builder
from tests.unit.timeline import EPOLL_WAIT, HOG, LOOP, EventBuilder, ns, request


def polling(sleeps: int) -> EventBuilder:
    """LOOP asks for the interpreter lock again and again; nobody is seen to have it."""
    b = builder().into(-5, LOOP)
    for k in range(sleeps):
        t = 1 + 0.12 * k
        b.locked(t, LOOP, COND, op=BITSET | TIMED, val=0)
        b.wake(t + 0.1, LOOP, HOG, context=1).into(t + 0.105, LOOP)
    return b.out(2 + 0.12 * sleeps, LOOP, nr=EPOLL_WAIT)


def compared(sleeps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many pairs of sleeps were compared to explain a request that waits so often."""
    count = 0
    same = Locks._same

    def counted(self: Locks, *arguments: object) -> bool:
        nonlocal count
        count += 1
        return same(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Locks, "_same", counted)
        polling(sleeps).classify(request(0, 1.5 + 0.12 * sleeps))
    return count


def test_the_sleeps_of_one_wait_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(50, monkeypatch) == 50  # and the last with what comes after
    assert compared(200, monkeypatch) == 200


def test_every_sleep_of_a_wait_has_the_same_answer() -> None:
    timelines = polling(7).timelines(0, 0)
    thread = timelines.thread(LOOP)
    locks = timelines.shared(Locks)
    at = [i for i, t in enumerate(thread.ts) if thread.before(t + 1).state == BLOCKED][:7]
    found = {locks.find(LOOP, thread, i, thread.wait(i)) for i in at}
    assert len(at) == 7
    (lock,) = found
    assert lock is not None
    assert (lock.start_ns, lock.end_ns) == (ns(1), ns(1.82))


@given(
    st.lists(
        st.tuples(st.sampled_from(["in", "off", "block", "wake"]), st.integers(0, 2)), min_size=1, max_size=12
    )
)
def test_a_look_says_what_the_interval_says(steps: list[tuple[str, int]]) -> None:
    b = EventBuilder()
    for k, (what, throttled) in enumerate(steps):
        if what == "in":
            b.into(k, LOOP, throttled_ms=throttled)
        elif what == "wake":
            b.wake(k, LOOP, HOG)
        else:
            b.out(k, LOOP, 0 if what == "off" else 1, flags=throttled, throttled_ms=throttled)
    thread = b.timelines(0, 0).thread(LOOP)
    for k in range(len(steps) + 1):
        state = thread.before(ns(k)).state
        assert thread.awake(ns(k)) == (state not in (BLOCKED, UNKNOWN_STATE))
        if thread.rests(ns(k)):
            assert state not in (RUNNING, RUNNABLE)
