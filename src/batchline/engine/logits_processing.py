"""Applies the requests' masks, biases and penalties to the logits of all sequences at once, in place.

Order: masks (allowed tokens, bad words, min_tokens) -> logit_bias -> penalties. The repetition penalty is that of
`transformers.generation.logits_process`, presence and frequency penalties are those of the OpenAI API. Each rule
collects its (row, token) pairs over the whole batch and changes them in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from batchline.engine.request import SamplingParams
from batchline.engine.sequence import Sequence as RunningSequence

T = TypeVar("T")

_REPETITION_PENALTIES = (1e-30, 1e30)
"""Penalties beyond these bounds change no more draws, but turn logits into infinities and NaN."""


def allow_only(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """Rule out every token whose bit is not set, in the given rows. In place, before anything else.

    logits: (num_seqs, vocab); masks: (len(rows), ceil(vocab / 32)) int32, token i being bit i % 32 of word i // 32.
    """
    octets = torch.from_numpy(masks.astype("<i4", copy=False).view(np.uint8)).to(logits.device).int()
    penalties = _octet_penalties(logits.device).index_select(0, octets.flatten())
    penalties = penalties.view(len(rows), -1)[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        logits += penalties  # ten times as fast as masked_fill_, which branches at each token
    else:
        logits[list(rows)] += penalties


@lru_cache(maxsize=8)
def _octet_penalties(device: torch.device) -> torch.Tensor:
    """(256, 8) float32: for each octet, 0 where bit j is set and -inf where it is not."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -math.inf).to(device)


def process_logits(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    """Apply every rule of every sequence. logits: (num_seqs, vocab) float32, modified in place."""
    _keep_allowed(logits, sequences)
    _ban(logits, sequences)
    _add_biases(logits, sequences)
    _penalize_repetition(logits, sequences)
    _penalize_output(logits, sequences)


def _keep_allowed(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    rows = _rows_where(sequences, lambda s: s.allowed_token_ids is not None)
    if rows:
        allowed = [_kept(sequences[row].sampling.allowed_token_ids or frozenset(), _token_array) for row in rows]
        pairs = _pairs(rows, allowed, logits.device)
        kept = logits[pairs]
        logits[torch.tensor(rows, device=logits.device)] = -math.inf
        logits[pairs] = kept


def _ban(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    rows, banned = [], []
    for row, sequence in enumerate(sequences):
        for tokens in _banned_tokens(sequence):
            rows.append(row)
            banned.append(tokens)
    if rows:
        logits[_pairs(rows, banned, logits.device)] = -math.inf


def _banned_tokens(sequence: RunningSequence) -> Iterator[np.ndarray]:
    """Tokens that would end the output too early or would complete a bad word."""
    sampling = sequence.sampling
    if sequence.num_output_tokens < sampling.min_tokens:
        yield _token_array([*sampling.eos_token_ids, *sampling.stop_token_ids])
    if sampling.bad_words is not None:
        yield sampling.bad_words.next_tokens(sequence.token_ids, sequence.num_output_tokens)


def _add_biases(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    rows = _rows_where(sequences, lambda s: bool(s.logit_bias))
    if rows:
        biases = [sequences[row].sampling.logit_bias for row in rows]
        pairs = _pairs(rows, [_kept(bias, _token_array) for bias in biases], logits.device)
        amounts = np.concatenate([_kept(bias, _amounts, 1) for bias in biases])
        logits[pairs] += torch.from_numpy(amounts).to(logits.device)


def _penalize_repetition(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    """Penalise tokens of prompt and output. A token that occurs twice is written twice, with the same value."""
    rows = _rows_where(sequences, lambda s: s.repetition_penalty != 1.0)
    if rows:
        seen = [sequences[row].tokens_between(0, sequences[row].num_tokens) for row in rows]
        strengths = np.clip([sequences[row].sampling.repetition_penalty for row in rows], *_REPETITION_PENALTIES)
        penalties = np.repeat(strengths.astype(np.float32), [len(tokens) for tokens in seen])
        factors = torch.from_numpy(penalties).to(logits.device)
        pairs = _pairs(rows, seen, logits.device)
        scores = logits[pairs]
        logits[pairs] = torch.where(scores < 0, scores * factors, scores / factors)


def _penalize_output(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> None:
    """Presence and frequency penalties, for each different token of each output."""
    rows = _rows_where(sequences, lambda s: s.presence_penalty != 0.0 or s.frequency_penalty != 0.0)
    rows = [row for row in rows if sequences[row].num_output_tokens > 0]
    if rows:
        penalized, vocab = [sequences[row] for row in rows], logits.shape[-1]
        outputs = [s.tokens_between(s.num_prompt_tokens, s.num_tokens) for s in penalized]
        owners = np.repeat(np.arange(len(rows)), [len(output) for output in outputs])
        keys, counts = np.unique(owners * vocab + np.concatenate(outputs), return_counts=True)
        owners, tokens = np.divmod(keys, vocab)
        strengths = [(s.sampling.presence_penalty, s.sampling.frequency_penalty) for s in penalized]
        presence, frequency = np.array(strengths)[owners].T
        amounts = torch.from_numpy((presence + counts * frequency).astype(np.float32))
        pairs = torch.from_numpy(np.stack([np.array(rows)[owners], tokens])).to(logits.device)
        logits[pairs[0], pairs[1]] -= amounts.to(logits.device)


def _rows_where(sequences: Sequence[RunningSequence], has_rule: Callable[[SamplingParams], bool]) -> list[int]:
    return [row for row, sequence in enumerate(sequences) if has_rule(sequence.sampling)]


def _token_array(tokens: Collection[int]) -> np.ndarray:
    return np.fromiter(tokens, np.int64, len(tokens))


def _amounts(biases: Mapping[int, float]) -> np.ndarray:
    return np.fromiter(biases.values(), np.float32, len(biases))


_kept_arrays: dict[tuple[int, int], tuple[object, np.ndarray]] = {}
_MAX_KEPT = 256


def _kept(collection: T, make: Callable[[T], np.ndarray], kind: int = 0) -> np.ndarray:
    """`make(collection)`, cached across steps and a request's choices, because collections may be large.

    The cache key is the collection's identity, which stays unique because the cache holds the collection too.
    """
    key = (id(collection), kind)
    found = _kept_arrays.get(key)
    if found is None:
        if len(_kept_arrays) >= _MAX_KEPT:
            _kept_arrays.clear()
        found = _kept_arrays[key] = (collection, make(collection))
    return found[1]


def _pairs(rows: Sequence[int], tokens: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Indices into the logits: each row with each of its tokens, sent to the device at once."""
    repeated = np.repeat(np.array(rows), [len(own) for own in tokens])
    return tuple(torch.from_numpy(np.stack([repeated, np.concatenate(tokens)])).to(device))
