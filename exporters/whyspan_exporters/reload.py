"""A reload of the exporter: the sinks that something has changed for are closed and opened anew."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from whyspan.config import Config
from whyspan.errors import WhyspanError
from whyspan.reloading import changes

from whyspan_exporters.sinks import Sink, dependencies, reopen_sinks

log = logging.getLogger("whyspan.exporter")


class Reloader:
    """Knows with which configuration the sinks were opened."""

    def __init__(self, config: Config, load: Callable[[], Config], sinks: dict[str, Sink]) -> None:
        """*load* reads the configuration again; *sinks* is changed in place."""
        self._config, self._load, self._sinks = config, load, sinks
        self._depends = dependencies(config)

    def reload(self) -> None:
        """Take over the configuration; a wrong one is an error in the log, and the old one stays.

        Raises:
            WhyspanError: A sink can be opened neither as the new nor as the old configuration says.
        """
        try:
            new = self._load()
        except WhyspanError as e:
            log.error("not reloaded, the old configuration stays: %s", e)
            return
        restart = changes(self._config, new).restart
        if restart:
            log.warning("%s: taken over at the next start", ", ".join(restart))
            new = msgspec.structs.replace(new, run=self._config.run)
        done = reopen_sinks(self._sinks, self._config, new, self._depends)
        self._config, self._depends = new, dependencies(new)
        log.info("reloaded: %s", f"opened anew: {', '.join(done)}" if done else "no output has changed")
