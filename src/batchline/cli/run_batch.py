"""`batchline run-batch`: one batch file in, one result file out; and `retry`, which runs failed lines again."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from batchline.cli.backend_options import BackendOptions
from batchline.cli.config_file import takes_config_file
from batchline.cli.media_options import MediaOptions
from batchline.cli.messages import LogFormatOption, QuietOption, configure, last_words, log
from batchline.cli.model_options import ModelOptions, refuse_without_model
from batchline.cli.option_groups import takes_options
from batchline.cli.run_options import RetryFileOptions, RunFileOptions
from batchline.cli.summary import print_summary
from batchline.cli.terminal import LineReporter, open_reporter
from batchline.cli.values import together
from batchline.cli.via_options import ViaOptions
from batchline.errors import UsageError, counted

if TYPE_CHECKING:
    from batchline.backends.base import Backend
    from batchline.batch.bulk import BulkService
    from batchline.batch.files import RunFiles
    from batchline.batch.options import RunOptions
    from batchline.batch.progress import Reporter
    from batchline.batch.summary import RunSummary
    from batchline.cli.live_bar import LiveBar

_METRICS = "Metrics"
_RETRY_FIELDS = [field.name for field in dataclasses.fields(RetryFileOptions) if field.name != "overwrite"]
"""A retry always replaces the output."""


@takes_config_file
@takes_options("model_options", ModelOptions)
@takes_options("media_options", MediaOptions)
@takes_options("backend_options", BackendOptions)
@takes_options("via_options", ViaOptions)
@takes_options("run_file", RunFileOptions)
def run_batch(
    context: typer.Context,
    run_file: RunFileOptions,
    model_options: ModelOptions,
    media_options: MediaOptions,
    backend_options: BackendOptions,
    via_options: ViaOptions,
    enable_metrics: Annotated[
        bool,
        typer.Option("--enable-metrics", help="Serve Prometheus metrics on /metrics.", rich_help_panel=_METRICS),
    ] = False,
    host: Annotated[str, typer.Option(help="Address of the metrics server.", rich_help_panel=_METRICS)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the metrics server.", rich_help_panel=_METRICS)
    ] = 8000,
    log_format: LogFormatOption = "text",
    quiet: QuietOption = False,
) -> None:
    """Run every request of a batch file and write one result for each. Run it again to resume."""
    configure(log_format, quiet=quiet)
    if not enable_metrics and any(_is_given(context, name) for name in ("host", "port")):
        log("--host and --port have no effect without --enable-metrics.", "warning")
    prepared = _prepared(context, run_file, model_options, media_options, backend_options, via_options)
    with open_reporter() as shown:
        if not enable_metrics:
            summary = _run(*prepared, shown, shown)
        else:
            from batchline.cli.metrics_endpoint import serve_metrics  # an HTTP server, for this option alone

            with serve_metrics(shown, host, port) as reporter:
                summary = _run(*prepared, reporter, shown)
    _end(summary, run_file)


@takes_config_file
@takes_options("model_options", ModelOptions)
@takes_options("media_options", MediaOptions)
@takes_options("backend_options", BackendOptions)
@takes_options("via_options", ViaOptions)
@takes_options("run_file", RetryFileOptions, only=_RETRY_FIELDS)
def retry(
    context: typer.Context,
    run_file: RetryFileOptions,
    model_options: ModelOptions,
    media_options: MediaOptions,
    backend_options: BackendOptions,
    via_options: ViaOptions,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="CODES",
            help="Retry only lines that failed with these HTTP statuses or error codes, comma-separated, e.g. 500,503.",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
    quiet: QuietOption = False,
) -> None:
    """Run only the failed lines of an earlier run again, and keep its other results."""
    configure(log_format, quiet=quiet)
    from batchline.batch.options import Retry
    from batchline.batch.retrying import refuse_unreadable_results

    codes = () if only is None else tuple(sorted({code.strip() for code in only.split(",")}))
    if "" in codes:
        raise UsageError(f"--only takes codes separated by commas, such as 500,503, not {only!r}.")
    files, options, answering = _prepared(context, run_file, model_options, media_options, backend_options, via_options)
    refuse_unreadable_results(files)
    options = dataclasses.replace(options, retry=Retry(codes))
    with open_reporter() as shown:
        summary = _run(files, options, answering, shown, shown)
    _end(summary, run_file)


def _prepared(
    context: typer.Context,
    run_file: RunFileOptions,
    model_options: ModelOptions,
    media_options: MediaOptions,
    backend_options: BackendOptions,
    via_options: ViaOptions,
) -> tuple[RunFiles, RunOptions, Backend | BulkService]:
    """A run, and what answers it. Raises: UsageError."""
    via_options.refuse_conflicts(context)
    if via_options.via is None:
        return _run_here(context, run_file, model_options, media_options, backend_options)
    answering = via_options.hosted_run(run_file)
    options = via_options.run_options(run_file, model_options.model)
    return run_file.run_files(), options, answering


def _run(
    files: RunFiles,
    options: RunOptions,
    answering: Backend | BulkService,
    reporter: Reporter,
    shown: LiveBar | LineReporter,
) -> RunSummary:
    """shown: shows the progress, which the last message reports."""
    from batchline.batch.api import run_blocking  # numpy: not for --help

    return run_blocking(files, options, answering, reporter, stop_at_once=partial(_stop_at_once, shown))


def _end(summary: RunSummary, run_file: RunFileOptions) -> None:
    print_summary(summary)
    if summary.has_only_failures or (run_file.fail_on_error and summary.failed):
        raise typer.Exit(3)


def _run_here(
    context: typer.Context,
    run_file: RunFileOptions,
    model_options: ModelOptions,
    media_options: MediaOptions,
    backend_options: BackendOptions,
) -> tuple[RunFiles, RunOptions, Backend]:
    """A run that a backend of this process answers. Raises: UsageError."""
    from batchline.batch.api import for_backend, keeping_media  # numpy: not for --help

    make_engines = partial(model_options.engines, strict=run_file.strict, media=media_options.config())
    together(make_engines, media_options.refuse_wrong_networks)
    engines = make_engines()
    backend_options.make(engines)  # refuses what is wrong with its options before the input is looked at
    if not engines:
        refuse_without_model(context, *(option.name for option in dataclasses.fields(MediaOptions)))
    files = run_file.run_files()
    engines = tuple(keeping_media(engines, files))
    backend = backend_options.make(engines)
    return files, for_backend(run_file.run_options(), backend, backend_options.backend, engines), backend


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line; a shared configuration file may have a server's."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _stop_at_once(shown: LiveBar | LineReporter) -> None:
    """Leave without waiting for threads: the journal is whole at every moment."""
    latest = shown.latest
    left = "" if latest is None else f" {latest.total - latest.done:,} of {counted(latest.total, 'request')} are left."
    last_words(f"Stopped.{left} Finished results are saved; run the same command again to resume.")
    os._exit(130)
