"""The numbers of the kinds of mark; equal to ``whyspan.marks.KINDS``, never reused."""

from __future__ import annotations

HELLO = 1
ARRIVED = 2
TOKENISED = 3
ENQUEUED = 4
QUEUED = 5
STEP = 6
STEP_DONE = 7
EXECUTED = 8
OUTPUT = 9
ABORTED = 10
STAGE = 11
SPAN_ON = 12
GENERATED = 13
CACHE_CHANGED = 14
LAYERS = 15
