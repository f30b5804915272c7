"""Real servers on loopback: the application under uvicorn in a thread, over a fake backend or the model that ships."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from scripted_backend import ScriptedBackend
from threaded_server import Serve, ThreadedServer

from batchline.backends.base import Backend, EndpointRequest
from batchline.backends.in_process import InProcessBackend
from batchline.config import CacheConfig, EngineConfig, ModelConfig
from batchline.jobs.options import JobsOptions
from batchline.testing import FakeBackend

TINY_CHAT = Path(__file__).parents[2] / "examples/models/tiny-chat"
TINY_KEY = "token-abc123"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(backend, **options)`: a running server, stopped when the test ends."""
    running: list[ThreadedServer] = []

    def start(backend: Backend | None = None, **options: Any) -> ThreadedServer:
        server = ThreadedServer(backend or FakeBackend(), **options)
        running.append(server)
        return server.__enter__()

    yield start
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def fake() -> Iterator[httpx.Client]:
    """A client of a server over a fake backend, without keys."""
    with ThreadedServer(FakeBackend()) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pkcs8 = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="session")
def tiny() -> Iterator[ThreadedServer]:
    """The model that ships, served as `tiny` and `org/alias`, with the key `TINY_KEY`."""
    model = ModelConfig(model=str(TINY_CHAT), served_names=("tiny", "org/alias"), dtype="float32", num_threads=1)
    backend = InProcessBackend([EngineConfig(model=model, cache=CacheConfig(num_bytes=64 << 20))])
    with ThreadedServer(backend, api_keys=(TINY_KEY,)) as server:
        yield server


@pytest.fixture
def client_of() -> Iterator[Callable[..., openai.OpenAI]]:
    """`client_of(server, key)`: the official client of a server, closed when the test ends."""
    with ExitStack() as stack:

        def make(server: ThreadedServer, key: str = "none") -> openai.OpenAI:
            return stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0))

        yield make


@pytest.fixture
def client(tiny: ThreadedServer) -> Iterator[openai.OpenAI]:
    """The official client of `tiny`'s server."""
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=TINY_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(tiny: ThreadedServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The same, for `await`."""
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key=TINY_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tool_caller() -> Iterator[ThreadedServer]:
    """A model, `scripted`, that calls `get_weather` and answers with what the tool says; without keys."""
    with ThreadedServer(ScriptedBackend()) as server:
        yield server


@pytest.fixture(scope="session")
def batch_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """The Files and Batches API with the key `TINY_KEY`, over a model `fake` that never answers `wait`."""

    async def hold(request: EndpointRequest) -> None:
        if "'wait'" in str(request.body):
            await asyncio.Event().wait()

    jobs = JobsOptions(state_dir=tmp_path_factory.mktemp("batch-service"))
    with ThreadedServer(FakeBackend(before_answer=hold), api_keys=(TINY_KEY,), jobs=jobs) as server:
        yield server
