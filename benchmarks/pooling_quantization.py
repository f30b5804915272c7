"""What `--quantization int8` gains for embeddings and scores, on each instruction set, and what it loses.

    python benchmarks/pooling_quantization.py [--kind embed|score] [--cpu-kernels avx2 avx512_bf16 amx] [--texts 100]
        [--runs 5] [--threads N]

Loads the workload's model in float32, in bfloat16 and with int8, and runs batches of tokens in turn, in this process:
no files, no tokenizer. Times are medians over the runs, as other programs may be busy. The cosines are those of whole
rows to float32, for texts of random words; a score has none. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pooling_workload import SPECIAL_TOKENS, make_pooling_workload
from sentence_transformers import CrossEncoder, SentenceTransformer

from batchline.config import CpuKernels, DType, ModelConfig, Quantization
from batchline.pooling.batching import TokenSequence
from batchline.pooling.loading import LoadedPoolingModel, load_pooling_model
from batchline.pooling.worker import Rows

SETTINGS: dict[str, tuple[DType, Quantization | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("auto", "int8"),
}


def main() -> None:
    """Run all settings on all instruction sets, and print."""
    options = _parse()
    folder = Path(options.folder) / f"pooling-{options.kind}"
    workload = make_pooling_workload(options.kind, options.texts, folder)
    results: list[dict[str, Any]] = []
    for cpu_kernels in options.cpu_kernels:
        models = {name: _load(str(workload.model), options, cpu_kernels, *SETTINGS[name]) for name in SETTINGS}
        torch.set_num_threads(options.threads)
        batches = _batches(workload.lengths, models["int8"])
        results += _measure(options, cpu_kernels, models, batches)
    print(json.dumps(results))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What int8 gains and loses for embeddings and scores.")
    parser.add_argument("--kind", choices=list(SPECIAL_TOKENS), default="embed")
    parser.add_argument("--cpu-kernels", nargs="+", default=["auto"])
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    return parser.parse_args()


def _load(
    model: str, options: argparse.Namespace, cpu_kernels: CpuKernels, dtype: DType, quantization: Quantization | None
) -> LoadedPoolingModel:
    config = ModelConfig(model=model, dtype=dtype, quantization=quantization, cpu_kernels=cpu_kernels, device="cpu")
    if options.kind == "embed":
        return load_pooling_model(config, SentenceTransformer, lambda _module, features: features["sentence_embedding"])
    return load_pooling_model(config, CrossEncoder, lambda _module, features: features["scores"].float().reshape(-1, 1))


def _batches(lengths: list[int], model: LoadedPoolingModel) -> list[list[TokenSequence]]:
    """Sequences of random tokens, by length, in batches as large as the model takes."""
    source = np.random.default_rng(0)
    batches: list[list[TokenSequence]] = [[]]
    for length in sorted(min(length, model.max_model_len) for length in lengths):
        if sum(map(len, batches[-1])) + length > model.limits.max_tokens:
            batches.append([])
        batches[-1].append(TokenSequence(token_ids=tuple(source.integers(1000, model.vocab_size, length).tolist())))
    return batches


def _measure(
    options: argparse.Namespace,
    cpu_kernels: str,
    models: dict[str, LoadedPoolingModel],
    batches: Sequence[list[TokenSequence]],
) -> list[dict[str, Any]]:
    num_tokens = sum(len(sequence) for batch in batches for sequence in batch)
    times: dict[str, list[float]] = {name: [] for name in models}
    rows: dict[str, Rows] = {}
    for _ in range(options.runs):
        for name, model in models.items():
            start = time.perf_counter()
            rows[name] = np.concatenate([model.run_batch(batch) for batch in batches])
            times[name].append(time.perf_counter() - start)
    results = []
    for name, model in models.items():
        result = {
            "kind": options.kind,
            "cpu_kernels": cpu_kernels,
            "setting": name,
            "runs_on": model.kernels,
            "tokens_per_s": round(num_tokens / statistics.median(times[name])),
            "best_tokens_per_s": round(num_tokens / min(times[name])),
            "times_bfloat16": round(statistics.median(times["bfloat16"]) / statistics.median(times[name]), 2),
            **_loss(rows[name], rows["float32"]),
        }
        print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
        results.append(result)
    return results


def _loss(rows: Rows, exact: Rows) -> dict[str, float]:
    if exact.shape[1] == 1:
        return {"largest_difference": round(float(np.abs(rows - exact).max()), 4)}
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (rows * exact).sum(1) / lengths
    return {"smallest_cosine": round(float(cosines.min()), 5), "median_cosine": round(float(np.median(cosines)), 5)}


if __name__ == "__main__":
    main()
