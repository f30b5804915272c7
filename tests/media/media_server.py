"""Images and recordings that tests make, and a server on loopback that sends them."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable

import av
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def picture(image_format: str = "PNG", size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    """An encoded image without symmetry."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)[None, :] * 5 % 256
    pixels[..., 1] = np.arange(height)[:, None] * 7 % 256
    pixels[: height // 3, : width // 4] = (250, 10, 10)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, image_format, **options)
    return file.getvalue()


class MediaServer:
    """Answers each path with its handler, and counts requests."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.requests: list[web.Request] = []
        self._server: TestServer | None = None

    def send(self, path: str, data: bytes, **options: object) -> str:
        """Answer a path with these bytes. Returns its URL."""

        async def answer(_request: web.Request) -> web.StreamResponse:
            return web.Response(body=data, **options)

        return self.add(path, answer)

    def redirect(self, path: str, location: str) -> str:
        """Answer a path with a redirect. Returns its URL."""
        return self.send(path, b"", status=302, headers={"Location": location})

    def add(self, path: str, handler: Handler) -> str:
        """Answer a path with a handler. Returns its URL."""
        self.handlers[path] = handler
        return self.url(path)

    def url(self, path: str) -> str:
        """A path's URL."""
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        assert self._server.port is not None
        return self._server.port

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app, host="127.0.0.1")
        await self._server.start_server()

    async def close(self) -> None:
        """Stop."""
        assert self._server is not None
        await self._server.close()

    def count(self, path: str) -> int:
        """How often a path was asked for."""
        return sum(request.path == path for request in self.requests)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        handler = self.handlers.get(request.path)
        return web.Response(status=404) if handler is None else await handler(request)


def recording(
    container: str = "wav", codec: str = "pcm_s16le", *, rate: int = 16000, seconds: float = 1.0, channels: int = 1
) -> bytes:
    """An encoded tone of 440 Hz, half as loud on the second channel."""
    layout = "mono" if channels == 1 else "stereo"
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)
    samples = np.stack([tone, tone / 2][:channels]).astype(np.float32)
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    frame.sample_rate = rate
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        context = stream.codec_context
        resampler = av.AudioResampler(context.format.name, layout, rate, context.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()
