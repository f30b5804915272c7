"""Engines of other projects as a backend: starts their processes, and sends each request to one of them.

An engine that ends is started again, and the requests that were in flight run again: a few at a time after the first
end, one at a time after the second (see `supervision.Company`). A request that was in flight at three ends gets an
error as its answer. Such requests stay with their process, so that they end no other one.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from batchline.backends.balancing import Balancer
from batchline.backends.base import (
    Answer,
    BackendStats,
    EndpointRequest,
    ServedModel,
    find_model,
    models_by_name,
    unknown_path,
    unsupported_path,
)
from batchline.backends.http.replies import usage_counts
from batchline.backends.identity import result_settings
from batchline.backends.processes.attempts import ProcessAttempts
from batchline.backends.processes.config import ProcessConfig, refuse_here
from batchline.backends.processes.life import Life, begin_life
from batchline.backends.processes.replica import Replica
from batchline.checkpoints.digests import OnRead
from batchline.errors import (
    RequestError,
    ServiceUnavailable,
)
from batchline.openai_api.endpoint_table import ENDPOINTS, error_body
from batchline.process_memory import raise_file_limit

logger = logging.getLogger(__name__)

MAX_IN_ALL = 16_384
"""How many requests are in flight at all processes together."""

OTHER_FILES = 512
"""Open files beside the connections."""


class ProcessBackend:
    """One model on one or more processes of an engine."""

    wants_raw_bodies = True

    def __init__(self, config: ProcessConfig) -> None:
        """Raises: UsageError for anything that is wrong with the settings."""
        refuse_here()
        config.check()
        self._config = config
        self._folder: Path | None = None
        self._balancer: Balancer[Replica] = Balancer()
        self._is_closed = False
        self._tokens = (0, 0, 0)

    async def start(self) -> None:
        """Start all processes at the same time, and wait until they are ready. Raises: ModelLoadError."""
        self._folder = await asyncio.to_thread(self._make_folder)
        title = self._config.kind.title
        for number in range(self._config.num_replicas):
            begin = partial(begin_life, self._config, number, self._folder)
            name = title if self._config.num_replicas == 1 else f"{title} {number + 1}"
            self._balancer.add(Replica(name, begin, self._limit))
        logger.info("starting %s; its log is in %s", f"{title} {self._config.found.version}".strip(), self._folder)
        raise_file_limit(self.concurrency() + OTHER_FILES)
        started = [asyncio.create_task(replica.start()) for replica in self._balancer.members]
        try:
            await asyncio.gather(*started)
        finally:
            for task in started:
                task.cancel()

    async def models(self) -> Sequence[ServedModel]:
        """The model."""
        return (self._model(),)

    def identity(self) -> Mapping[str, str]:
        """The engine, its version, and the settings that change answers."""
        return self._identity(None)

    def watched_identity(self, on_read: OnRead) -> Mapping[str, str]:
        """As `identity`. on_read: sees large files being read, and can end it by raising."""
        return self._identity(on_read)

    def concurrency(self) -> int:
        """Two requests for each sequence that the processes run at once, so that their queues are never empty."""
        return min(self._limit * self._config.num_replicas, MAX_IN_ALL)

    async def check(self, request: EndpointRequest) -> None:
        """Find what is wrong with the request's path and model. Raises: RequestError."""
        self._refuse_unserved(request)

    async def answer(self, request: EndpointRequest) -> Answer:
        """The engine's answer. If the engine ends meanwhile, the request runs again.

        Raises: EngineLost, ModelLoadError.
        """
        try:
            self._refuse_unserved(request)
            answer = await ProcessAttempts(self._balancer, request).answer()
        except RequestError as error:
            return _error_answer(request, error)
        if answer.values is not None:
            self._count(answer.values)
        return answer

    async def stream(self, request: EndpointRequest) -> AsyncGenerator[Mapping[str, Any], None]:
        """The answer in chunks. If the engine ends before the first one, the request runs again.

        Raises: RequestError, EngineLost, ModelLoadError, all before the first chunk.
        """
        self._refuse_unserved(request)
        async with aclosing(ProcessAttempts(self._balancer, request).stream()) as chunks:
            async for chunk in chunks:
                self._count(chunk)
                yield chunk

    def is_alive(self) -> bool:
        """Whether any process runs or is being started again."""
        return not self._is_closed and not self._all_refused

    def stats(self) -> BackendStats:
        """The tokens that the engine has reported."""
        prompt, cached, output = self._tokens
        return BackendStats(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._is_closed = True
        has_failed = any(replica.is_refused for replica in self._balancer.members)
        await asyncio.gather(*(replica.close() for replica in self._balancer.members))
        folder, self._folder = self._folder, None
        if folder is not None and not has_failed:  # otherwise a message has named the log
            await asyncio.to_thread(_remove_logs, folder, self._config.engine)

    def _count(self, values: Mapping[str, Any] | list[Any]) -> None:
        prompt, cached, output = self._tokens
        more_prompt, more_cached, more_output = usage_counts(values)
        self._tokens = prompt + more_prompt, cached + more_cached, output + more_output

    def _make_folder(self) -> Path:
        """A private folder for the logs."""
        folder = self._config.log_folder
        if folder is None:
            return Path(tempfile.mkdtemp(prefix=f"batchline-{self._config.engine}-"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @property
    def _limit(self) -> int:
        """How many requests a process gets at once."""
        given = self._config.model.scheduler.max_num_seqs
        return 2 * (given if "--max-num-seqs" in self._config.given else self._config.kind.max_num_seqs)

    @property
    def _all_refused(self) -> bool:
        members = self._balancer.members
        return bool(members) and all(replica.is_refused for replica in members)

    def _identity(self, on_read: OnRead | None) -> Mapping[str, str]:
        config = self._config
        engine = {"--engine": f"{config.engine} {config.found.version}".strip()}
        own = config.kind.own_settings(config.own_arguments)
        return {**result_settings([config.model], on_read), **engine, **own}

    def _model(self) -> ServedModel:
        model = self._config.model.model
        lives = [replica.current for replica in self._balancer.members]
        life = next((life for life in lives if life is not None), None)
        name, *aliases = model.names
        return ServedModel(
            name=name,
            aliases=tuple(aliases),
            max_model_len=model.max_model_len if life is None else life.max_model_len or model.max_model_len,
            endpoints=self._endpoints(life),
        )

    def _endpoints(self, life: Life | None) -> tuple[str, ...]:
        """The endpoints of the model's task; those that the engine lists, once it runs; empty if they are unknown."""
        if life is not None and life.paths is not None:
            return tuple(path for path, endpoint in ENDPOINTS.items() if path in life.paths and endpoint.in_batch_file)
        return tuple(self._config.kind.endpoints.get(self._config.model.model.task, ()))

    def _refuse_unserved(self, request: EndpointRequest) -> None:
        """Raises: BadRequest, NotFound."""
        model = self._model()
        if request.url not in ENDPOINTS:
            raise unknown_path(request.url, [model])
        names = dict.fromkeys(self._config.model.model.unlisted_names, model)
        find_model({**names, **models_by_name([model])}, request.body.get("model"))
        if model.endpoints and request.url not in model.endpoints and ENDPOINTS[request.url].in_batch_file:
            raise unsupported_path(request.url, model.name, model.endpoints)


def _remove_logs(folder: Path, engine: str) -> None:
    """Also remove the folder, unless it has other files: the caller may have chosen it."""
    with suppress(OSError):
        for path in folder.glob(f"{engine}*.log*"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _error_answer(request: EndpointRequest, error: RequestError) -> Answer:
    """The error as JSON bytes, as the engine's own answers are."""
    body = error_body(request.url, error.body())
    return Answer(
        status_code=error.status_code,
        body=orjson.dumps(body),
        request_id=request.request_id,
        is_transient=isinstance(error, ServiceUnavailable),
    )
