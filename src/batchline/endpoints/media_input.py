"""The images and audio of a request on their way into a prompt.

Messages are read on a text thread, media are fetched on the event loop. So reading stops at media that nobody has
collected yet, and starts again with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from batchline.errors import BadRequest
from batchline.media.collector import MediaCollector
from batchline.media.items import MediaItem, MediaKind
from batchline.media.parts import MEDIA_PARTS, MediaPart, MediaSource, media_parts, split_media
from batchline.media.processor import MediaProcessor
from batchline.text.chat_template import TEXT_PARTS, unsupported_part

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
CollectedMedia = Mapping[MediaSource, MediaItem]

NOT_COLLECTED: CollectedMedia = {}
"""Of a request that may have no media: whether it has is found by reading it."""


@dataclass(frozen=True, slots=True)
class MediaInput:
    """What a model takes besides text, who fetches and decodes it, and the model's own processor."""

    kinds: frozenset[MediaKind]
    collector: MediaCollector
    processor: MediaProcessor

    @property
    def part_types(self) -> list[str]:
        """The types of parts that the model takes."""
        return [name for name, kind in MEDIA_PARTS.items() if kind in self.kinds]


class MediaWanted(Exception):
    """The request has media that must be collected before it can be encoded."""

    def __init__(self, parts: Sequence[MediaPart]) -> None:
        super().__init__(parts)
        self.parts = parts


class TakesMedia(Protocol):
    """A model whose requests may have media. media: None if it takes only text."""

    @property
    def media(self) -> MediaInput | None: ...

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run text work on a thread."""


def taken_media(messages: Messages, model: TakesMedia, media: CollectedMedia) -> tuple[Messages, list[MediaItem]]:
    """The messages as the template wants them, and the media in the order of the text.

    Raises: BadRequest for media that the model does not take; MediaWanted for media that are not collected.
    """
    found, parts = split_media(messages)
    if not parts:
        return messages, []
    check_kinds(parts, model.media)
    if any(part.source not in media for part in parts):
        raise MediaWanted(parts)
    return found, [media[part.source] for part in parts]


def check_kinds(parts: Sequence[MediaPart], taken: MediaInput | None) -> None:
    """Raises: BadRequest for a part that the model does not take."""
    kinds = frozenset() if taken is None else taken.kinds
    for part in parts:
        if part.source.kind not in kinds:
            reason = unsupported_part(part.type, () if taken is None else taken.part_types)
            raise BadRequest(f"{part.path}: {reason}", param=part.path)


def media_of_content(content: str | Sequence[Mapping[str, Any]], path: str) -> list[MediaPart]:
    """The media of an input that is no message. path: of the input in the request. Raises: BadRequest."""
    if isinstance(content, str):
        return []
    for index, part in enumerate(content):
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS and kind not in MEDIA_PARTS:
            where = f"{path}.content[{index}].type"
            known = ", ".join([*TEXT_PARTS, *MEDIA_PARTS])
            raise BadRequest(f"{where}: unknown part type {str(kind)[:80]!r}; known are {known}", param=where)
    return media_parts({"content": list(content)}, path)


async def encoded_with_media(model: TakesMedia, encode: Callable[[CollectedMedia], T]) -> T:
    """What `encode` makes of a request, on a text thread, with the media that it wants. Raises: RequestError."""
    try:
        return await model.off_loop(partial(encode, NOT_COLLECTED))
    except MediaWanted as wanted:
        parts = wanted.parts
    assert model.media is not None  # media are wanted only of a model that takes them
    async with model.media.collector.collect(parts) as media, model.media.processor.prepared.room():
        return await model.off_loop(partial(encode, media))
