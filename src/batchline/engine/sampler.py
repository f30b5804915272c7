"""Samples the next token of every sequence from the logits, vectorised over the batch.

The order of the work:

    raw log-probabilities, for the answer (`logprobs.py`)
    -> the constraint's mask
    -> the request's masks, biases and penalties (`logits_processing.py`)
    -> the most likely token, or a draw: temperature -> top_k -> top_p -> min_p -> one random token

The order and formulas of the filters are those of `transformers.generation.logits_process`. Each filter keeps the first
tokens of a row that is sorted by probability. So a draw needs only the row's largest values in order and one cumulative
sum over them.

The randomness is one uniform number per token, computed only from (seed, output position), and inverted through the
cumulative distribution. So a sequence's draw does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from batchline.engine import row_ops
from batchline.engine.logits_processing import process_logits
from batchline.engine.request import SamplingParams
from batchline.engine.sequence import Sequence as RunningSequence

NUM_CANDIDATES = 1024
"""How many of the most likely tokens are sorted first; the whole vocabulary only if they do not suffice."""

_BLOCK = 128
"""Entries per part: parts are summed first, and only the part with the draw is searched."""


def sample(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> list[int | None]:
    """The next token of each sequence; None if every token is ruled out.

    logits: (num_seqs, vocab) float32, modified in place.
    """
    process_logits(logits, sequences)
    tokens = row_ops.argmax(logits)
    is_ruled_out = logits.gather(1, tokens[:, None])[:, 0] == -math.inf
    random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
    if random_rows:
        tokens[torch.tensor(random_rows, device=logits.device)] = _draw(logits, sequences, random_rows)
    return [None if out else token for token, out in zip(tokens.tolist(), is_ruled_out.tolist(), strict=True)]


def _draw(logits: torch.Tensor, sequences: Sequence[RunningSequence], rows: Sequence[int]) -> torch.Tensor:
    """One random token for each of the given rows. logits: (num_seqs, vocab) float32, after masks and penalties.
    Returns (len(rows),) int64."""
    sampling = [sequences[row].sampling for row in rows]
    chosen = [sequences[row] for row in rows]
    numbers = uniform([s.seed for s in chosen], [s.num_output_tokens for s in chosen])
    draws = torch.from_numpy(numbers).to(logits.device)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for is_filtered in (False, True):
        members = [index for index, s in enumerate(sampling) if _is_filtered(s) is is_filtered]
        for part in _parts(members, row_ops.rows_at_once(logits)):
            indices = torch.tensor([part, [rows[index] for index in part]], device=logits.device)
            part_logits, part_draws = logits.index_select(0, indices[1]), draws[indices[0]]
            own = [sampling[index] for index in part]
            if is_filtered:
                tokens[indices[0]] = _draw_filtered(part_logits, part_draws, own, NUM_CANDIDATES)
            else:
                probs = torch.softmax(part_logits.div_(_temperatures(own, logits.device)), -1)
                tokens[indices[0]] = _invert(probs, part_draws)
    return tokens


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): SplitMix64 (Steele, Lea and Flood 2014) over a mix of both."""
    state = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _splitmix(state) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.asarray((_splitmix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _parts(members: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(members), size):
        yield members[first : first + size]


def _temperatures(sampling: Sequence[SamplingParams], device: torch.device) -> torch.Tensor:
    return torch.tensor([[s.temperature] for s in sampling], device=device)


def _draw_filtered(
    logits: torch.Tensor, draws: torch.Tensor, sampling: Sequence[SamplingParams], count: int
) -> torch.Tensor:
    """Rows with top_k, top_p or min_p, from their `count` largest entries, or from all if those do not suffice."""
    vocab = logits.shape[-1]
    count = min(count, vocab)
    temperatures = _temperatures(sampling, logits.device)
    values = row_ops.largest(logits, count)
    weights = values.sub(values[:, :1]).div_(temperatures).exp_()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    needs_mass = count < vocab and any(s.top_p < 1.0 for s in sampling)
    mass = _mass(logits, temperatures) if needs_mass else cumulative[:, -1:]
    num_kept, is_certain = _num_kept(weights, cumulative, mass, sampling, vocab)
    targets = draws[:, None] * cumulative.gather(1, num_kept - 1)
    positions = torch.searchsorted(cumulative, targets, right=True).minimum(num_kept - 1)
    chosen = values.gather(1, positions)
    tokens = row_ops.find(logits, chosen, positions - row_ops.num_greater(values, chosen))
    rest = [] if count == vocab else (~is_certain).nonzero()[:, 0].tolist()
    if rest:
        tokens[rest] = _draw_filtered(logits[rest], draws[rest], [sampling[row] for row in rest], vocab)
    return tokens


def _mass(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The total weight of all tokens, relative to the most likely one. Returns (n, 1) float64."""
    scaled = logits / temperatures
    return (row_ops.log_normalizer(scaled) - scaled.amax(-1, keepdim=True)).double().exp()


def _num_kept(
    weights: torch.Tensor,
    cumulative: torch.Tensor,
    mass: torch.Tensor,
    sampling: Sequence[SamplingParams],
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the most likely tokens pass all filters, and whether these candidates suffice to know that.

    weights: (n, count), largest first, the first being 1; cumulative: their sums so far; mass: (n, 1) of all tokens.
    Returns (n, 1) int64, at least 1, and (n,) bool.
    """
    device, count = weights.device, weights.shape[-1]
    filters = [(s.top_k if s.top_k > 0 else vocab, s.top_p, s.min_p) for s in sampling]
    top_k, top_p, min_p = torch.tensor(filters, dtype=torch.float64, device=device)[:, :, None].unbind(1)
    in_top_k = top_k.clamp(max=count).long()
    # top_p counts within the tokens that top_k keeps; a token stays while the mass before it is below top_p
    total = torch.where(top_k <= count, cumulative.gather(1, in_top_k - 1), mass)
    bound = torch.where(top_p < 1.0, top_p * total, math.inf)
    in_top_p = torch.searchsorted(cumulative, bound) + 1
    in_min_p = torch.searchsorted(-weights, -min_p.float(), right=True)
    is_total_known = (top_k >= vocab) | (top_p >= 1.0)
    is_certain = (top_k <= count) | is_total_known & ((in_top_p <= count) | (in_min_p < count))
    # the most likely token stays, as in transformers, even at top_p 0
    return in_top_k.minimum(in_top_p).minimum(in_min_p).clamp_(min=1), is_certain[:, 0]


def _invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index where the cumulative weight passes draw * total. weights: (n, k) >= 0; draws: (n,) float64 in [0, 1).

    In float64, so that a draw is not rounded onto a neighbour; zero weights can never be chosen.
    """
    num_rows, num_weights = weights.shape
    padding = -num_weights % _BLOCK
    blocks = (pad(weights, (0, padding)) if padding else weights).view(num_rows, -1, _BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = draws[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[-1] - 1)
    starts = pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(num_rows, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(inside, targets - starts, right=True)
    return (block * _BLOCK + index)[:, 0].clamp_(max=num_weights - 1)
