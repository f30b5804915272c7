"""A small engine for tests of `--engine`: it takes the command lines of vLLM, SGLang and llama-server, and echoes.

It imports the standard library only, so it is ready in a tenth of a second. The variable FAKE_ENGINE holds JSON with
its switches (`Switches`). Words in a request's last text make it misbehave:

    die             it dies                          stop            it is stopped (SIGSTOP)
    die-below:FILE  it dies until FILE has N bytes   error:STATUS    it answers with an error
    hold:FILE       it answers when FILE exists, and until then there is a FILE.waiting
    slow            it streams slowly
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")
GRANDCHILD = "import time; time.sleep(600)"


class Switches:
    """How the engine behaves. record: a folder that gets a file with the command line, key and process of each start.

    load_s: how long it is not healthy. says: what it prints at its start. exits: the code with which it then exits.
    fails_after: how many starts (files in `record`) succeed before the others exit. ignores_sigterm: for a stop.
    grandchildren: how many processes it starts, each in a session of its own.
    """

    def __init__(self, text: str) -> None:
        given = json.loads(text or "{}")
        self.record: str | None = given.get("record")
        self.load_s: float = given.get("load_s", 0.0)
        self.says: str = given.get("says", "")
        self.exits: int | None = given.get("exits")
        self.fails_after: int | None = given.get("fails_after")
        self.ignores_sigterm: bool = given.get("ignores_sigterm", False)
        self.grandchildren: int = given.get("grandchildren", 0)
        self.paths: list[str] | None = given.get("paths")


def argument(name: str) -> str:
    """The value of an argument, written with a space or `=`; empty without it."""
    for index, text in enumerate(sys.argv):
        if text == name:
            return sys.argv[index + 1]
        if text.startswith(f"{name}="):
            return text.partition("=")[2]
    return ""


def served_names() -> list[str]:
    """The names of the model, as the three engines take them."""
    if alias := argument("--alias"):
        return alias.split(",")
    if "--served-model-name" in sys.argv:
        after = sys.argv[sys.argv.index("--served-model-name") + 1 :]
        end = next((index for index, text in enumerate(after) if text.startswith("--")), len(after))
        return after[:end]
    return [argument("--served-model-name") or argument("--model-path") or argument("--model") or sys.argv[1]]


def api_key() -> str:
    """The key, from the environment or SGLang's file."""
    if path := argument("--config"):
        return str(json.loads(Path(path).read_text())["api-key"])
    return next((os.environ[name] for name in KEY_VARIABLES if name in os.environ), "")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200 if time.monotonic() >= self.server.ready_at else 503, {})
        elif self.path == "/openapi.json" and self.server.switches.paths is not None:
            self._send(200, {"paths": {path: {} for path in self.server.switches.paths}})
        elif not self._is_allowed():
            self._send(401, error("no key"))
        elif self.path == "/v1/models":
            models = [{"id": name, "max_model_len": 1234} for name in served_names()]
            self._send(200, {"object": "list", "data": models})
        else:
            self._send(404, error("no such path"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            self._send(401, error("no key"))
            return
        text = last_text(body)
        if not self._misbehaves(text):
            usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(text.split())}
            self.server.count()
            if body.get("stream"):
                self._stream(text, slow="slow" in text.split())
            else:
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                self._send(200, {"id": "chatcmpl-1", "model": served_names()[0], "choices": [choice], "usage": usage})

    def log_message(self, format: str, *values: object) -> None:
        pass

    def _misbehaves(self, text: str) -> bool:
        for word in text.split():
            name, _, value = word.partition(":")
            if name == "die" or (name == "die-below" and another_death(value)):
                print("the engine dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            elif name == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif name == "hold":
                Path(f"{value}.waiting").touch()
                while not os.path.exists(value):
                    time.sleep(0.01)
            elif name == "error":
                self._send(int(value), error("as asked"))
                return True
        return False

    def _is_allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.key}"

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, text: str, *, slow: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, word in enumerate(text.split(" ")):
            choice = {"index": 0, "delta": {"content": f" {word}" if number else word}}
            self._event(json.dumps({"id": "chatcmpl-1", "model": served_names()[0], "choices": [choice]}))
            time.sleep(0.2 if slow else 0)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()


class Engine(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.key = api_key()
        self.ready_at = time.monotonic() + switches.load_s
        self._lock = threading.Lock()
        super().__init__((argument("--host"), int(argument("--port"))), Handler)

    def count(self) -> None:
        """Note one answer in the record."""
        if self.switches.record is not None:
            with self._lock, open(Path(self.switches.record) / "answers", "a") as file:
                file.write(f"{os.getpid()}\n")


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Fake", "param": None, "code": None}}


def last_text(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    return str(messages[-1]["content"] if messages else body.get("prompt", body.get("input", "")))


def another_death(value: str) -> bool:
    """Whether the file of `NUMBER@FILE` has fewer bytes than that; it then gets another one."""
    number, _, path = value.partition("@")
    with open(path, "a") as file:
        if file.tell() >= int(number):
            return False
        file.write("x")
        return True


def main() -> None:
    switches = Switches(os.environ.get("FAKE_ENGINE", ""))
    if switches.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    number_of_start = 0
    if switches.record is not None:
        starts = Path(switches.record) / "starts"
        with starts.open("a") as file:
            file.write(json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), "key": api_key()}) + "\n")
        number_of_start = len(starts.read_text().splitlines())
    for _ in range(switches.grandchildren):
        subprocess.Popen([sys.executable, "-S", "-c", GRANDCHILD], start_new_session=True)
    if switches.says:
        print(switches.says.replace("KEY", api_key()), flush=True)
    if switches.exits is not None or (switches.fails_after is not None and number_of_start > switches.fails_after):
        sys.exit(switches.exits or 1)
    Engine(switches).serve_forever()


if __name__ == "__main__":
    main()
