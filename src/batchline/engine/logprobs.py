"""Log-probabilities of the model's raw logits: of a chosen token, its rank, and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from batchline.engine import row_ops
from batchline.engine.request import TokenLogprobs

_BLOCK = 128
"""Entries per block. The k largest entries are in the k blocks with the largest maxima, so only these are searched."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of chosen tokens and of each row's most likely ones.

    logits: (n, vocab) raw; token_ids, num_top: n each; num_top -1 is the whole vocabulary.
    """
    found: list[TokenLogprobs] = []
    size = row_ops.rows_at_once(logits)
    for first in range(0, len(token_ids), size):
        part = slice(first, first + size)
        found += _of_part(logits[part].float(), token_ids[part], num_top[part])
    return found


def with_tokens(found: TokenLogprobs, logits: torch.Tensor, token_ids: Sequence[int]) -> TokenLogprobs:
    """The same with given tokens as the alternatives, best first. logits: (vocab,) raw."""
    row = logits[None].float()
    values = (row[:, list(token_ids)] - row_ops.log_normalizer(row))[0].tolist()
    return replace(found, top=tuple(sorted(zip(token_ids, values, strict=True), key=lambda pair: -pair[1])))


def _of_part(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    vocab = logits.shape[-1]
    counts = [vocab if count < 0 else min(count, vocab) for count in num_top]
    values = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    normalizer = row_ops.log_normalizer(logits)
    top_values, top_ids = _largest(logits, max(counts))
    logprobs = (values - normalizer)[:, 0].tolist()
    ranks = (row_ops.num_greater(logits, values)[:, 0] + 1).tolist()
    top_logprobs, top_tokens = (top_values - normalizer).tolist(), top_ids.tolist()
    return [
        TokenLogprobs(
            token_id,
            logprobs[row],
            ranks[row],
            tuple(zip(top_tokens[row][:count], top_logprobs[row][:count], strict=True)),
        )
        for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of the `count` largest entries of each row, largest first: (n, count) each."""
    num_rows, vocab = logits.shape
    num_blocks = vocab // _BLOCK
    if count == 0 or count >= num_blocks // 2:
        return logits.topk(count, dim=-1)
    blocks = logits[:, : num_blocks * _BLOCK].view(num_rows, num_blocks, _BLOCK)
    firsts = blocks.amax(-1).topk(count, dim=-1).indices * _BLOCK
    within = (firsts[:, :, None] + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    after = torch.arange(num_blocks * _BLOCK, vocab, device=logits.device).expand(num_rows, -1)
    candidates = torch.cat([within, after], dim=-1)
    values, indices = logits.gather(1, candidates).topk(count, dim=-1)
    return values, candidates.gather(1, indices)
