"""`/v1/embeddings`: its request fields and the shape of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from batchline.errors import BadRequest
from batchline.openai_api.common import Prompts, TruncatePromptTokens, Usage, WireModel
from batchline.openai_api.limits import MESSAGES, TEXT, Limited, num_prompts


class EmbeddingsRequest(WireModel):
    """The body of an embeddings request. Messages are checked in depth when they are rendered."""

    model: str | None = None
    input: Annotated[Prompts | None, Limited("inputs", num_prompts, "inputs"), TEXT] = None
    messages: Annotated[Annotated[list[dict[str, Any]], Field(min_length=1)] | None, MESSAGES] = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """What fields say together. Raises: BadRequest."""
        if (self.input is None) == (self.messages is None):
            raise BadRequest("input: exactly one of input and messages is needed", param="input")


def embeddings_object(
    *, embeddings_id: str, created: int, model: str, embeddings: Sequence[list[float] | str], usage: Usage
) -> dict[str, Any]:
    """The whole answer. created: Unix seconds. embeddings: numbers, or base64 of little-endian float32."""
    return {
        "id": embeddings_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": [
            {"index": index, "object": "embedding", "embedding": embedding}
            for index, embedding in enumerate(embeddings)
        ],
        "usage": usage.to_dict(),
    }
