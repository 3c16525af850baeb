"""`appliance doctor`: checks machine, settings, model files and server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.errors import ConfigError


def doctor(
    read: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Say instead what is made of everything unusual in this folder or .gguf file.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Check this model, and run it here if no server answers."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask this server, not the configured one.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file that the server is started with.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Neither read model files nor ask for an answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="As a bug report in Markdown, without secrets.")
    ] = False,
) -> None:
    """Check machine, settings, model files and server; each finding says how to fix it.

    With MODEL, read that model alone: its settings, tensors, tokens and templates.

    Nothing is changed or fetched. The exit status is 1 if a finding is a failure.
    """
    from appliance.doctor.examination import examine, scope_of
    from appliance.doctor.finding import Grade, as_line, as_markdown, summary
    from appliance.doctor.finding import as_json as write_json
    from appliance.doctor.model_contents import CONTENTS
    from appliance.doctor.redaction import hide_keys, hide_people

    if as_json and report:
        raise ConfigError("--json and --report were given; leave one out")
    if read is not None and (model or url or quick):
        raise ConfigError("MODEL is read without a server; leave out --model, --url and --quick")
    scope = scope_of(config, read or model, url, is_quick=quick)
    findings = []
    for finding in examine(scope, None if read is None else CONTENTS):
        findings.append(finding)
        if not (as_json or report):
            typer.echo(hide_keys(as_line(finding), scope))
    if report:
        typer.echo(hide_people(hide_keys(as_markdown(findings), scope)))
    else:
        text = write_json(findings) if as_json else f"\n{summary(findings)}"
        typer.echo(hide_keys(text, scope))
    if any(finding.grade is Grade.FAIL for finding in findings):
        raise typer.Exit(1)
