"""``observer.metric_lock``: the thread waited for a mutex inside a metrics library.

Only libraries of native code can be told by where they wait. Those in Python (prometheus_client) use the
interpreter's own locks, which are semaphores on the heap: no wait of theirs is told from a hand-over.
"""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.held import HeldRule, worth
from whyspan.causes.lock_owners import METRICS, owner
from whyspan.critical_path import Via
from whyspan.locks import MUTEX


class _MetricLock(HeldRule):
    id = "observer.metric_lock"
    title = "waiting for a mutex inside a metrics library"
    neighbours = ("lock.contention", "lock.framework", "observer.scrape")
    fix = "Try a counter or histogram per thread that is merged when it is read, or fewer observations per token."
    rank = 25
    nothing = "no wait for a mutex that a metrics library took"

    def takes(self, via: Via, ctx: Context) -> bool:
        """Take mutexes that the code of a metrics library waits for."""
        return via.kind == MUTEX and owner(via.library) == METRICS and worth(via, ctx)


RULE = _MetricLock()
