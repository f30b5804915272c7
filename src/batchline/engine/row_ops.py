"""Operations over rows of logits that are slow in torch on a CPU: numpy runs them there, torch on other devices.

Microseconds for a row of 32,000 on one core with AVX-512:

                                 torch     numpy
    first largest entry          18        1.5
    1,024 largest in order       50-200    26
    all in order                 2,000     60
    comparing and counting       27        6

No operation waits for the device or loops over rows in Python.
"""

from __future__ import annotations

import numpy as np
import torch


def runs_by_numpy(logits: torch.Tensor) -> bool:
    """Whether these rows are in memory that numpy reads."""
    return logits.device.type == "cpu"


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows to work on at a time: on a CPU as many as stay in its cache from one operation to the next."""
    return max(1, (1 << 19) // logits.shape[-1]) if logits.device.type == "cpu" else 1024


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first largest entry of each row. Returns (n,) int64."""
    if not runs_by_numpy(logits):
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, largest first. Returns (n, count)."""
    if not runs_by_numpy(logits):
        return logits.topk(count, dim=-1).values
    values = logits.numpy()
    rest = logits.shape[-1] - count
    if rest > 0:
        values = np.partition(values, rest, axis=-1)[:, rest:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def num_greater(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many entries of each row are greater than its value. values: (n, 1). Returns (n, 1) int64."""
    if not runs_by_numpy(logits):
        return (logits > values).sum(-1, keepdim=True)
    # by the narrow type: numpy adds in it directly, and counts up to the vocabulary fit
    counts = (logits.numpy() > values.numpy()).sum(-1, keepdims=True, dtype=np.int32)
    return torch.from_numpy(counts).long()


def find(logits: torch.Tensor, values: torch.Tensor, num_before: torch.Tensor) -> torch.Tensor:
    """The column of each row's value, after skipping `num_before` earlier columns with the same value.

    values, num_before: (n, 1). Returns (n,) int64; an arbitrary column if the row has too few with that value.
    """
    if not runs_by_numpy(logits):
        return ((logits == values).cumsum(-1) > num_before).int().argmax(-1)
    num_rows, width = logits.shape
    indices = np.append(np.flatnonzero(logits.numpy() == values.numpy()), 0)
    firsts = np.searchsorted(indices[:-1], np.arange(num_rows) * width)
    wanted = np.minimum(firsts + num_before.numpy()[:, 0], len(indices) - 1)
    return torch.from_numpy(indices[wanted] % width)


def log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's summed exponentials, (n, 1): what log_softmax subtracts.

    Computed from the most likely entry's probability: on a CPU, torch's softmax takes half the time of its logsumexp.
    """
    return logits.amax(-1, keepdim=True) - torch.softmax(logits, -1).amax(-1, keepdim=True).log()
