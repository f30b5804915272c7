"""Which kind of model answers which path, and the schema of each path's body."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from batchline.config import Task
from batchline.openai_api.chat import ChatCompletionRequest
from batchline.openai_api.completions import CompletionRequest
from batchline.openai_api.embeddings import EmbeddingsRequest
from batchline.openai_api.rerank import RerankRequest
from batchline.openai_api.responses import ResponsesRequest
from batchline.openai_api.score import ScoreRequest
from batchline.openai_api.tokenize import DetokenizeRequest, TokenizeRequest

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

REQUEST_SCHEMAS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Of every path that takes a JSON body and hands it to a backend."""

STREAMED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Those of them that answer in server-sent events where the body says `stream`."""
