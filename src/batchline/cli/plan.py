"""`batchline plan`: what a run would do and take, without running it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from batchline.cli.progress_text import duration
from batchline.errors import counted

if TYPE_CHECKING:
    from batchline.batch.inspect import PlanOverview
    from batchline.batch.rates import MeasuredRun
    from batchline.batch.tokens import TokenCounts


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a run would take. output_tokens and time_s: None where no run of the model has been measured.

    weight_bytes: of the model in memory, None where its files are not here.
    """

    prompt_tokens: int
    are_prompt_tokens_counted: bool
    output_tokens: int | None
    max_output_tokens: int | None
    time_s: float | None
    measured: MeasuredRun | None
    weight_bytes: int | None


def plan(
    input_file: Annotated[str, typer.Argument(metavar="FILE", help="Batch file: a path, - or a URL.")],
    model: Annotated[
        str | None, typer.Option(help="Model (folder or id): counts tokens, estimates time and memory.")
    ] = None,
    dedup: Annotated[bool, typer.Option(help="Run identical deterministic requests only once.")] = True,
    state_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder with records of runs. Default: the user's folder for state."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show in which groups a batch file would run, what they share, and what a run would take."""
    from batchline.batch.inspect import plan_overview
    from batchline.batch.tokens import CharacterCounter, TokenCounter

    counter = CharacterCounter() if model is None else TokenCounter(model)
    count_tokens = counter.num_text_tokens if isinstance(counter, TokenCounter) else None
    overview = plan_overview(input_file, dedup=dedup, observer=counter, count_tokens=count_tokens)
    estimate = _estimate(overview, counter.counts, model, state_dir)
    if as_json:
        tokens = None if model is None else dataclasses.asdict(counter.counts)
        numbers = dataclasses.asdict(estimate) | {
            "measured": None if estimate.measured is None else estimate.measured.model_dump()
        }
        result = dataclasses.asdict(overview) | {"tokens": tokens, "estimate": numbers}
        typer.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        return
    _print_numbers(overview, estimate, counter.counts, model)
    for group in overview.largest:
        shared = f"{counted(group.prefix_chars, 'character')} shared" if group.prefix_chars else "no shared prefix"
        if group.prefix_tokens is not None:
            shared += f", about {counted(group.prefix_tokens, 'token')}"
        typer.echo(f"{group.num_requests:>12,}  {group.url}  {group.model}  ({shared})")
        if group.prefix:
            typer.echo(f"              {' '.join(group.prefix.split())[:100]}")


def _estimate(overview: PlanOverview, counts: TokenCounts, model: str | None, state_dir: Path | None) -> Estimate:
    """What the requests take that are not copies of another."""
    from batchline.backends.identity import model_stamp
    from batchline.batch.rates import latest_measurement
    from batchline.batch.user_state import user_state_dir

    share = 1 - overview.num_copies / overview.num_requests if overview.num_requests else 1.0
    measured = None if model is None else latest_measurement(state_dir or user_state_dir(), model_stamp(model))
    prompt = round(counts.prompt * share)
    output = None if measured is None else round(_expected_output(counts, measured.output_tokens_per_request) * share)
    return Estimate(
        prompt_tokens=prompt,
        are_prompt_tokens_counted=model is not None,
        output_tokens=output,
        max_output_tokens=None if counts.unlimited else round(counts.output_limit * share),
        time_s=None if measured is None or output is None else measured.time_s(prompt, output),
        measured=measured,
        weight_bytes=None if model is None else _weight_bytes(model, measured),
    )


def _expected_output(counts: TokenCounts, usual: float) -> float:
    """usual: the mean length of an answer in the last run. A limit that is lower counts instead."""
    return min(counts.output_limit, counts.limited * usual) + counts.unlimited * usual


def _weight_bytes(model: str, measured: MeasuredRun | None) -> int | None:
    from batchline.backends.model_memory import weight_bytes
    from batchline.config import ModelConfig
    from batchline.errors import ModelLoadError
    from batchline.pooling.detection import detect_task

    dtype = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}.get(measured.dtype if measured else "")
    try:
        return weight_bytes(ModelConfig(model=model, dtype=dtype or "auto"), detect_task(model))  # type: ignore[arg-type]
    except ModelLoadError:
        return None


def _print_numbers(overview: PlanOverview, estimate: Estimate, counts: TokenCounts, model: str | None) -> None:
    typer.echo(f"{counted(overview.num_requests, 'request')} in {counted(overview.num_groups, 'group')}")
    if overview.num_copies:
        typer.echo(f"{counted(overview.num_copies, 'duplicate')} among them, served by an identical one's answer")
    if estimate.are_prompt_tokens_counted:
        typer.echo(f"Prompt tokens  {estimate.prompt_tokens:,}")
    else:
        typer.echo(f"Prompt tokens  about {estimate.prompt_tokens:,}, from their characters; --model counts them")
    typer.echo(f"Output tokens  {_output_text(estimate, counts)}")
    typer.echo(f"Time           {_time_text(estimate, model)}")
    if estimate.weight_bytes is not None:
        typer.echo(f"Memory         {estimate.weight_bytes / 2**20:,.0f} MiB for the model's weights, and the KV cache")


def _output_text(estimate: Estimate, counts: TokenCounts) -> str:
    limit = (
        f"at most {counts.output_limit:,}"
        if not counts.unlimited
        else f"{counted(counts.unlimited, 'request')} without a limit"
    )
    return limit if estimate.output_tokens is None else f"about {estimate.output_tokens:,} ({limit})"


def _time_text(estimate: Estimate, model: str | None) -> str:
    measured = estimate.measured
    if measured is None or estimate.time_s is None:
        hint = "run a part of the file with it" if model is not None else "name the model with --model"
        return f"unknown: no run of the model on this machine is known; {hint}"
    when = measured.measured_at.astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        f"about {duration(estimate.time_s)}, at the rates of the run of {when} "
        f"({measured.dtype} on {measured.device}, {measured.requests / measured.run_time_s:,.1f} requests/s)"
    )
