"""The command line: one module per command in this package, each exporting ``command``; no list to edit."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import click

from whyspan import __version__
from whyspan.errors import WhyspanError
from whyspan.text import clean


class _Commands(click.Group):
    # Modules whose name starts with "_" are shared helpers. A command's module is imported only when needed.

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"{__name__}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="whyspan")
def group() -> None:
    """Tell why an LLM request was slow."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 for an error, 2 for a wrong command line or configuration."""
    try:
        status = group.main(
            args=None if argv is None else list(argv), prog_name="whyspan", standalone_mode=False
        )
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit(130)
    except WhyspanError as exc:
        click.echo(f"whyspan: {clean(str(exc), 1000)}", err=True)
        sys.exit(exc.exit_code)
    except BrokenPipeError:  # `whyspan slow | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
