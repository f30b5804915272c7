"""Makes the callers' outputs of a step, and collects the log-probabilities of prompts for them."""

from __future__ import annotations

import torch

from batchline.engine.logprobs import token_logprobs
from batchline.engine.request import EmbeddingOutput, GenerationOutput
from batchline.engine.scheduler import Chunk
from batchline.engine.sequence import Sequence


def note_prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> None:
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
