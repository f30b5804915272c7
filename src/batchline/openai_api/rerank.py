"""`/v1/rerank`, `/v2/rerank` and `/rerank`: their request fields and the shape of their answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from batchline.openai_api.common import (
    ActivatedBody,
    CacheSalt,
    Content,
    Input,
    InputList,
    Priority,
    RequestId,
    TruncatePromptTokens,
    TruncationSide,
    Usage,
)
from batchline.openai_api.parsing import TEXT, Limited, ProcessorSettings, num_inputs


class RerankRequest(ActivatedBody):
    """The body of a rerank request. top_n: 0 answers with every document.

    max_tokens_per_doc: longer documents are cut to their beginning, as in Cohere's API. top_k: Voyage's top_n.
    truncation: Voyage's; whether too long documents are cut. Its clients send it, and expect their own form of answer.
    """

    other_names: ClassVar[Mapping[str, str]] = {"top_k": "top_n"}

    model: str | None = None
    query: Annotated[Input, TEXT]
    documents: Annotated[InputList, Limited("documents", num_inputs), TEXT]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    truncation_side: TruncationSide | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority = 0
    request_id: RequestId | None = None
    mm_processor_kwargs: ProcessorSettings = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document's index in the request, its relevance, and its text or content parts if they are to be returned."""

    index: int
    score: float
    document: str | Content | None


def rerank_object(
    *, rerank_id: str, model: str, results: Sequence[RankedDocument], usage: Usage, is_for_voyage: bool = False
) -> dict[str, Any]:
    """The whole answer. results: best first. is_for_voyage: whether Voyage's clients find the results in it too."""
    data = [{"index": ranked.index, "relevance_score": ranked.score} for ranked in results]
    return {
        "id": rerank_id,
        "model": model,
        "results": [_result(ranked) for ranked in results],
        "usage": usage.to_dict(),
        **({"object": "list", "data": data} if is_for_voyage else {}),
    }


def _result(ranked: RankedDocument) -> dict[str, Any]:
    return {"index": ranked.index, **_returned(ranked.document), "relevance_score": ranked.score}


def _returned(document: str | Content | None) -> dict[str, Any]:
    """As vLLM returns documents."""
    if document is None:
        return {}
    return {"document": {"text": document} if isinstance(document, str) else {"multi_modal": list(document)}}
