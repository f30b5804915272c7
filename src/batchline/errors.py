"""Every exception Batchline raises on purpose.

    BatchlineError
    ├── UsageError                  wrong use or an unreadable input: nothing was run (exit code 2)
    │   ├── InputUnreadable         the batch file cannot be read
    │   ├── OutputUnwritable        the result file cannot be written there
    │   ├── ResumeRefused           the unfinished run found there cannot be continued by this one
    │   ├── NoModelServed           no request of the batch file names a served model
    │   ├── UnknownParser           no tool-call or reasoning parser has this name
    │   └── PluginLoadError         a parser plugin's file cannot be run
    ├── RunInterrupted              stopped by a signal; the same command resumes it (exit code 130)
    ├── RunFailed                   the run could not finish; the same command resumes it (exit code 1)
    │   └── InputChanged            a batch line is not the one that was checked
    ├── ModelLoadError              a model folder or id that cannot be loaded
    │   └── UnsupportedModel        a model this engine cannot run, named
    ├── LineError                   a batch line that cannot be turned into a request
    ├── BackendUnavailable          nobody can be answered now; the same command resumes the run it ends (exit code 1)
    │   └── EngineLost              the embedded engine has ended and is not started again for now
    ├── RequestError                a request that is answered with an error
    │   ├── BadRequest              400
    │   │   └── PromptTooLong       400
    │   ├── Unauthorized            401
    │   ├── NotFound                404
    │   ├── MethodNotAllowed        405
    │   ├── RequestTimeout          408
    │   ├── PayloadTooLarge         413
    │   ├── UnsupportedMediaType    415
    │   ├── UnprocessableEntity     422
    │   ├── HeadTooLarge            431
    │   ├── InternalServerError     500
    │   └── ServiceUnavailable      503
    │       └── Overloaded          503, worth trying again
    └── EngineError                 the engine failed
        ├── EngineDead              its thread has ended; the backend starts it again
        ├── EngineOutOfMemory       a step did not fit in memory
        ├── NumbersNotFinite        the model's numbers for a request are NaN or infinite
        ├── SequenceFailed          one request makes the engine fail; the others go on
        ├── RequestRefused          a request that this model cannot run
        └── ConstraintFailed        what a request asks of its output leaves no token that could come next

`RequestError` knows its own HTTP status and error body (the only mapping of that kind); `batch/lines.py` holds the
mapping from `LineError` to a result line. Messages of both reach users over the network: no machine paths, no keys.
"""

from __future__ import annotations

from typing import Any, ClassVar


class BatchlineError(Exception):
    """Base of all exceptions raised on purpose. `str()` of it is a sentence for the user."""


class UsageError(BatchlineError):
    """The command, an option or a file it names is wrong; nothing was run."""


class InputUnreadable(UsageError):
    """The batch file cannot be read. `location` is as the user wrote it."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"Cannot read the input {location!r}: {reason}")
        self.location = location
        self.reason = reason


class OutputUnwritable(UsageError):
    """The result file cannot be written. `location` is as the user wrote it."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(f"Cannot write the output {location!r}: {reason}")
        self.location = location
        self.reason = reason


class ResumeRefused(UsageError):
    """What an earlier run left beside the output cannot be continued by this command; the text names the way out."""


class NoModelServed(UsageError):
    """No request of the batch file names a served model.

    requested: what the file names, each with its count; num_more: how many names are left out there. option: the
    command-line option that mends it, if there is one.
    """

    def __init__(self, requested: list[str], num_more: int, served: list[str], option: str | None) -> None:
        more = f" and {num_more:,} more names" if num_more else ""
        way_out = (
            f"To run them, use:\n  {option}"
            if option is not None
            else "Change 'model' in the file, or leave it out where one model is served."
        )
        super().__init__(
            f"No request names a served model. The file names {', '.join(requested)}{more}; "
            f"served here: {', '.join(map(repr, served))}. {way_out}"
        )
        self.requested = requested
        self.served = served
        self.option = option


class UnknownParser(UsageError):
    """No parser of this kind has this name. kind: "tool-call parser" or "reasoning parser"."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"There is no {kind} {name!r}. Known: {', '.join(known)}; a plugin file can add others.")
        self.kind = kind
        self.name = name
        self.known = known


class PluginLoadError(UsageError):
    """A parser plugin's file cannot be run. `path` is as the user wrote it; `__cause__` is what went wrong in it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"Cannot load the plugin {path!r}: {reason}")
        self.path = path
        self.reason = reason


class RunInterrupted(BatchlineError):
    """A signal stopped the run; what was done is on disk and the same command resumes it."""


