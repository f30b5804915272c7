"""`batchline run-batch`: one batch file in, one result file out."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from batchline.cli.backend_options import BackendOptions
from batchline.cli.config_file import takes_config_file
from batchline.cli.media_options import MediaOptions
from batchline.cli.messages import LogFormatOption, QuietOption, configure, last_words
from batchline.cli.model_options import ModelOptions, refuse_without_model
from batchline.cli.option_groups import takes_options
from batchline.cli.run_options import RunFileOptions
from batchline.cli.summary import print_summary
from batchline.cli.terminal import LineReporter, open_reporter
from batchline.cli.values import together
from batchline.errors import counted

if TYPE_CHECKING:
    from batchline.batch.progress import Reporter
    from batchline.cli.live_bar import LiveBar

_METRICS = "Metrics"


@takes_config_file
@takes_options("model_options", ModelOptions)
@takes_options("media_options", MediaOptions)
@takes_options("backend_options", BackendOptions)
@takes_options("run_file", RunFileOptions)
def run_batch(
    context: typer.Context,
    run_file: RunFileOptions,
    model_options: ModelOptions,
    media_options: MediaOptions,
    backend_options: BackendOptions,
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
    # numpy and an HTTP client: not for --help
    from batchline.batch.api import for_backend, keeping_media, run_blocking

    make_engines = partial(model_options.engines, strict=run_file.strict, media=media_options.config())
    together(make_engines, media_options.refuse_wrong_networks)
    engines = make_engines()
    backend_options.make(engines)  # refuses what is wrong with its options before the input is looked at
    if not engines:
        refuse_without_model(context)
    files = run_file.run_files()
    engines = tuple(keeping_media(engines, files))
    backend = backend_options.make(engines)
    options = for_backend(run_file.run_options(), backend, backend_options.backend, engines)
    with ExitStack() as stack:
        reporter: Reporter
        shown = reporter = stack.enter_context(open_reporter())
        if enable_metrics:
            from batchline.cli.metrics_endpoint import serve_metrics  # an HTTP server, for this option alone

            reporter = stack.enter_context(serve_metrics(reporter, host, port))
        summary = run_blocking(files, options, backend, reporter, stop_at_once=partial(_stop_at_once, shown))
    print_summary(summary)
    if summary.has_only_failures or (run_file.fail_on_error and summary.failed):
        raise typer.Exit(3)


def _stop_at_once(shown: LiveBar | LineReporter) -> None:
    """Leave without waiting for threads: the journal is whole at every moment."""
    latest = shown.latest
    left = "" if latest is None else f" {latest.total - latest.done:,} of {counted(latest.total, 'request')} are left."
    last_words(f"Stopped.{left} Finished results are saved; run the same command again to resume.")
    os._exit(130)
