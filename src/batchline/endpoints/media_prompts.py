"""Puts prepared media into a prompt: their text for the tokenizer, and their places for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from batchline.endpoints.model import GenerativeModel
from batchline.engine.request import MediaSpan
from batchline.errors import BadRequest
from batchline.media.items import NOUNS, MediaItem, MediaKind
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
    is_alone = sum(item.kind == "image" for item in items) == 1
    return [processor.prepare(item, is_alone=is_alone, settings=adjusted) for item in items]


def prompt_media(
    token_ids: Sequence[int], items: Sequence[PreparedItem], model: GenerativeModel
) -> tuple[MediaSpan, ...]:
    """`media_spans` for a model that may take only text."""
    return () if model.media is None else media_spans(token_ids, items, model.media.processor.feature_token_ids)


def with_media_texts(rendered: RenderedChat, items: Sequence[PreparedItem], model: GenerativeModel) -> RenderedChat:
    """The prompt with the items' texts in place of the template's placeholders. Raises: BadRequest."""
    if model.media is None:
        return rendered
    for kind, placeholder in model.media.processor.placeholders.items():
        texts = [item.text for item in items if item.kind == kind]
        rendered = rendered.with_media(placeholder, texts, NOUNS[kind])
    return rendered


def media_spans(
    token_ids: Sequence[int], items: Sequence[PreparedItem], feature_token_ids: Mapping[MediaKind, int]
) -> tuple[MediaSpan, ...]:
    """Where a prompt's tokens take the items' features. Raises: BadRequest if the prompt has other tokens for them."""
    tokens = np.asarray(token_ids)
    spans = [
        span
        for kind, token_id in feature_token_ids.items()
        for span in _spans_of_kind(kind, np.flatnonzero(tokens == token_id), [i for i in items if i.kind == kind])
    ]
    return tuple(sorted(spans, key=lambda span: int(span.positions[0])))


def _spans_of_kind(kind: MediaKind, positions: np.ndarray, items: Sequence[PreparedItem]) -> list[MediaSpan]:
    """positions: of all tokens that take features of this kind."""
    ends = np.cumsum([0, *(item.num_features for item in items)]).tolist()
    if len(positions) != ends[-1]:
        raise BadRequest(f"The prompt's text contains the token that stands for the content of {NOUNS[kind]}s")
    return [
        MediaSpan(kind=kind, key=item.key, positions=positions[start:end], inputs=item.inputs)
        for item, (start, end) in zip(items, pairwise(ends), strict=True)
    ]
