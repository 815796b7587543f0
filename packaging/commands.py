"""Write the man pages and print the completions of ``whyspan``: run by the build's interpreter (click-man).

``python commands.py MODULES PAGES VERSION``: MODULES is the package's site-packages, PAGES the folder of the pages.
Prints a JSON object: shell -> script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, get_completion_class
from click_man.core import write_man_pages

FILES = """\
.SH FILES
.TP
\\fI/etc/whyspan/whyspan.toml\\fP
The configuration: every key is there with its default.
.TP
\\fI/etc/whyspan/exporter.env\\fP
Environment of the exporter, such as a secret in OTEL_EXPORTER_OTLP_HEADERS. Not there by default.
.TP
\\fI/var/lib/whyspan\\fP
The store, what waits for an OpenTelemetry collector, and what is usual for each service.
.SH SEE ALSO
.BR systemctl (1),
.BR journalctl (1)
"""


def plain(group: click.Group) -> click.Group:
    """Return a group whose commands are all there: click-man does not ask for those that come when needed."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    commands = {name: command for name, command in found.items() if command is not None}
    for command in commands.values():
        _summarise(command)
    return click.Group("whyspan", commands=commands, params=group.params, help=group.help)


def _summarise(command: click.Command) -> None:
    # click-man would cut the line of NAME after 45 characters.
    command.short_help = command.short_help or (command.help or "").split("\n\n")[0].replace(
        "\n", " "
    ).rstrip(".")
    for one in getattr(command, "commands", {}).values():
        _summarise(one)


def completions(group: click.Group) -> dict[str, str]:
    """Return the completion script of each shell; none of the shells need be here."""
    # Which bash this machine has tells nothing of the one that will read the script.
    BashComplete._check_version = staticmethod(lambda: None)  # type: ignore[method-assign]
    scripts: dict[str, str] = {}
    for shell in ("bash", "zsh", "fish"):
        kind: Any = get_completion_class(shell)
        scripts[shell] = kind(group, {}, "whyspan", "_WHYSPAN_COMPLETE").source()
    return scripts


def main() -> int:
    """Do both."""
    modules, pages, version = sys.argv[1:]
    sys.path.append(modules)
    from whyspan.cli import group

    commands = plain(group)
    write_man_pages("whyspan", commands, version=version, target_dir=pages)
    with Path(pages, "whyspan.1").open("a") as page:
        page.write(FILES)
    json.dump(completions(group), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
