"""An answer in server-sent events: `data: {json}` for each chunk and `data: [DONE]` at the end.

If chunks have a `type`, it is also the event's name, and the last chunk ends the stream. If an exception ends a stream,
its last chunk reports the error. The next chunk is requested when the previous one is in the connection's buffer, so a
slow reader only slows down its own stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from batchline.errors import request_error
from batchline.openai_api.endpoint_table import ENDPOINTS
from batchline.server.errors import SHUTTING_DOWN

T = TypeVar("T")

Chunk = Mapping[str, Any]
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The chunks of a stream whose first chunk has already arrived. Closes the stream in any case."""

    media_type = "text/event-stream"

    def __init__(self, first: Chunk | None, rest: AsyncIterator[Chunk], path: str, request_id: str) -> None:
        """first: None for a stream without chunks. path: the endpoint's, which decides the form of the events."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._endpoint = ENDPOINTS[path]
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream. Raises: ClientDisconnect."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except asyncio.CancelledError:  # the grace period of a shutdown is over
            await send(self._message(SHUTTING_DOWN.body()))
            await send(self._end())
        finally:
            await close_stream(self._rest)

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks():
            await send(self._message(chunk))
        await send(self._end())

    async def _chunks(self) -> AsyncIterator[Chunk]:
        """The bytes to send. An exception becomes a last chunk."""
        if self._first is not None:
            yield self._first
        try:
            async for chunk in self._rest:
                yield chunk
        except Exception as exc:
            yield request_error(exc, self._request_id).body()

    def _message(self, chunk: Chunk) -> Message:
        if "error" in chunk and "type" not in chunk and self._endpoint.error_event is not None:
            chunk = self._endpoint.error_event(chunk)
        name = b"event: %b\n" % chunk["type"].encode() if self._endpoint.has_named_events else b""
        event = b"%bdata: %b\n\n" % (name, orjson.dumps(chunk))
        return {"type": "http.response.body", "body": event, "more_body": True}

    def _end(self) -> Message:
        return {
            "type": "http.response.body",
            "body": b"" if self._endpoint.has_named_events else _DONE,
            "more_body": False,
        }


async def close_stream(stream: AsyncIterator[Chunk]) -> None:
    """Free a stream's resources, if it can be closed."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on a request whose body has been read. If the client disconnects first, `work` is cancelled.

    Raises: ClientDisconnect, and what the work raises.
    """
    task = asyncio.create_task(work)
    hang_up = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
