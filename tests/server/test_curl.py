"""The server as a shell sees it: `curl` with a key, a body, a stream, and what it answers to mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from threaded_server import ThreadedServer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")

KEY = "Authorization: Bearer token-abc123"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say pong."}], "temperature": 0}


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "--silent", *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def post(url: str, body: dict[str, Any], *options: str) -> str:
    return curl(url, "-H", KEY, "-H", "Content-Type: application/json", "-d", json.dumps(body), *options)


def test_a_chat_completion(tiny: ThreadedServer) -> None:
    answer = json.loads(post(f"{tiny.url}/v1/chat/completions", CHAT))
    assert "pong" in answer["choices"][0]["message"]["content"].lower()


def test_a_stream_is_lines_of_data_up_to_done(tiny: ThreadedServer) -> None:
    whole = json.loads(post(f"{tiny.url}/v1/chat/completions", CHAT))["choices"][0]["message"]["content"]
    *events, done, rest = post(f"{tiny.url}/v1/chat/completions", CHAT | {"stream": True}, "-N").split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole


def test_headers_tell_the_type_and_the_requests_id(tiny: ThreadedServer) -> None:
    options = ("-D", "-", "-o", "/dev/null", "-H", "X-Request-Id: mine-7")
    headers = post(f"{tiny.url}/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 1}, *options).lower()
    assert "content-type: text/event-stream" in headers
    assert "x-request-id: mine-7" in headers


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-H", KEY, "-d", json.dumps(CHAT)], 415, "application/json"),
        (["-H", KEY, "-H", "Content-Type: application/json", "-d", "{"], 400, "JSON"),
        (["-H", "Content-Type: application/json", "-d", json.dumps(CHAT)], 401, "key"),
        (["-H", KEY], 405, "allowed: POST"),
    ],
)
def test_mistakes_get_a_status_and_an_error_that_says_what(
    tiny: ThreadedServer, arguments: list[str], status: int, message: str
) -> None:
    told = curl(f"{tiny.url}/v1/chat/completions", *arguments, "-w", "\n%{http_code}")
    body, code = told.rsplit("\n", 1)
    assert int(code) == status
    assert message in json.loads(body)["error"]["message"]


def test_several_requests_over_one_connection(tiny: ThreadedServer) -> None:
    quiet = ("-o", "/dev/null", "-w", "%{http_code} %{num_connects}\n")
    told = curl(f"{tiny.url}/health", *quiet, "--next", "--silent", f"{tiny.url}/ping", *quiet)
    assert told.splitlines() == ["200 1", "200 0"]
