"""``whyspan doctor``: what works on this host, what does not, why, and the one line that would change it."""

from __future__ import annotations

from pathlib import Path

import click

from whyspan.cli._options import btf_option, config_option, console


@click.command(name="doctor")
@config_option
@btf_option
@click.option("--no-attach", is_flag=True, help="Only look: do not try to load and attach the probes.")
@click.option("--network", is_flag=True, help="Also connect to the OTLP endpoint (TCP, and TLS for https).")
@click.option("--all", "everything", is_flag=True, help="Also print the checks of servers that are fine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/doctor.schema.json).")
def command(
    *,
    config_path: Path | None,
    btf: Path | None,
    no_attach: bool,
    network: bool,
    everything: bool,
    as_json: bool,
) -> int:
    """Check kernel, privileges, host, files and probes, and the inference servers found.

    Exit status: 0 everything works, 3 it works with something missing, 4 it does not work; 1 doctor itself failed,
    2 the command line or the configuration is wrong.
    """
    import json

    import msgspec

    from whyspan.config import load_config
    from whyspan.doctor.report import make
    from whyspan.doctor.show import show
    from whyspan.pipeline.settings import kernel_btf

    config = load_config(config_path)
    kernel = kernel_btf(str(btf) if btf else config.collector.btf)
    report = make(config, kernel, try_probes=not no_attach, connect=network)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        show(report, console(), everything=everything)
    return report.exit_status
