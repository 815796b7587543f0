"""``whyspan serve``: the page on this host that shows why the tail is slow."""

from __future__ import annotations

from pathlib import Path

import click

from whyspan.cli._options import store_options


@click.command(name="serve")
@store_options
@click.option("--listen", metavar="ADDRESS:PORT", help="Default: 127.0.0.1:9466; port 0 takes a free one.")
@click.option("--socket", metavar="FILE", help="Listen on this Unix socket instead.")
@click.option("--socket-mode", metavar="MODE", help="Mode of the socket, such as 0660 for its group.")
@click.option("--prefix", metavar="PATH", help="What all paths begin with, such as /whyspan.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name in Host headers besides localhost; repeatable.",
)
@click.option("--token-file", metavar="FILE", help="A file with the token that visitors must know.")
@click.option("--tls-certificate", metavar="FILE", help="Certificate chain (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its key (PEM), without a passphrase.")
def command(
    *, config_path: Path | None, store_path: Path | None, hosts: tuple[str, ...], **given: str | None
) -> None:
    """Show what is stored on a page, read-only; on this host only unless there are a token and TLS.

    Needs no right but to read the store. The options are keys of [page] in the configuration. Ends with Ctrl-C.
    """
    from whyspan.config import load_config
    from whyspan.page import server, settings

    changes = {name: value for name, value in given.items() if value is not None}
    overrides = {"page": changes | ({"hosts": list(hosts)} if hosts else {})}
    config = load_config(config_path, overrides if overrides["page"] else None)
    store = config.store_path if store_path is None else store_path
    server.run(settings.resolve(config.page, store), lambda address: _ready(address, store))


def _ready(address: str, store: Path) -> None:
    from whyspan.text import clean

    click.echo(f"whyspan: page at {clean(address)} (store {clean(str(store))})")
    if not store.exists():
        click.echo(
            "whyspan: there is no store there yet; the page shows it once `whyspan run` has made it", err=True
        )
