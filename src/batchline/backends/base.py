"""The one interface between those who never lose a request and those who answer it.

A backend answers any endpoint's request. It knows nothing of batch files, journals or HTTP servers; its callers know
nothing of engines. A request that is wrong is an `Answer` with an error status, never an exception: only a backend
that can answer nobody raises `BackendUnavailable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from batchline.engine.sequence_metrics import SequenceCounts
from batchline.errors import NotFound
from batchline.model_record import ModelRecord

BATCH_PRIORITY = 1 << 32
"""The priority of batch work, behind every interactive request: the 32 bits of a body's own `priority`, which is added,
order requests of one kind and never lift one above the other kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """One request to one endpoint. url: the endpoint's path, e.g. `/v1/chat/completions`. body: untrusted JSON.

    priority: smaller goes first, and takes the seat of a greater one that runs; 0 for whoever waits for the answer.
    raw_body: the JSON of `body` as it was written, for a backend that passes it on; None where it is not kept.
    """

    url: str
    body: Mapping[str, Any]
    request_id: str
    priority: int = 0
    raw_body: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status code and JSON body, as the same request would get over HTTP.

    body: a mapping, or JSON bytes, which reach the output as they are.
    is_transient: the same request may soon get a better answer (no memory now, too many requests). A run asks again a
    few times before it keeps such an answer; a server passes it on.
    """

    status_code: int
    body: Mapping[str, Any] | bytes
    request_id: str
    is_transient: bool = False

    def parsed_body(self) -> Mapping[str, Any]:
        """The body's values. Raises: ValueError for bytes that are no JSON object."""
        if not isinstance(self.body, bytes):
            return self.body
        body = orjson.loads(self.body)
        if not isinstance(body, dict):
            raise ValueError("a body that is no JSON object")
        return body

    @property
    def is_error(self) -> bool:
        """Whether the request was answered with an error."""
        return self.status_code >= 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a backend serves: its name, its other names, its context length and the endpoints it can answer.

    record: what runs, of a model that is in memory here.
    """

    name: str
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    endpoints: tuple[str, ...] = ()
    record: ModelRecord | None = None


def unknown_path(url: str, models: Iterable[ServedModel]) -> NotFound:
    """What a request to no endpoint is answered with: it names those that `models` serve."""
    served = sorted({endpoint for model in models for endpoint in model.endpoints})
    return NotFound(f"Unknown path {url}. Served here: {', '.join(served)}", param="url")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counters since the start, for progress and summaries.

    cached_tokens: prompt tokens that the prefix cache spared. preemptions: how often a sequence lost its place.
    gauges: backend-specific numbers (queue, cache use). sequences: of those that generate.
    by_model: the same of each model, by its name; empty for a backend that does not tell them apart.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)
    sequences: SequenceCounts = field(default_factory=SequenceCounts)
    by_model: Mapping[str, BackendStats] = field(default_factory=dict)


class Backend(Protocol):
    """Who answers. Whoever makes a backend starts and closes it (`running`); those who are given one only ask it.

    wants_raw_bodies: whether batch lines' bodies are to be kept as they were written (`EndpointRequest.raw_body`).
    """

    wants_raw_bodies: bool

    async def start(self) -> None:
        """Make ready to answer. Raises: ModelLoadError, UsageError."""

    async def models(self) -> Sequence[ServedModel]:
        """The models that can be named in a request; before `start`, as far as they are known.

        Raises: BackendUnavailable.
        """

    def identity(self) -> Mapping[str, str]:
        """Names and values of all that decides its answers: an unfinished run is continued only by a backend with the
        same ones. Equal for every process that is configured alike. May be called before `start`."""

    def concurrency(self) -> int:
        """How many requests a run should keep in flight so that it is never idle; at least 1. May be called before
        `start`."""

    async def answer(self, request: EndpointRequest) -> Answer:
        """The answer to a request. Cancelling the call frees what it holds.

        Raises: BackendUnavailable; ModelLoadError for a model that is loaded on first use, or again. Both end a run.
        """

    def stream(self, request: EndpointRequest) -> AsyncIterator[Mapping[str, Any]]:
        """The answer to a request whose body says `stream`, in chunks: the JSON object of one event each.

        An error after the first chunk is a last chunk, `{"error": ...}`. Closing the iterator (`aclose`, where it has
        one) or cancelling the reader frees what the request holds.

        Raises: RequestError, BackendUnavailable, ModelLoadError, all before the first chunk alone.
        """

    def is_alive(self) -> bool:
        """Whether requests can be answered: False while a model whose engine has ended cannot be loaded again; cheap,
        callable at any time."""

    def stats(self) -> BackendStats:
        """Counters since the start; cheap, callable at any time."""

    async def close(self) -> None:
        """Stop and free everything. Idempotent."""


OpenBackend = Callable[[], AbstractAsyncContextManager[Backend]]
"""Gives a running backend until the block ends. `lambda: nullcontext(backend)` lends one that others use, too."""


@asynccontextmanager
async def running(make: Callable[[], Backend]) -> AsyncIterator[Backend]:
    """A backend that is made, on a thread, and started for the block, and closed after it. Raises: as `start`."""
    backend = await asyncio.to_thread(make)  # importing an engine takes seconds
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()
