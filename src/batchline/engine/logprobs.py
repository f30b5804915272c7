"""Log-probabilities of the model's raw logits: of a chosen token, its rank, and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch

from batchline.engine import row_ops
from batchline.engine.request import TokenLogprobs

_BLOCK = 128
"""Entries per block. The k largest entries are in the k blocks with the largest maxima, so only these are searched."""


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int], chosen: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Log-probabilities of the rows' tokens, and of each row's most likely or chosen ones, best first.

    logits: (n, vocab) raw; token_ids, num_top: n each; num_top -1 is the whole vocabulary. chosen: the alternatives of
    each row, in place of the most likely ones if there are any; empty if no row has chosen ones.
    """
    found: list[TokenLogprobs] = []
    size = row_ops.rows_at_once(logits)
    for first in range(0, len(token_ids), size):
        part = slice(first, first + size)
        found += _of_part(logits[part].float(), token_ids[part], num_top[part], chosen[part])
    return found


def _of_part(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int], chosen: Sequence[Sequence[int]]
) -> list[TokenLogprobs]:
    vocab = logits.shape[-1]
    counts = [vocab if count < 0 else min(count, vocab) for count in num_top]
    values = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    normalizer = row_ops.log_normalizer(logits)
    top_values, top_ids = _largest(logits, max(counts))
    logprobs = (values - normalizer)[:, 0].tolist()
    ranks = (row_ops.num_greater(logits, values)[:, 0] + 1).tolist()
    top_logprobs, top_tokens = (top_values - normalizer).tolist(), top_ids.tolist()
    tops = [
        tuple(zip(tokens[:count], values_of[:count], strict=True))
        for tokens, values_of, count in zip(top_tokens, top_logprobs, counts, strict=True)
    ]
    if any(chosen):
        for row, pairs in _chosen_ones(logits, normalizer, chosen).items():
            tops[row] = pairs
    return [TokenLogprobs(*of_row) for of_row in zip(token_ids, logprobs, ranks, tops, strict=True)]


def _chosen_ones(
    logits: torch.Tensor, normalizer: torch.Tensor, chosen: Sequence[Sequence[int]]
) -> dict[int, tuple[tuple[int, float], ...]]:
    """The chosen tokens of the rows that have any, best first, with their log-probabilities, read at once."""
    rows = [row for row, token_ids in enumerate(chosen) for _ in token_ids]
    columns = list(chain.from_iterable(chosen))
    values = iter((logits[rows, columns] - normalizer[rows, 0]).tolist())
    return {
        row: tuple(sorted(zip(token_ids, islice(values, len(token_ids)), strict=True), key=lambda pair: -pair[1]))
        for row, token_ids in enumerate(chosen)
        if token_ids
    }


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
