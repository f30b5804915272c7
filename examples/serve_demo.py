"""Serve the model that ships, with three batches to look at: one finished, one running and one failed.

`serve_demo.py [OPTIONS OF batchline serve]`. It starts a second process, which waits for the server and creates what is
missing, and then becomes the server itself. So Ctrl-C and other signals reach the server as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchline.client.service import Service
from batchline.errors import ServiceError

ROOT = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"
PORT = 8000
STATE = ROOT / "out" / "serve-demo"
NUM_RUNNING = 10_000
"""They take two CPU cores about ten minutes."""

START_S = 300


def line(number: int, **body: Any) -> str:
    """A batch line."""
    fields = {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": {"model": "tiny-chat", **body}}
    return json.dumps(fields) + "\n"


def question(text: str) -> list[Mapping[str, str]]:
    """The messages of a request."""
    return [{"role": "user", "content": text}]


def inputs() -> dict[str, Iterable[str]]:
    """The lines of each batch, by its name."""
    examples = (ROOT / "examples/chat.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    too_hot = (line(n, messages=question("Hello world!"), temperature=9) for n in range(101, 104))
    ok = line(1, messages=question("Hello world!"))
    other_url = ok.replace(CHAT, "/v1/embeddings").replace("request-1", "request-3")
    stories = (
        line(n, messages=question(f"Tell me story {n}."), seed=n, max_tokens=50 + n * 37 % 1000, ignore_eos=True)
        for n in range(NUM_RUNNING)
    )
    return {
        "finished": [*examples, *too_hot],
        "failed": [ok, '{"custom_id": "request-2", "method": "POST"\n', other_url, ok],
        "running": stories,
    }


async def fill(service: Service) -> None:
    """Create the batches that the server does not have yet; a running one also if the former one is over."""
    found = [batch async for batch in service.each_batch()]
    there = {(batch.metadata or {}).get("demo"): batch for batch in reversed(found)}
    for name, lines in inputs().items():
        if name in there and not (name == "running" and there[name].is_over):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.jsonl"
            path.write_text("".join(lines), encoding="utf-8")
            file = await service.upload(path, filename=path.name, purpose="batch")
        batch = await service.create_batch(file.id, CHAT, metadata={"demo": name})
        while batch.status == "validating" if name == "running" else not batch.is_over:
            await asyncio.sleep(0.1)
            batch = await service.batch(batch.id)


async def fill_when_ready(url: str) -> None:
    """Wait for the server, which is this process's parent, and fill it. Raises: ServiceError."""
    server = os.getppid()
    host, port = url.removeprefix("http://").split(":")
    for _ in range(START_S * 10):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            break
        if os.getppid() != server:
            return
        await asyncio.sleep(0.1)
    async with Service(f"{url}/v1", None).connected() as service:
        await fill(service)
    print(f"\nOne finished, one running and one failed batch: {url}/\nCtrl-C ends the server.\n", flush=True)


def free_port() -> int:
    """The server's usual port, or any other one if that is taken."""
    for port in (PORT, 0):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            bound: int = listener.getsockname()[1]
            return bound
    raise SystemExit("There is no free port.")


def main() -> None:
    """Become the server, beside a process that fills it."""
    if sys.argv[1:2] == ["--fill"]:
        with contextlib.suppress(KeyboardInterrupt):
            try:
                asyncio.run(fill_when_ready(sys.argv[2]))
            except ServiceError as exc:
                sys.exit(f"The demo cannot be prepared: {exc}")
        return
    port = free_port()
    STATE.parent.mkdir(exist_ok=True)
    subprocess.Popen([sys.executable, __file__, "--fill", f"http://127.0.0.1:{port}"])
    command = ["serve", str(ROOT / "examples/models/tiny-chat"), "--port", str(port), "--state-dir", str(STATE)]
    command += ["--log-level", "warning"]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")}
    os.execve(sys.executable, [sys.executable, "-m", "batchline", *command, *sys.argv[1:]], settings)


if __name__ == "__main__":
    main()
