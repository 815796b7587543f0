"""Why a burst does not take place; each is one clear line."""

from __future__ import annotations

from whyspan.errors import WhyspanError


class BurstError(WhyspanError):
    """It cannot be done here, or not to this process; the message says what is missing."""


class TooDearError(BurstError):
    """It would slow the process down more than the bound allows; ``--force`` does it all the same."""
