"""`/v1/moderations`: its request fields, the shape of its answer, and which of a model's labels are categories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from batchline.openai_api.common import (
    Priority,
    RequestId,
    TruncatePromptTokens,
    TruncationSide,
    WireModel,
    text_of,
)
from batchline.openai_api.parsing import TEXT, Limited, num_prompts

THRESHOLD = 0.5
"""A category with at least this probability is flagged."""

SAFE_NAMES = frozenset(
    "safe ok okay none neutral normal clean benign harmless acceptable appropriate legit legitimate ham sfw".split()  # noqa: SIM905
)
"""Labels, in lower case, that say that a text harms nobody."""

_NEGATED = re.compile(r"(?:not|non|no)[\s_-]*(?P<negated>.+)")


def _texts(value: Any) -> tuple[str, ...]:
    """The texts in `value`: a string, strings, or the parts of one text. Raises: PydanticCustomError."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        if any(item.get("type") == "image_url" for item in value):
            raise PydanticCustomError("moderation_image", "Input should be text: images are not moderated here")
        return (text_of({"content": value}),)
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, str) for item in value)):
        return tuple(map(text_of, [value] if isinstance(value, str) else value))
    message = "Input should be a string, a non-empty list of strings or a list of text parts"
    raise PydanticCustomError("moderation_input", message)


class ModerationsRequest(WireModel):
    """The body of a moderation request. A list of text parts is one text, as in OpenAI's API."""

    model: str | None = None
    input: Annotated[tuple[str, ...], PlainValidator(_texts), Limited("inputs", num_prompts, "inputs"), TEXT]
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    truncation_side: TruncationSide | None = None
    priority: Priority = 0
    request_id: RequestId | None = None


def harmful_labels(labels: Sequence[str], *, is_exclusive: bool) -> Mapping[int, str]:
    """The labels that are categories of harm, by their index.

    The others say that a text is safe: labels that `SAFE_NAMES` has, and those that negate another label (`not_toxic`
    beside `toxic`). If the names do not tell, the first of two exclusive labels is the safe one, because classifiers
    number the absence of a property 0 and its presence 1.
    """
    names = [label.strip().lower() for label in labels]
    safe = {index for index, name in enumerate(names) if name in SAFE_NAMES or _negates(name, names)}
    if not safe and is_exclusive and len(labels) == 2:
        safe = {0}
    return {index: label for index, label in enumerate(labels) if index not in safe}


def _negates(name: str, names: Sequence[str]) -> bool:
    """Whether the name is that of another label with `not`, `non` or `no` in front."""
    match = _NEGATED.fullmatch(name)
    return match is not None and match["negated"] in names


def moderation_object(
    *, moderation_id: str, model: str, categories: Mapping[int, str], rows: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The whole answer. rows: the probability of each of the model's labels, for each text."""
    return {
        "id": moderation_id,
        "model": model,
        "results": [_result({name: row[index] for index, name in categories.items()}) for row in rows],
    }


def _result(scores: Mapping[str, float]) -> dict[str, Any]:
    categories = {name: score >= THRESHOLD for name, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": dict(scores),
        "category_applied_input_types": {name: ["text"] for name in scores},
    }
