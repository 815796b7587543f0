"""``whyspan run``: the daemon."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from whyspan.cli._options import btf_option, config_option
from whyspan.errors import ConfigError


@click.command(name="run")
@config_option
@click.option(
    "--pid", "pids", type=click.IntRange(min=1), multiple=True, help="Watch this process (repeatable)."
)
@click.option("--comm", "comms", multiple=True, help="Watch processes of this name (repeatable).")
@click.option("--unit", "units", multiple=True, help="Watch this systemd unit (repeatable).")
@click.option("--cgroup", "cgroups", multiple=True, help="Watch this control group (repeatable).")
@click.option("--service", default="", help="The service name of the processes named by these options.")
@click.option("--auto/--no-auto", default=None, help="Also look for known inference servers.")
@click.option("--record", type=click.Path(dir_okay=False), help="Write everything to a recording too.")
@btf_option
@click.option("--state-dir", type=click.Path(file_okay=False), help="Folder of the store and the socket.")
@click.option(
    "--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set any key of the file."
)
@click.option("-v", "--verbose", is_flag=True, help="Log at debug level.")
def command(
    *,
    config_path: Path | None,
    pids: tuple[int, ...],
    comms: tuple[str, ...],
    units: tuple[str, ...],
    cgroups: tuple[str, ...],
    service: str,
    auto: bool | None,
    record: str | None,
    btf: Path | None,
    state_dir: str | None,
    settings: tuple[str, ...],
    verbose: bool,
) -> None:
    """Watch inference servers and explain their slow requests, until SIGTERM or Ctrl-C."""
    from whyspan import log
    from whyspan.pipeline.run import supervise

    overrides: dict[str, Any] = {}
    for setting in settings:
        _set(overrides, setting)
    named: list[dict[str, Any]] = [{"pid": pid} for pid in pids]
    for key, values in (("comm", comms), ("unit", units), ("cgroup", cgroups)):
        named += [{key: value} for value in values]
    if named:
        # Absolute paths and all targets: the command line replaces the file's list, it does not add to it.
        overrides.setdefault("targets", {})["match"] = [
            t | ({"service": service} if service else {}) for t in named
        ]
        overrides["targets"].setdefault("auto", False)
    elif service:
        raise ConfigError("--service needs one of --pid, --comm, --unit, --cgroup")
    if auto is not None:
        overrides.setdefault("targets", {})["auto"] = auto
    if record:
        overrides.setdefault("collector", {})["record"] = str(Path(record).absolute())
    if btf:
        overrides.setdefault("collector", {})["btf"] = str(btf)
    if state_dir:
        overrides.setdefault("run", {})["state_dir"] = str(Path(state_dir).absolute())
    log.setup(verbose)
    sys.exit(supervise(config_path, overrides, verbose=verbose))


def _set(overrides: dict[str, Any], setting: str) -> None:
    """Merge one ``section.key=value`` into *overrides*; the value is TOML, or else taken as a string."""
    name, equals, value = setting.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"--set {setting}: not SECTION.KEY=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    place = overrides
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {setting}: {section} is not a section")
    place[key] = parsed
