"""Cohere's own client against the model that ships."""

from __future__ import annotations

from running import results_of
from threaded_server import ThreadedServer


def test_embedding_and_reranking(tiny: ThreadedServer, tool_caller: ThreadedServer) -> None:
    results = results_of("use_cohere.py", tiny.url, tool_caller.url)
    assert results["embedded"] == [2, 128, 128, 16, ["one", "two"]]
    assert results["billed"] > 0
    assert results["reranked"] == [1, 1]
    assert results["refused"].startswith("output_dimension: ")
