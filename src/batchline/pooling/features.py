"""Turns token sequences into the tensors that a sentence-transformers model takes, padded on the right.

A batch without padding has no attention mask, so that attention can skip the masking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from batchline.pooling.batching import TokenSequence


def make_features(
    sequences: Sequence[TokenSequence], *, pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor | int]:
    """`input_ids` (num_sequences, longest) int64, and if needed `attention_mask`, `token_type_ids`, `prompt_length`.

    All sequences have the same `num_prompt_tokens`.
    """
    lengths = [len(sequence) for sequence in sequences]
    features: dict[str, Any] = {"input_ids": _padded([s.token_ids for s in sequences], pad_token_id, device)}
    if min(lengths) < max(lengths):
        features["attention_mask"] = _padded([(1,) * length for length in lengths], 0, device)
    if any(sequence.token_type_ids is not None for sequence in sequences):
        type_ids = [s.token_type_ids or (0,) * len(s) for s in sequences]
        features["token_type_ids"] = _padded(type_ids, 0, device)
    if sequences[0].num_prompt_tokens:
        features["prompt_length"] = sequences[0].num_prompt_tokens
    return features


def _padded(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> torch.Tensor:
    table = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return torch.from_numpy(table).to(device)
