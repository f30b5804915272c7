"""Cohere's own client, as its users call another server: `base_url` without `/v2`."""

from __future__ import annotations

from typing import Any

import cohere
from calls import KEY, Servers, main


def client(servers: Servers) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=KEY, base_url=servers.tiny.removesuffix("/v1"))


def embedded(servers: Servers) -> Any:
    kinds = ["float", "int8", "ubinary"]
    answer = client(servers).embed(
        model="tiny", texts=["one", "two"], input_type="search_document", embedding_types=kinds
    )
    found = answer.embeddings
    return [len(found.float_), len(found.float_[0]), len(found.int8[0]), len(found.ubinary[0]), answer.texts]


def billed(servers: Servers) -> Any:
    answer = client(servers).embed(model="tiny", texts=["one"], input_type="search_query")
    return answer.meta.billed_units.input_tokens


def reranked(servers: Servers) -> Any:
    answer = client(servers).rerank(model="tiny", query="one", documents=["two", "one"], top_n=1)
    return [answer.results[0].index, len(answer.results)]


def refused(servers: Servers) -> Any:
    try:
        client(servers).embed(model="tiny", texts=["one"], input_type="search_query", output_dimension=7)
    except cohere.BadRequestError as exc:
        return exc.body["message"]
    return None


if __name__ == "__main__":
    main(embedded, billed, reranked, refused)
