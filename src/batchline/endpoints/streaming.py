"""Exact usage in streamed answers of all endpoints, and when chunks report it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from batchline.endpoints.generation import GeneratedText
from batchline.openai_api.common import Usage
from batchline.openai_api.generation import StreamOptions

streams_of_request: ContextVar[list[StreamUsage] | None] = ContextVar("streams_of_request", default=None)
"""A caller sets a list here to learn how many tokens are streamed in its context, even if a stream breaks off."""


class StreamUsage:
    """Counts a request's tokens while it streams, and adds them to chunks as `stream_options` says. Mutable."""

    def __init__(self, options: StreamOptions | None, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: of all prompts together."""
        self._options = options or StreamOptions()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated = 0
        self._num_reasoning_tokens = 0
        self._cached_by_prompt: dict[int, int] = {}
        if (streams := streams_of_request.get()) is not None:
            streams.append(self)

    def count(self, delta: GeneratedText, *, prompt: int, choice: int) -> None:
        """Count a delta. A prompt is counted once, with the cached tokens that its first choice found."""
        self._num_generated += len(delta.token_ids)
        self._num_reasoning_tokens += delta.num_reasoning_tokens
        if choice == 0:
            self._cached_by_prompt.setdefault(prompt, delta.num_cached_tokens)

    @property
    def so_far(self) -> Usage:
        """The counts of all deltas until now."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_generated,
            cached_tokens=sum(self._cached_by_prompt.values()),
            reasoning_tokens=self._num_reasoning_tokens,
        )

    def in_chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the usage so far if each chunk has it, with null if only the last one does."""
        if self._options.continuous_usage_stats:
            return chunk | {"usage": self.so_far.to_dict()}
        return chunk | {"usage": None} if self._options.include_usage else chunk

    def last_chunk(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """`chunk`, which has no choices, with the final usage; nothing if the options do not ask for it."""
        return [chunk | {"usage": self.so_far.to_dict()}] if self._options.include_usage else []
