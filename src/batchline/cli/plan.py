"""`batchline plan`: the order a run would take, without running it."""

from __future__ import annotations

from typing import Annotated

import typer


def plan(
    input_file: Annotated[str, typer.Argument(metavar="FILE", help="Batch file: a path, - or a URL.")],
    model: Annotated[str | None, typer.Option(help="Count tokens with this model's tokenizer (folder or id).")] = None,
    dedup: Annotated[bool, typer.Option(help="Run identical deterministic requests only once.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show in which groups a batch file would run, what they share, and what would run once for several lines."""
    from batchline.batch.inspect import plan_overview

    counter = None
    if model is not None:
        from batchline.batch.tokens import TokenCounter  # loads a tokenizer library

        counter = TokenCounter(model)
    overview = plan_overview(
        input_file, dedup=dedup, observer=counter, count_tokens=counter.num_text_tokens if counter else None
    )
    if as_json:
        import dataclasses

        import orjson

        tokens = dataclasses.asdict(counter.counts) if counter else None
        result = dataclasses.asdict(overview) | {"tokens": tokens}
        typer.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        return
    typer.echo(f"{overview.num_requests:,} requests in {overview.num_groups:,} groups")
    if overview.num_copies:
        typer.echo(f"{overview.num_copies:,} of them are served by an identical one's answer")
    if counter:
        typer.echo(f"{counter.counts.prompt:,} prompt tokens")
    for group in overview.largest:
        shared = f"{group.prefix_chars:,} characters shared" if group.prefix_chars else "no shared prefix"
        if group.prefix_tokens is not None:
            shared += f", about {group.prefix_tokens:,} tokens"
        typer.echo(f"{group.num_requests:>12,}  {group.url}  {group.model}  ({shared})")
        if group.prefix:
            typer.echo(f"              {' '.join(group.prefix.split())[:100]}")
