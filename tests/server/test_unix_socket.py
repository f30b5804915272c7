"""Serving on a Unix socket: answered like a port, never taken from a running server, removed at the end."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from threaded_server import Serve

from batchline.errors import UsageError
from batchline.server.connections import bind


def test_requests_are_answered_over_it_and_it_is_gone_afterwards(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    server = serve(uds=str(path))
    assert server.url == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://batchline") as client:
        assert client.get("/health").json() == {"status": "ok"}
    server.stop()
    server.wait()
    assert not path.exists()


def test_the_socket_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    bind("", 0, 1, uds=str(path)).close()
    assert not path.exists()


def test_the_socket_of_a_running_server_and_other_files_are_left_alone(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    serve(uds=str(path))
    with pytest.raises(UsageError, match="another server uses it"):
        bind("", 0, 1, uds=str(path))
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UsageError, match="Address already in use"):
        bind("", 0, 1, uds=str(file))
    assert (path.exists(), file.read_text()) == (True, "mine")
