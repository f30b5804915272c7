"""Samples the next token of every sequence from the logits, vectorised over the batch.

Order: raw log-probabilities, which are reported (`logprobs.py`) -> the constraint's mask -> the request's masks, biases
and penalties (`logits_processing.py`) -> greedy, or temperature, filters and one draw (`drawing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from batchline.engine import row_ops
from batchline.engine.drawing import draw
from batchline.engine.logits_processing import process_logits
from batchline.engine.sequence import Sequence as RunningSequence


def sample(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> list[int | None]:
    """The next token of each sequence; None if every token is ruled out.

    logits: (num_seqs, vocab) float32, modified in place.
    """
    process_logits(logits, sequences)
    tokens = row_ops.argmax(logits)
    is_ruled_out = logits.gather(1, tokens[:, None])[:, 0] == -math.inf
    random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
    if random_rows:
        tokens[torch.tensor(random_rows, device=logits.device)] = draw(logits, sequences, random_rows)
    return [None if out else token for token, out in zip(tokens.tolist(), is_ruled_out.tolist(), strict=True)]
