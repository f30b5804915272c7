"""`batchline serve`: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import sys
from functools import partial
from typing import Annotated

import typer

from batchline.cli.config_file import takes_config_file
from batchline.cli.model_options import ModelOptions
from batchline.cli.option_groups import takes_options
from batchline.cli.server_options import ServingOptions
from batchline.cli.values import together
from batchline.errors import UsageError
from batchline.model_record import ModelRecord
from batchline.server.connections import bind
from batchline.server.log_lines import SparingHandler
from batchline.server.options import ServerOptions
from batchline.server.tls import check_certificate


@takes_config_file
@takes_options("model_options", ModelOptions, model=[])
@takes_options("serving", ServingOptions)
def serve(
    context: typer.Context,
    model_options: ModelOptions,
    serving: ServingOptions,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model folder or Hugging Face id.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Unknown request fields are errors.")] = False,
) -> None:
    """Serve one or more models over an OpenAI-compatible API."""
    models = _models(context, model_argument, model_options.model)
    model_options = dataclasses.replace(model_options, model=models)
    max_running = len(models) * model_options.max_num_seqs
    together(partial(model_options.engines, strict=strict), partial(serving.server, max_running=max_running))
    engines, options = model_options.engines(strict=strict), serving.server(max_running=max_running)
    logging.basicConfig(
        level=serving.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[SparingHandler(sys.stderr)],
    )
    if not options.api_keys and options.uds is None and not _is_loopback(options.host):
        typer.echo("Warning: anyone who reaches this address can use the server; set --api-key.", err=True)
    _check_address(options)
    first, *others = models
    typer.echo(f"Loading {first}" + (f"; when first asked for: {', '.join(others)}" if others else ""), err=True)

    from batchline.backends.in_process import InProcessBackend  # imports torch and transformers
    from batchline.server.run import run

    names = ", ".join(name for engine in engines for name in engine.model.names)
    backend = InProcessBackend(engines)

    def say_ready(url: str) -> None:
        for record in (model.record for model in backend.models()):
            if record is not None:
                _show(record)
        typer.echo(f"Serving {names} at {url}", err=True)

    run(backend, options, say_ready)


def _show(record: ModelRecord) -> None:
    typer.echo(record.text, err=True)
    if record.warning is not None:
        typer.echo(f"Warning: {record.name}: {record.warning}.", err=True)


def _models(context: typer.Context, argument: str | None, options: list[str]) -> list[str]:
    """The argument, then every `--model` of the command line; without an argument those of the file or environment."""
    if argument is None:
        if not options:
            raise UsageError("Which model? Give one: batchline serve MODEL")
        return options
    source = context.get_parameter_source("model")
    is_on_the_line = source is not None and source.name == "COMMANDLINE"
    return [argument, *options] if is_on_the_line else [argument]


def _check_address(options: ServerOptions) -> None:
    """The address and the certificate can be used. Asked before the imports and the load, which take long.

    Raises: UsageError.
    """
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    bind(options.host, options.port, options.max_connections, options.uds).close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
