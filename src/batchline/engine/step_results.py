"""Reads each sequence's result from a computed step, and makes the callers' outputs from the sequences.

`read_results` does not apply the results to the sequences, so that a step that fails can be undone and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from batchline.engine.kv_cache import CacheGroup, by_layer
from batchline.engine.model_runner import StepResult
from batchline.engine.request import EmbeddingOutput, GenerationOutput, TokenLogprobs
from batchline.engine.row_ops import token_logprobs
from batchline.engine.sampler import allow_only, sample
from batchline.engine.sequence import Sequence
from batchline.engine.step import Chunk, Step
from batchline.engine.token_masks import StepMasks
from batchline.errors import ConstraintFailed, EngineError, NumbersNotFinite


@dataclass(slots=True)
class SequenceResult:
    """A step's result for one sequence: a token, a hidden state, an error, or nothing if no token is sampled.

    row: the row of its last position in the step's logits and hidden states.
    """

    sequence: Sequence
    row: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    hidden: torch.Tensor | None = None
    error: EngineError | None = None


def finite_reach(groups: Iterable[CacheGroup]) -> int | None:
    """How far back a NaN in keys and values certainly shows in a position's result, in positions; None is no limit."""
    windows = [group.sliding_window for group in by_layer(groups)]
    return None if None in windows else sum(window - 1 for window in windows if window is not None)


@torch.inference_mode()
def read_results(
    step: Step, result: StepResult, masks: StepMasks | None, vocab_size: int, reach: int | None
) -> list[SequenceResult]:
    """Sample for the sequences whose last position was computed. Unfinished prompts get no result.

    vocab_size: token ids from this one on are never sampled. reach: see `finite_reach`.
    """
    results: list[SequenceResult] = []
    sampled: list[SequenceResult] = []
    logits = result.logits[:, :vocab_size]
    is_finite = torch.isfinite(result.hidden).all(-1).tolist()
    first = 0
    for chunk in step.chunks:
        num_rows, sequence = chunk.num_wanted_rows, chunk.sequence
        if num_rows == 0:
            continue
        own = slice(first, first + num_rows)
        first += num_rows
        if not all(is_finite[own]):
            error = NumbersNotFinite(
                "the model computed numbers for this request that are not finite (NaN or infinite)"
            )
            results.append(SequenceResult(sequence, first - 1, error=error))
            continue
        if num_rows == chunk.num_tokens or reach is None or chunk.end - sequence.num_finite_tokens <= reach:
            sequence.num_finite_tokens = chunk.end
        if sequence.wants_prompt_logprobs:
            _note_prompt_logprobs(chunk, logits[own])
        if not chunk.is_last:
            continue
        results.append(SequenceResult(sequence, first - 1))
        if sequence.wants_hidden:
            results[-1].hidden = result.hidden[first - 1]
        elif sequence.needs_next_token:
            sampled.append(results[-1])
    if sampled:
        _sample(sampled, logits, masks)
    return results


def _note_prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> None:
    """Record prompt log-probabilities: position i's logits give those of token i + 1. Earlier records are kept, such as
    from before a preemption or from an undone step."""
    sequence = chunk.sequence
    first = len(sequence.prompt_logprobs) - 1
    last = min(chunk.end, sequence.num_prompt_tokens - 1)
    if first >= last or (len(logits) <= 1 and chunk.num_tokens > 1):
        return
    tokens = sequence.token_ids[first + 1 : last + 1].tolist()
    rows = logits[first - chunk.start : last - chunk.start]
    num_top = sequence.sampling.prompt_logprobs or 0
    sequence.prompt_logprobs += token_logprobs(rows, tokens, [num_top] * len(tokens))


def _sample(results: SequenceOf[SequenceResult], logits: torch.Tensor, masks: StepMasks | None) -> None:
    """Fill in the next tokens, and their log-probabilities if wanted, or the error."""
    sequences = [result.sequence for result in results]
    wanting = [index for index, s in enumerate(sequences) if s.sampling.logprobs is not None]
    rows = [result.row for result in results]
    chosen = logits if rows == list(range(len(logits))) else logits[rows]  # a copy costs as much as the sampling
    raw = chosen[wanting] if wanting else None  # a copy: sampling works in place
    if masks is not None:
        _constrain(chosen, results, masks)
    tokens = sample(chosen, sequences)
    for result, token in zip(results, tokens, strict=True):
        result.token = token
        if token is None and result.error is None:
            result.error = _no_token_left(result.sequence)
    if raw is not None:
        wanted = [sequences[index].sampling for index in wanting]
        num_top = [0 if sampling.logprob_token_ids else sampling.logprobs or 0 for sampling in wanted]
        chosen_ids = [sampling.logprob_token_ids for sampling in wanted]
        reported = token_logprobs(raw, [tokens[index] or 0 for index in wanting], num_top, chosen_ids)
        for index, logprobs in zip(wanting, reported, strict=True):
            results[index].logprobs = logprobs


def _constrain(logits: torch.Tensor, results: SequenceOf[SequenceResult], masks: StepMasks) -> None:
    """Wait for the masks, and rule out the tokens that each constrained sequence's matcher forbids. In place."""
    masks.wait()
    rows, matchers = [], []
    for row, result in enumerate(results):
        matcher = result.sequence.matcher
        if matcher is not None:
            rows.append(row)
            matchers.append(matcher)
            result.error = masks.failure(matcher)
    if rows:
        allow_only(logits, rows, masks.rows(matchers))


def _no_token_left(sequence: Sequence) -> ConstraintFailed:
    """The error that names everything in the request that rules tokens out at this position."""
    sampling = sequence.sampling
    ends_too_early = sequence.num_output_tokens < sampling.min_tokens
    ruling_out = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": sampling.bad_words is not None,
        "min_tokens": ends_too_early,
        "stop_token_ids": bool(sampling.stop_token_ids) and (ends_too_early or sequence.matcher is not None),
        "the required format of the output": sequence.matcher is not None,
    }
    names = ", ".join(name for name, rules_out in ruling_out.items() if rules_out)
    return ConstraintFailed(f"No token satisfies all constraints of the request ({names}). Change one of them.")


def embedding_output(sequence: Sequence, hidden: torch.Tensor) -> EmbeddingOutput:
    """The output of an embedding request. hidden: (hidden_size,)."""
    return EmbeddingOutput(
        request_id=sequence.request_id,
        hidden=hidden.float().cpu().numpy().copy(),  # a view would keep the whole step's rows
        num_cached_tokens=sequence.num_cached_tokens or 0,
    )


def generation_output(sequence: Sequence) -> GenerationOutput:
    """The tokens since the previous output; marks them as reported."""
    start = sequence.num_emitted_tokens
    sequence.num_emitted_tokens = sequence.num_output_tokens
    wants_logprobs = sequence.sampling.logprobs is not None
    is_first = start == 0
    return GenerationOutput(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + start :]),
        logprobs=tuple(sequence.logprobs[start:]) if wants_logprobs else None,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first and sequence.wants_prompt_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        is_complete=sequence.is_complete,
        num_cached_tokens=sequence.num_cached_tokens or 0,
    )
