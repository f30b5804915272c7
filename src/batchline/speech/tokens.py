"""The control tokens of a Whisper model, and the prompts and timestamps made of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchline.errors import UnsupportedModel

SpeechTask = Literal["transcribe", "translate"]

SECONDS_PER_TIMESTAMP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTokens:
    """Ids of control tokens, and which tokens are never chosen.

    languages: ids by code, such as `en`; empty for a model that knows one language. tasks: ids by task, empty as well.
    first_timestamp: the id of `<|0.00|>`. suppressed, suppressed_first: never chosen, and not as the first token.
    last_initial_timestamp: the latest one that a window may begin with. max_length: of prompt and text together.
    own_max_length: of the text, as the checkpoint sets it.
    """

    start: int
    end: int
    previous: int | None
    no_timestamps: int
    no_speech: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    last_initial_timestamp: int | None
    max_length: int
    own_max_length: int | None
    vocab_size: int

    @property
    def first_timestamp(self) -> int:
        """The id of `<|0.00|>`; later ones follow it."""
        return self.no_timestamps + 1

    def prompt(
        self, language: int | None, task: SpeechTask, previous: Sequence[int], *, timestamps: bool
    ) -> tuple[int, ...]:
        """The tokens that the decoder starts with. previous: of the text before the window."""
        ids = [self.previous, *previous] if previous and self.previous is not None else []
        ids.append(self.start)
        if language is not None:
            ids += [language, self.tasks[task]]
        if not timestamps:
            ids.append(self.no_timestamps)
        return tuple(ids)

    @property
    def max_previous(self) -> int:
        """How many tokens of the text before a window fit into the prompt."""
        return self.max_length // 2 - 1

    def length_limit(self, num_prompt_tokens: int) -> int:
        """The most tokens of a prompt and its text."""
        if self.own_max_length is None:
            return self.max_length
        return min(self.own_max_length + min(num_prompt_tokens, self.max_previous), self.max_length)


def read_tokens(
    model: str, generation: Any, config: Any, vocabulary: Mapping[str, int], *, max_length: int
) -> SpeechTokens:
    """The tokens of a model. generation, config: transformers' objects. Raises: UnsupportedModel."""
    no_timestamps = getattr(generation, "no_timestamps_token_id", None) or vocabulary.get("<|notimestamps|>")
    end = generation.eos_token_id
    if no_timestamps is None or not isinstance(end, int) or generation.decoder_start_token_id is None:
        raise UnsupportedModel(model, "its generation_config.json lacks Whisper's control tokens")
    is_multilingual = getattr(generation, "is_multilingual", None)
    languages = getattr(generation, "lang_to_id", None) or {}
    tasks = getattr(generation, "task_to_id", None) or {
        task: vocabulary[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in vocabulary
    }
    knows_languages = is_multilingual is not False and bool(languages) and "transcribe" in tasks
    previous = getattr(generation, "prev_sot_token_id", None) or vocabulary.get("<|startofprev|>")
    return SpeechTokens(
        start=generation.decoder_start_token_id,
        end=end,
        previous=previous,
        no_timestamps=no_timestamps,
        no_speech=no_timestamps - 1,
        languages={name.strip("<|>"): number for name, number in languages.items()} if knows_languages else {},
        tasks=tasks if knows_languages else {},
        suppressed=tuple(generation.suppress_tokens or ()),
        suppressed_first=tuple(generation.begin_suppress_tokens or ()),
        last_initial_timestamp=getattr(generation, "max_initial_timestamp_index", None),
        max_length=max_length,
        own_max_length=generation.max_length,
        vocab_size=config.vocab_size,
    )


def allowed_timestamps(tokens: Sequence[int], rules: SpeechTokens) -> tuple[bool, int, bool]:
    """What may follow the text so far: (whether text may, the first timestamp that may, whether any may).

    Timestamps come in pairs, except before the end, and never decrease. An end token may follow whatever text may not.
    """
    begin = rules.first_timestamp
    after_one = bool(tokens) and tokens[-1] >= begin
    after_two = len(tokens) < 2 or tokens[-2] >= begin
    last = next((token for token in reversed(tokens) if token >= begin), None)
    closes_pair = after_one and not after_two
    earliest = begin if last is None else last if closes_pair else last + 1
    return not closes_pair, earliest, not (after_one and after_two)


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """A part of a window's tokens. start, end: in seconds from the window's beginning."""

    start: float
    end: float
    tokens: tuple[int, ...]


def split_by_timestamps(
    tokens: Sequence[int], first_timestamp: int, num_frames: int, frames_per_timestamp: int = 2
) -> tuple[list[TimedTokens], int]:
    """The segments of a window, and by how many frames the next window starts after it.

    Text after the last pair of timestamps was cut off by the window's end, so the next window starts there. As in
    transformers and OpenAI's own code. num_frames: of the window, each as long as `1 / frames_per_timestamp` timestamp.
    """
    stamps = [token >= first_timestamp for token in tokens]
    ends_with_one = stamps[-2:] == [False, True]
    cuts = [index + 1 for index in range(len(tokens) - 1) if stamps[index] and stamps[index + 1]]
    if not cuts:
        last = next((token for token in reversed(tokens) if token >= first_timestamp), first_timestamp)
        end = last - first_timestamp or num_frames // frames_per_timestamp
        return [TimedTokens(0.0, end * SECONDS_PER_TIMESTAMP, tuple(tokens))], num_frames
    if ends_with_one:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the second timestamp of the last pair, too: it tells the segment's end
    starts = [0, *cuts[:-1]]
    segments = []
    for start, stop in zip(starts, cuts, strict=True):
        part = tokens[start:stop]
        closing = part[-2] if stop == cuts[-1] and not ends_with_one else part[-1]
        times = [(token - first_timestamp) * SECONDS_PER_TIMESTAMP for token in (part[0], closing)]
        segments.append(TimedTokens(times[0], times[1], tuple(part)))
    if ends_with_one:
        return segments, num_frames
    return segments, (tokens[cuts[-1] - 2] - first_timestamp) * frames_per_timestamp
