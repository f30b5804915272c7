"""Puts prepared images into a prompt: their text for the tokenizer, and their places for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchline.endpoints.model import GenerativeModel
from batchline.engine.request import MediaSpan
from batchline.errors import BadRequest
from batchline.media.items import MediaItem
from batchline.media.prepared import PreparedItem
from batchline.text.control_tokens import RenderedChat


def prepared_media(
    items: Sequence[MediaItem], model: GenerativeModel, settings: Mapping[str, Any]
) -> list[PreparedItem]:
    """The items as the model's encoder takes them; to be called off the event loop.

    settings: `mm_processor_kwargs` of the request. Raises: BadRequest, UnprocessableEntity.
    """
    if model.media is None:
        if settings:
            raise BadRequest("mm_processor_kwargs: this model takes only text", param="mm_processor_kwargs")
        return []
    processor = model.media.processor
    adjusted = processor.adjusted(settings)
    return [processor.prepare(item, is_alone=len(items) == 1, settings=adjusted) for item in items]


def prompt_media(
    token_ids: Sequence[int], items: Sequence[PreparedItem], model: GenerativeModel
) -> tuple[MediaSpan, ...]:
    """`media_spans` for a model that may take only text."""
    return () if model.media is None else media_spans(token_ids, items, model.media.processor.feature_token_id)


def with_media_texts(rendered: RenderedChat, items: Sequence[PreparedItem], model: GenerativeModel) -> RenderedChat:
    """The prompt with the items' texts in place of the template's placeholders. Raises: BadRequest."""
    if model.media is None:
        return rendered
    return rendered.with_media(model.media.processor.placeholder, [item.text for item in items])


def media_spans(
    token_ids: Sequence[int], items: Sequence[PreparedItem], feature_token_id: int
) -> tuple[MediaSpan, ...]:
    """Where a prompt's tokens take the items' features. Raises: BadRequest if the prompt has other tokens for them."""
    positions = np.flatnonzero(np.asarray(token_ids) == feature_token_id)
    ends = np.cumsum([item.num_features for item in items])
    if len(positions) != (ends[-1] if len(ends) else 0):
        raise BadRequest("The prompt's text contains the token that stands for an image's content")
    return tuple(
        MediaSpan(
            kind=prepared.kind,
            key=prepared.key,
            positions=positions[end - prepared.num_features : end],
            inputs=prepared.inputs,
        )
        for prepared, end in zip(items, ends.tolist(), strict=True)
    )
