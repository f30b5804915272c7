"""The paths that take a JSON body and hand it to the backend, each with the schema that describes it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from batchline.openai_api.chat import ChatCompletionRequest
from batchline.openai_api.completions import CompletionRequest
from batchline.openai_api.embeddings import EmbeddingsRequest
from batchline.openai_api.rerank import RerankRequest
from batchline.openai_api.responses import ResponsesRequest
from batchline.openai_api.score import ScoreRequest
from batchline.openai_api.tokenize import DetokenizeRequest, TokenizeRequest

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

STREAMED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Those of them that answer in server-sent events where the body says `stream`."""
