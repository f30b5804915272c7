"""What a file's check says before a batch is made of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from batchline.jobs.input_check import InputCheck, check_input

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


def line(number: int, url: str = CHAT, model: str = "a", **body: Any) -> dict[str, Any]:
    content = {"input": "x"} if url == EMBEDDINGS else {"messages": [{"role": "user", "content": "x"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": model, **content, **body}}


def check(tmp_path: Path, *lines: dict[str, Any], max_requests: int = 10, takes_many_models: bool = True) -> InputCheck:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return check_input(path, {"a", "b"}, {CHAT}, takes_many_models=takes_many_models, max_requests=max_requests)


def test_a_valid_file_is_for_the_endpoint_of_its_requests(tmp_path: Path) -> None:
    found = check(tmp_path, line(1), line(2, model="b"), line(3, colour="red"))
    assert (found.endpoint, found.num_lines, found.num_errors, found.errors) == (CHAT, 3, 0, [])
    assert found.models == {"a": 2, "b": 1}
    assert len(found.warnings) == 1
    assert "colour" in found.warnings[0]


def test_bad_lines_are_those_that_a_batch_would_refuse(tmp_path: Path) -> None:
    found = check(
        tmp_path, line(1), line(2, EMBEDDINGS), line(3, model="c"), line(4, model="b"), takes_many_models=False
    )
    assert [(error["line"], error["code"]) for error in found.errors] == [
        (2, "invalid_url"),
        (3, "model_not_found"),
        (4, "mismatched_model"),
    ]
    assert found.num_errors == 3


def test_a_file_for_an_endpoint_that_no_model_serves_is_refused_as_a_whole(tmp_path: Path) -> None:
    found = check(tmp_path, line(1, EMBEDDINGS))
    assert [(error["code"], error["param"], error["line"]) for error in found.errors] == [
        ("invalid_value", "endpoint", None)
    ]


def test_files_without_requests_or_with_too_many_are_refused(tmp_path: Path) -> None:
    assert [error["code"] for error in check(tmp_path).errors] == ["empty_file"]
    too_many = check(tmp_path, *(line(number) for number in range(11)))
    assert [error["code"] for error in too_many.errors] == ["too_many_tasks"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[{"custom_id": "a"}, {"custom_id": "b"}]', "it is a JSON array"),
        ('{"custom_id": "a"}\n'.encode("utf-16"), "it is UTF-16LE text"),
        (b"custom_id,prompt\n1,hi\n2,hello\n", "comma"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-20], "gzip data is damaged"),
    ],
    ids=["array", "utf-16", "table", "gzip"],
)
def test_a_file_of_another_format_gets_the_sentence_of_the_check_command(
    tmp_path: Path, content: bytes, said: str
) -> None:
    """A batch of it failed with `The stored input file is damaged.`, and the page blamed single lines."""
    path = tmp_path / "file-0123"
    path.write_bytes(content)
    [error] = check_input(path, {"a"}, {CHAT}, takes_many_models=True, max_requests=10).errors
    assert (error["code"], error["line"]) == ("invalid_file_format", None)
    assert said in error["message"]
    assert path.name not in error["message"]


def test_a_compressed_file_is_checked_like_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "file-0123"
    path.write_bytes(gzip.compress(json.dumps(line(1)).encode()))
    found = check_input(path, {"a"}, {CHAT}, takes_many_models=True, max_requests=10)
    assert (found.endpoint, found.num_lines, found.errors) == (CHAT, 1, [])
