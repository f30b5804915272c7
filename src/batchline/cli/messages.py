"""The only place that prints a command's messages: to standard error, as text, as JSON objects, or only errors.

Standard output may be the result file. A standard error that is closed or full costs nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, Protocol

import orjson
import typer

LogFormat = Literal["text", "json"]
Level = Literal["info", "warning", "error"]

LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Format of messages and logs on standard error; json: one object per line.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", help="Print errors only, and at the end of a run one line with its result.")
]

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_PREFIXES: Mapping[Level, str] = {"info": "", "warning": "Warning: ", "error": "Error: "}
_CLEAR_LINE = "\r\x1b[2K"
_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}


class Display(Protocol):
    """Something live on the terminal that lines must not be written into."""

    def show(self, line: str, level: Level) -> None:
        """Print a line above it. Raises: OSError, ValueError where the terminal is gone."""

    def leave(self) -> None:
        """Draw nothing any more; called by signal handlers."""


@dataclass(slots=True)
class _Output:
    """How this process prints. display: what is live on the terminal."""

    log_format: LogFormat = "text"
    is_quiet: bool = False
    display: Display | None = None


_output = _Output()


def configure(log_format: LogFormat = "text", *, quiet: bool = False) -> None:
    """Set how this process prints from now on."""
    _output.log_format, _output.is_quiet = log_format, quiet


def is_plain_text() -> bool:
    """Whether people read what is printed."""
    return _output.log_format == "text" and not _output.is_quiet


@contextmanager
def beside(display: Display) -> Iterator[None]:
    """Until the block ends, lines are shown by `display`."""
    _output.display = display
    try:
        yield
    finally:
        _output.display = None


def log(text: str, level: Level = "info", **fields: Any) -> None:
    """A line of the log, with its time. fields: for JSON."""
    if level == "error" or not _output.is_quiet:
        stamp = f"{datetime.now().strftime(TIME_FORMAT)} "
        _print(f"{stamp}{_PREFIXES[level]}{text}", text, level, fields)


def tell(text: str, level: Level = "info", *, is_result: bool = False, **fields: Any) -> None:
    """A line without a time: how a command ends. is_result: shown under `--quiet` too. fields: for JSON."""
    if level == "error" or is_result or not _output.is_quiet:
        _print(f"{_PREFIXES[level]}{text}", text, level, fields)


def last_words(text: str) -> None:
    """Print a message from a signal handler, just before the process ends at once.

    Takes no lock of a display or a stream, because the interrupted thread may hold it.
    """
    line = _line(text, text, "info", {})
    if _output.display is not None:
        _output.display.leave()
        line = f"{_CLEAR_LINE}{line}"
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def log_handler() -> logging.Handler:
    """A handler of log records that prints them in this format."""
    return _Handler()


def log_formatter() -> logging.Formatter:
    """A formatter for handlers with a separate stream."""
    if _output.log_format == "json":
        return _JsonFormatter()
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", TIME_FORMAT)


def _line(line: str, text: str, level: Level, fields: Mapping[str, Any]) -> str:
    """What is printed: the line as it is, or an object with the text and the fields."""
    return line if _output.log_format == "text" else _json_line(datetime.now(timezone.utc), level, text, fields)


def _print(line: str, text: str, level: Level, fields: Mapping[str, Any]) -> None:
    line = _line(line, text, level, fields)
    with suppress(OSError, ValueError):
        if _output.display is not None:
            _output.display.show(line, level)
        else:
            typer.echo(line, err=True)


def _json_line(time: datetime, level: str, message: str, fields: Mapping[str, Any]) -> str:
    content = {"time": time, "level": level, "message": message, **fields}
    return orjson.dumps(content, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()


class _JsonFormatter(logging.Formatter):
    """Log records as JSON objects, what was given as `extra` included."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD_ATTRIBUTES}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        time = datetime.fromtimestamp(record.created, timezone.utc)
        return _json_line(time, record.levelname.lower(), record.getMessage(), {"logger": record.name, **fields})


class _Handler(logging.Handler):
    """Prints records as messages are printed, above what is live on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        if _output.is_quiet and record.levelno < logging.ERROR:
            return
        try:
            line = log_formatter().format(record)
            if _output.display is not None:
                _output.display.show(line, "error" if record.levelno >= logging.ERROR else "warning")
            elif sys.stderr is not None:
                print(line, file=sys.stderr)
        except Exception:
            self.handleError(record)
