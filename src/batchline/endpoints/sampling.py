"""From a request's fields to the engine's sampling parameters, in the order request > model > built-in default."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypeVar

from batchline.config import TextConfig
from batchline.endpoints.model import GenerativeModel
from batchline.endpoints.prompts import check_known, check_vocabulary
from batchline.engine.request import BannedSequences, SamplingParams
from batchline.errors import BadRequest
from batchline.openai_api.generation import GenerationBody
from batchline.text.tokenizer import Tokenizer

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0, as in the field's usual engines."""


def sampling_params(
    body: GenerationBody,
    model: GenerativeModel,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a prompt's first choice. Raises: BadRequest for what this model's vocabulary rules out.

    Tokenizes bad words: to be called off the event loop.
    """
    defaults = model.text.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    check_min_tokens(body, max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=_top_k(_first(body.top_k, defaults.top_k, 0), model.engine.vocab_size),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=model.config.seed if body.seed is None else body.seed,
        eos_token_ids=frozenset() if body.ignore_eos else model.engine.eos_token_ids,
        stop_token_ids=_token_ids(body.stop_token_ids, model, "stop_token_ids"),
        min_tokens=body.min_tokens,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        logit_bias=_logit_bias(body, model),
        allowed_token_ids=(
            None if body.allowed_token_ids is None else _token_ids(body.allowed_token_ids, model, "allowed_token_ids")
        ),
        bad_words=_known_bad_words(body, model),
    )


def check_min_tokens(body: GenerationBody, max_tokens: int) -> None:
    """Raises: BadRequest where the answer may not have as many tokens as it must."""
    if body.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens the answer may have",
            param="min_tokens",
        )


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one of a prompt's choices: with a seed, each choice has its own, derived from it."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=derived_seed(params.seed, choice))


def derived_seed(seed: int, choice: int) -> int:
    """A seed for a choice: the seed itself for choice 0, else a hash, the same on every machine."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def bad_words_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word at the start of a text and behind a space.

    The second is left out where the first covers it: where the space is a token of its own.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not bare:
            raise BadRequest(f"bad_words: {word[:80]!r} has no tokens", param="bad_words")
        sequences.append(bare)
        if spaced[-len(bare) :] != bare:
            sequences.append(spaced)
    return tuple(sequences)


def _known_bad_words(body: GenerationBody, model: GenerativeModel) -> BannedSequences | None:
    if not body.bad_words:
        return None
    words = BannedSequences(bad_words_ids(body.bad_words, model.tokenizer))
    check_known(words.extremes, model, "bad_words")
    return words


def _first(given: T | None, default: T | None, fallback: T) -> T:
    if given is not None:
        return given
    return fallback if default is None else default


def _top_k(wanted: int, vocab_size: int) -> int:
    """0, which is off, also where it lets every token pass: requests may ask for more than the engine can count."""
    return wanted if 0 < wanted < vocab_size else 0


def _token_ids(token_ids: list[int], model: GenerativeModel, field: str) -> frozenset[int]:
    return frozenset(check_vocabulary(tuple(token_ids), model.engine.vocab_size, field))


def _logit_bias(body: GenerationBody, model: GenerativeModel) -> dict[int, float]:
    check_vocabulary(tuple(body.logit_bias), model.engine.vocab_size, "logit_bias")
    return body.logit_bias


def check_num_logprobs(wanted: int | None, config: TextConfig, field: str) -> None:
    """Raises: BadRequest where more alternatives are wanted than the operator allows."""
    cap = config.max_logprobs
    if wanted is None or cap == -1:
        return
    if wanted == -1 or wanted > cap:
        raise BadRequest(f"{field}: at most {cap} log-probabilities per token may be asked for", param=field)