class RunFailed(BatchlineError):
    """The run could not finish; what was done is on disk and the same command resumes it."""


class InputChanged(RunFailed):
    """The batch file was edited, cut or replaced while a run was reading it. line_number counts from 1."""

    def __init__(self, line_number: int) -> None:
        super().__init__(
            f"The input changed while it was being read: line {line_number} is not the one that was checked. Put the "
            "checked content back and run the same command again to resume, or pass --no-resume to start over."
        )
        self.line_number = line_number


class ModelLoadError(BatchlineError):
    """A model that cannot be loaded: not found, hub out of reach, damaged or incompatible files.

    ran_before: whether this process had loaded it before, so that a request may have caused the failure.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"Cannot load the model {model!r}: {reason}")
        self.model = model
        self.reason = reason
        self.ran_before = False


class UnsupportedModel(ModelLoadError):
    """The model loads, but this engine cannot run it with correct results."""


class LineError(BatchlineError):
    """A batch line that cannot be turned into a request. Codes: OpenAI's Batch API error codes."""

    def __init__(self, code: str, message: str, *, param: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.line = line


class BackendUnavailable(BatchlineError):
    """The backend can answer nobody now, whatever is asked. It ends a run, which can be resumed; a server answers 503.

    An error that only one request has is an answer. The text is for the log and the command line, not for clients.
    """


class EngineLost(BackendUnavailable):
    """The engine has ended and is not started again: the backend has given it up for now, or is closed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The engine stopped: {reason}")
        self.reason = reason


class RequestError(BatchlineError):
    """A request answered with an error; `body()` is the OpenAI error envelope."""

    status_code: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, code: str | int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = self.status_code if code is None else code

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    """400: a parameter that is wrong, or that this build cannot honour."""

    status_code = 400
    type = "BadRequestError"


class PromptTooLong(BadRequest):
    """A prompt that does not fit the model's context beside the answer."""


class Unauthorized(RequestError):
    """401: no API key, or one that is not known."""

    status_code = 401
    type = "AuthenticationError"


class NotFound(RequestError):
    """404: an unknown path, model or object."""

    status_code = 404
    type = "NotFoundError"


class MethodNotAllowed(RequestError):
    """405: the path is served, but not by this method. allowed: the methods that are."""

    status_code = 405
    type = "MethodNotAllowedError"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(RequestError):
    """408: the client did not send its request in time."""

    status_code = 408
    type = "RequestTimeoutError"


class PayloadTooLarge(RequestError):
    """413: a body over the server's limit."""

    status_code = 413
    type = "PayloadTooLargeError"


class UnsupportedMediaType(RequestError):
    """415: a body that is not of the type that the path takes."""

    status_code = 415
    type = "UnsupportedMediaTypeError"


class UnprocessableEntity(RequestError):
    """422: media that cannot be fetched or decoded."""

    status_code = 422
    type = "UnprocessableEntityError"


class HeadTooLarge(RequestError):
    """431: a request's first line and headers, or its trailers, over the server's limit."""

    status_code = 431
    type = "HeadTooLargeError"


class InternalServerError(RequestError):
    """500: a fault of ours; the message never carries internals."""

    status_code = 500
    type = "InternalServerError"


class ServiceUnavailable(RequestError):
    """503: overloaded, shutting down, or the engine has died."""

    status_code = 503
    type = "ServiceUnavailableError"


class Overloaded(ServiceUnavailable):
    """503: too many requests wait already. retry_after_s: when it is worth trying again."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after_s = retry_after_s


class EngineError(BatchlineError):
    """The engine failed while running."""


class EngineDead(EngineError):
    """The engine's thread has ended; the cause is `__cause__`."""


class EngineOutOfMemory(EngineError):
    """A step did not fit in memory, even with a single sequence."""


class NumbersNotFinite(EngineError):
    """What the model computed for one request is NaN or infinite: damaged weights, or a dtype too narrow for them."""


class SequenceFailed(EngineError):
    """The engine failed because of one request, which ends with it. `__cause__` is what was raised; its text may hold
    internals and is for the log alone."""

    @classmethod
    def because_of(cls, exc: BaseException) -> SequenceFailed:
        """The failure with its cause."""
        error = cls("the engine failed on this request")
        error.__cause__ = exc
        return error


class RequestRefused(EngineError):
    """A request with a token id that the model does not know, or without tokens, or beyond the context."""


class ConstraintFailed(EngineError):
    """What one request asks of its output leaves no token that could come next, or is too complex to follow."""


def first_line(error: BaseException) -> str:
    """The gist of a library's long message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
