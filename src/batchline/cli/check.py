"""`batchline check`: everything that can be known about a batch file before a model is loaded."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchline.cli.limits import LimitPreset, MaxFileSize, MaxRequests, limits_of
from batchline.cli.values import parse_request_limits
from batchline.errors import UsageError

_SHOWN_FAULTS = 20


def check(
    input_file: Annotated[str, typer.Argument(metavar="FILE", help="Batch file: a path, - or a URL.")],
    model: Annotated[
        list[str] | None, typer.Option(help="Name of a served model. Repeatable; default: any name.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Count tokens with this tokenizer (folder or id).")] = None,
    max_requests: MaxRequests = None,
    max_file_size: MaxFileSize = None,
    limits: LimitPreset = "none",
    request_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="Change a limit on the contents of one request, e.g. stop=256. Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a batch file without running it. Exit code 3 if anything in it will fail."""
    from batchline.batch.check import CheckReport, findings_of, refuse_over_limits
    from batchline.batch.inspect import NO_MODEL_NAMED, LimitObserver, checked_input

    limited = LimitObserver(parse_request_limits(request_limit or []))
    counter = None
    if tokenizer is not None:
        from batchline.batch.tokens import TokenCounter  # loads a tokenizer library

        counter = TokenCounter(tokenizer)

    def observe(position: int, url: str, body: dict[str, Any]) -> None:
        limited(position, url, body)
        if counter is not None:
            counter(position, url, body)

    def findings(report: CheckReport) -> list[str]:
        found = findings_of(report, model or None) + limited.findings()
        try:
            refuse_over_limits(report, limits_of(limits, max_requests, max_file_size))
        except UsageError as error:
            found.append(str(error))
        return found

    only_model = NO_MODEL_NAMED if not model else model[0] if len(model) == 1 else None
    with checked_input(input_file, default_model=only_model, observer=observe) as checked:
        report, found = checked.report, findings(checked.report)
    counts = counter.counts if counter else None
    if as_json:
        _print_json(report, found, counts)
    else:
        _print_report(report, found, counts)
    if found:
        raise typer.Exit(3)


def _print_report(report: Any, found: list[str], counts: Any) -> None:
    typer.echo(f"{report.num_lines:,} requests, {report.num_bytes:,} bytes")
    for group in report.groups.values():
        typer.echo(f"  {group.count:>12,}  {group.url}  {group.model}")
    if counts is not None:
        typer.echo(f"{counts.prompt:,} prompt tokens, the longest prompt has {counts.longest_prompt:,}")
        typer.echo(f"at most {counts.output_limit:,} output tokens where requests set a limit")
        if counts.unlimited:
            typer.echo(f"{counts.unlimited:,} requests set no limit of output tokens")
        if counts.with_control_tokens:
            typer.echo(
                f"{counts.with_control_tokens:,} requests hold control tokens in their messages, the first is "
                f"{counts.control_token_example} (see --special-tokens-in-content of run-batch)"
            )
        if counts.uncounted:
            typer.echo(f"{counts.uncounted:,} requests have a prompt that cannot be counted")
    for finding in found:
        typer.echo(finding)
    for fault in report.faults[:_SHOWN_FAULTS]:
        typer.echo(f"  line {fault.line_number}: {fault.code}: {fault.message}")
    if report.num_faults > _SHOWN_FAULTS:
        typer.echo(f"  ... and {report.num_faults - _SHOWN_FAULTS:,} more; --json lists up to {len(report.faults):,}")
    if not found:
        typer.echo("Nothing is wrong with it.")


def _print_json(report: Any, found: list[str], counts: Any) -> None:
    import dataclasses

    import orjson

    result = {
        "requests": report.num_lines,
        "bytes": report.num_bytes,
        "sha256": report.digest,
        "groups": [dataclasses.asdict(group) for group in report.groups.values()],
        "bad_lines": report.num_faults,
        "bad_lines_by_code": report.faults_by_code,
        "errors": [dataclasses.asdict(fault) for fault in report.faults],
        "findings": found,
        "tokens": None if counts is None else dataclasses.asdict(counts),
    }
    typer.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2))
