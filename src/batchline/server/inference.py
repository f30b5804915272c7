"""The routes that do work: pass a JSON body to the backend, and return its answer or its chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from batchline.backends.base import Answer, Backend, EndpointRequest, find_model, models_by_name
from batchline.openai_api.endpoint_table import ENDPOINTS
from batchline.server.admission import num_places
from batchline.server.event_stream import EventStream, close_stream, while_connected
from batchline.server.form_body import in_json, is_form, read_form
from batchline.server.json_body import SMALL_BODY, read_json_object, written
from batchline.server.metrics import Metrics
from batchline.server.request_path import route_path


class Inference:
    """Answers requests to the backend's endpoints."""

    def __init__(self, backend: Backend, metrics: Metrics, max_request_bytes: int) -> None:
        self._backend = backend
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def answer(self, request: Request) -> Response:
        """The backend's answer, streamed if the body says so. Raises: RequestError, EngineLost, ClientDisconnect."""
        body, raw_body = await self._read(request)
        endpoint_request = EndpointRequest(
            url=route_path(request.scope),
            body=body,
            request_id=request.state.request_id,
            raw_body=raw_body if self._backend.wants_raw_bodies else None,
        )
        if endpoint_request.body.get("stream") is True:
            return await self.begin_stream(request, endpoint_request.url, self._backend.stream(endpoint_request))
        answer = await self.answer_of(request, endpoint_request)
        return await written(answer.body, answer.status_code)

    async def look_up(self, request: Request) -> Response:
        """The backend's answer to a GET request. Raises: BadRequest, EngineLost, ClientDisconnect."""
        body = dict(request.query_params)
        await self._name_model(request, body)
        url = route_path(request.scope)
        answer = await self.answer_of(request, EndpointRequest(url=url, body=body, request_id=request.state.request_id))
        return await written(answer.body, answer.status_code)

    async def read_body(self, request: Request) -> dict[str, Any]:
        """The body, with a model; the request now holds its places. Raises: RequestError, ClientDisconnect."""
        return (await self._read(request))[0]

    async def _read(self, request: Request) -> tuple[dict[str, Any], bytes | None]:
        """The body of `read_body`, and the JSON that the client sent; None if the body was changed or is a form."""
        raw_body: bytes | None
        if ENDPOINTS[route_path(request.scope)].takes_forms and is_form(request):
            body, raw_body = await read_form(request, self._max_request_bytes), None
            if self._backend.wants_raw_bodies:  # it forwards JSON
                body = in_json(body)
        else:
            body, raw_body = await read_json_object(request, self._max_request_bytes)
        request.state.places.hold(num_places(route_path(request.scope), body))
        return body, None if await self._name_model(request, body) else raw_body

    async def _name_model(self, request: Request, body: dict[str, Any]) -> bool:
        """Put the path's model, or the only served one, into a body that names none. Returns whether it did.

        Raises: BadRequest if several are served.
        """
        if body.get("model") is not None:
            return False
        named: str | None = request.state.model_of_path
        body["model"] = named or find_model(models_by_name(await self._backend.models()), None).name
        return True

    async def answer_of(self, request: Request, endpoint_request: EndpointRequest) -> Answer:
        """The backend's answer, as long as the client waits for it. Raises: EngineLost, ClientDisconnect."""
        answer = await while_connected(request.receive, self._backend.answer(endpoint_request))
        is_large = isinstance(answer.body, bytes) and len(answer.body) > SMALL_BODY
        parsed = await asyncio.to_thread(answer.parsed_body) if is_large else answer.parsed_body()
        request.state.usage = parsed.get("usage")
        request.state.places.is_finished = not answer.is_error and ENDPOINTS[endpoint_request.url].needs_engine
        return answer

    async def begin_stream(
        self, request: Request, endpoint: str, chunks: AsyncIterator[Mapping[str, Any]]
    ) -> EventStream:
        """Wait for the first chunk, so that an invalid request gets an ordinary error."""
        timed = self._metrics.timed(endpoint, chunks)
        try:
            first = await while_connected(request.receive, _first_of(timed))
        except BaseException:
            await close_stream(timed)
            raise
        request.state.places.is_finished = True  # unless the client disconnects
        return EventStream(first, timed, endpoint, request.state.request_id)


async def _first_of(chunks: AsyncIterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return await anext(chunks, None)
