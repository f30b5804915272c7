"""Checks requests for token ids that the model does not have: an id without an embedding would fail during a step."""

from __future__ import annotations

import logging
from itertools import chain

import numpy as np
import torch

from batchline.engine.model_loader import LoadedModel
from batchline.engine.sequence import Sequence
from batchline.errors import RequestRefused

logger = logging.getLogger(__name__)


def vocabulary_size(loaded: LoadedModel) -> int:
    """The number of token ids, from 0 on, that have an embedding and a logit."""
    weight = loaded.model.get_input_embeddings().weight  # type: ignore[operator]
    assert isinstance(weight, torch.Tensor)
    return min(loaded.vocab_size, len(weight))


def known_eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """The model's end tokens, without those outside its vocabulary, which some `generation_config.json` list."""
    known = frozenset(token_id for token_id in loaded.eos_token_ids if 0 <= token_id < vocabulary_size(loaded))
    if known != loaded.eos_token_ids:
        logger.warning(
            "the model's configuration names end tokens outside its vocabulary of %d tokens, which never end an "
            "answer: %s",
            vocabulary_size(loaded),
            sorted(loaded.eos_token_ids - known),
        )
    return known


def check_token_ids(sequence: Sequence, vocab_size: int) -> None:
    """Check that every token id of a request is below `vocab_size`. Raises: RequestRefused."""
    prompt = np.frombuffer(sequence.token_ids, dtype=np.int64)
    sampling = sequence.sampling
    named = chain(
        sampling.eos_token_ids,
        sampling.stop_token_ids,
        sampling.logit_bias,
        sampling.allowed_token_ids or (),
        sampling.bad_words.extremes if sampling.bad_words else (),
    )
    ids = [int(prompt.min()), int(prompt.max()), *named]
    if min(ids) < 0 or max(ids) >= vocab_size:
        unknown = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestRefused(f"Token id {unknown} is outside this model's vocabulary of {vocab_size} tokens")


def check_length(sequence: Sequence, max_model_len: int) -> None:
    """Check that the prompt is not empty, and fits the context with its max_tokens. Raises: RequestRefused."""
    if sequence.num_prompt_tokens == 0:
        raise RequestRefused("The prompt is empty: it has no tokens")
    if sequence.num_prompt_tokens + sequence.sampling.max_tokens > max_model_len:
        raise RequestRefused(
            f"{sequence.num_prompt_tokens} prompt tokens and max_tokens {sequence.sampling.max_tokens} are more than "
            f"this model's maximum context length of {max_model_len} tokens"
        )
