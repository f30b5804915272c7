"""Which kind of model answers which path."""

from __future__ import annotations

from collections.abc import Mapping

from batchline.config import Task

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
SCORE = ("/v1/score", "/score")
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

ENDPOINTS: Mapping[Task, tuple[str, ...]] = {
    "generate": (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, *SCORE, *RERANK),
    "embed": (EMBEDDINGS, *SCORE, *RERANK),
    "score": (*SCORE, *RERANK),
}
"""A causal language model also embeds (by its last token), and whatever embeds also scores and reranks (by cosine
similarity)."""

UTILITIES = (TOKENIZE, DETOKENIZE)
"""Paths that every model answers besides its endpoints, on a server alone; they are not named among them."""
