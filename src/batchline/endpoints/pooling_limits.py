"""Limits that embeddings, scores and reranking share: how a sequence is cut, how long it may be, how failures show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from batchline.config import TextConfig
from batchline.endpoints.engine_input import check_truncation, check_vocabulary, prompt_too_long
from batchline.errors import BadRequest, EngineDead, EngineError, EngineOutOfMemory, InternalServerError, RequestRefused
from batchline.openai_api.parsing import is_small
from batchline.pooling.batching import TokenSequence

T = TypeVar("T")

DEFAULT_TEXT = TextConfig()


def resolve_truncation(keep: int | None, *, max_model_len: int, num_special_tokens: int) -> int | None:
    """Tokens that a sequence is cut to, from `truncate_prompt_tokens`; -1 is the context length. Raises: BadRequest."""
    if keep is None:
        return None
    if keep == -1:
        return max_model_len
    check_truncation(keep, max_model_len)
    if keep <= num_special_tokens:
        raise BadRequest(
            f"truncate_prompt_tokens: {keep} leaves nothing of the text; "
            f"with its special tokens this model needs at least {num_special_tokens + 1}",
            param="truncate_prompt_tokens",
        )
    return keep


def check_sequences(sequences: Sequence[TokenSequence], *, max_model_len: int, vocab_size: int, param: str) -> None:
    """Every sequence has tokens, fits the model and holds only tokens that it knows. Raises: BadRequest naming one."""
    for index, sequence in enumerate(sequences):
        which = f"{param}[{index}]" if len(sequences) > 1 else param
        if not len(sequence):
            raise BadRequest(f"{which}: it has no tokens", param=which)
        if len(sequence) > max_model_len:
            raise prompt_too_long(max_model_len, len(sequence), which)
        if max(sequence.token_ids) >= vocab_size:
            check_vocabulary(sequence.token_ids, vocab_size, which)


def salted(sequences: Sequence[TokenSequence], salt: str | None) -> Sequence[TokenSequence]:
    """The sequences under a request's `cache_salt`."""
    return sequences if salt is None else [replace(sequence, cache_key=salt) for sequence in sequences]


async def off_loop_if_large(body: Mapping[str, Any], work: Callable[[], T]) -> T:
    """What reading a body gives; a large one is read on a thread, so that it does not hold up the event loop."""
    return work() if is_small(body) else await asyncio.to_thread(work)


@contextmanager
def engine_errors_answered() -> Iterator[None]:
    """A model that fails on a request is that request's error 500. One that has died is everybody's, and for one that
    lacks memory the request may be tried again."""
    try:
        yield
    except (EngineDead, EngineOutOfMemory):
        raise
    except RequestRefused as exc:
        raise BadRequest(str(exc)) from exc
    except EngineError as exc:
        raise InternalServerError("The model failed on this request") from exc
