"""Names of files in the Files and Batches API."""

from __future__ import annotations

import pytest

from batchline.openai_api.batches import retry_filename


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("requests.jsonl", "requests.retry-1.jsonl"),
        ("requests.retry-1.jsonl", "requests.retry-2.jsonl"),
        ("requests.retry-9.jsonl", "requests.retry-10.jsonl"),
        ("Nachtlauf März.JSONL", "Nachtlauf_März.retry-1.jsonl"),
        ("upload", "upload.retry-1.jsonl"),
        ("a.b.json", "a.b.retry-1.jsonl"),
        ("C:\\data\\night.jsonl", "night.retry-1.jsonl"),
        ("../../etc/passwd", "passwd.retry-1.jsonl"),
        ('<b>"x"\r\n\u202e.jsonl', "b_x.retry-1.jsonl"),
        (".jsonl", "requests.retry-1.jsonl"),
        ("", "requests.retry-1.jsonl"),
        ("x" * 1000 + ".jsonl", "x" * 60 + ".retry-1.jsonl"),
    ],
)
def test_a_retry_is_named_after_the_first_file(filename: str, expected: str) -> None:
    """A retry was called `batch_<32 digits>_retry.jsonl`, and its own retry the same with other digits."""
    assert retry_filename(filename) == expected
