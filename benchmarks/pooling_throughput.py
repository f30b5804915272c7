"""Embeddings and scores: `batchline run-batch` on texts of mixed lengths, against sentence-transformers at its best.

    python benchmarks/pooling_throughput.py --kind embed|score [--texts 5000] [--runs 3] [--dtype bfloat16]
        [--quantization int8]

First finds the peer's best dtype and batch size on a part of the texts, then runs both on all of them in turn, each in
a fresh process. `run_s` is the time after loading: from the loaded model to the finished file here, the call of
`encode` or `predict` alone there. `total_s` is the whole process, imports and loading included. Ratios are of medians.
Rows are compared with the peer's in float32. With `--quantization`, `run-batch` also runs with it, in turn with the
others; `quantized_gain` is how many times as fast it then is after loading. The limit is the arithmetic of the tokens,
without padding, at the matrix rate measured in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ceiling import matrix_flops
from numpy.typing import NDArray
from pooling_workload import HIDDEN, INTERMEDIATE, LAYERS, MODEL_NAME, PoolingWorkload, make_pooling_workload

PEER = Path(__file__).parent / "peers" / "sentence_transformers_run.py"
BATCH_SIZES = (8, 16, 32, 64, 128, 256)
PRODUCTS = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
"""(inputs, outputs) of a layer's linear layers."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: seconds in all, and of those after the model was loaded."""

    total_s: float
    run_s: float


def main() -> None:
    """Make the workload, find the peer's best setting, run both in turn, and print."""
    options = _parse()
    torch.set_num_threads(options.threads)
    folder = Path(options.folder) / f"pooling-{options.kind}"
    sample = make_pooling_workload(options.kind, options.sample, folder / "sample")
    workload = make_pooling_workload(options.kind, options.texts, folder)
    rate = matrix_flops(PRODUCTS, getattr(torch, options.dtype))
    sweep = _run_peer(sample, options, options.peer_dtype, BATCH_SIZES)[1]
    best = min(sweep, key=lambda run: run["run_s"])
    expected = _peer_rows(sample, options, folder)
    ours, quantized, peers = [], [], []
    extra = () if options.quantization is None else ("--quantization", options.quantization)
    for _ in range(options.runs):
        ours.append(_run_command(workload, options))
        if extra:
            quantized.append(_run_command(workload, options, *extra))
        run, (timed,) = _run_peer(workload, options, [best["dtype"]], [best["batch_size"]])
        peers.append(Run(run.total_s, timed["run_s"]))
    rate = max(rate, matrix_flops(PRODUCTS, getattr(torch, options.dtype)))
    result = _result(options, ours, peers, _limit_seconds(workload.lengths, rate))
    result |= {"peer_dtype": best["dtype"], "peer_batch_size": best["batch_size"]}
    result["matrix_gflops"] = round(rate / 1e9, 1)
    result |= _agreement(_rows(sample, options), expected)
    if extra:
        agreement = _agreement(_rows(sample, options, *extra), expected)
        result |= _gain(options, ours, quantized) | {f"quantized_{name}": value for name, value in agreement.items()}
    _print(sweep, result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="run-batch on a pooling model against sentence-transformers.")
    parser.add_argument("--kind", choices=["embed", "score"], default="embed")
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--sample", type=int, default=250, help="texts to find the peer's best setting on")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--peer-dtype", nargs="+", default=["float32", "bfloat16"], help="what the peer may choose from"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peer's packages")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    parser.add_argument(
        "--option", action="append", default=[], help="passed on to run-batch, e.g. --option=--max-inflight=64"
    )
    return parser.parse_args()


def _run_command(
    workload: PoolingWorkload, options: argparse.Namespace, *extra: str, output: Path | None = None
) -> Run:
    """The command in a process of its own. Exits where it, or a line, failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "batchline.run_batch", "-i", str(workload.batch)]
        command += ["-o", str(output or Path(folder) / "results.jsonl"), "--model", str(workload.model), "--no-resume"]
        command += ["--served-model-name", MODEL_NAME, "--dtype", options.dtype, "--fail-on-error", *options.option]
        command += extra
        start = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        messages = [(time.perf_counter(), line) for line in process.stderr]
        status = process.wait()
        end = time.perf_counter()
    if status != 0:
        raise SystemExit("run-batch failed:\n" + "".join(line for _, line in messages))
    loaded = next(at for at, line in messages if "Running " in line)
    return Run(total_s=end - start, run_s=end - loaded)


def _run_peer(
    workload: PoolingWorkload, options: argparse.Namespace, dtypes: Any, batch_sizes: Any, *extra: str
) -> tuple[Run, list[dict[str, Any]]]:
    """The peer in a process of its own, and its time for each combination."""
    command = [options.peer_python, str(PEER), options.kind, str(workload.model), str(workload.texts)]
    command += ["--threads", str(options.threads), "--dtype", *dtypes, "--batch-size", *map(str, batch_sizes), *extra]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as exc:
        raise SystemExit(f"no Python at {options.peer_python}; peers/README.md says how to set it up") from exc
    total_s = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"the peer failed:\n{done.stderr}")
    timed = json.loads(done.stdout.strip().splitlines()[-1])
    return Run(total_s, total_s - timed["loaded_s"]), timed["runs"]


def _peer_rows(sample: PoolingWorkload, options: argparse.Namespace, folder: Path) -> NDArray[np.float32]:
    """The peer's float32 rows for the sample."""
    rows = folder / "expected.npy"
    _run_peer(sample, options, ["float32"], [32], "--save", str(rows))
    loaded: NDArray[np.float32] = np.load(rows)
    return loaded


def _rows(sample: PoolingWorkload, options: argparse.Namespace, *extra: str) -> NDArray[np.float32]:
    """Our rows for the sample."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.jsonl"
        _run_command(sample, options, *extra, output=output)
        rows = [_row(json.loads(line)["response"]["body"]["data"][0]) for line in output.open()]
    return np.asarray(rows, dtype=np.float32)


def _agreement(rows: NDArray[np.float32], expected: NDArray[np.float32]) -> dict[str, float]:
    """With the peer's float32 rows: the largest difference of any number, and the smallest cosine of vectors."""
    rows = rows.reshape(expected.shape)
    found = {"largest_difference": float(np.abs(rows - expected).max())}
    if expected.ndim > 1:
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
        found["smallest_cosine"] = round(float(((rows * expected).sum(1) / lengths).min()), 5)
    return found


def _gain(options: argparse.Namespace, ours: list[Run], quantized: list[Run]) -> dict[str, float]:
    run_s, quantized_s = (statistics.median(run.run_s for run in runs) for runs in (ours, quantized))
    return {
        "quantized_run_s": round(quantized_s, 2),
        "quantized_texts_per_s": round(options.texts / quantized_s, 1),
        "quantized_gain": round(run_s / quantized_s, 2),
    }


def _row(item: dict[str, Any]) -> Any:
    embedding = item.get("embedding", item.get("score"))
    return np.frombuffer(base64.b64decode(embedding), "<f4") if isinstance(embedding, str) else embedding


def _limit_seconds(lengths: list[int], rate: float) -> float:
    """The least time for sequences of these lengths at so many floating-point operations a second."""
    linear = 2 * sum(inputs * outputs for inputs, outputs in PRODUCTS)
    return LAYERS * sum(length * (linear + 4 * length * HIDDEN) for length in lengths) / rate


def _result(options: argparse.Namespace, ours: list[Run], peers: list[Run], limit_s: float) -> dict[str, Any]:
    run_s, total_s, peer_run_s, peer_total_s = (
        statistics.median(getattr(run, name) for run in runs) for runs in (ours, peers) for name in ("run_s", "total_s")
    )
    return {
        "kind": options.kind,
        "texts": options.texts,
        "runs": options.runs,
        "threads": options.threads,
        "dtype": options.dtype,
        "run_s": round(run_s, 2),
        "total_s": round(total_s, 2),
        "peer_run_s": round(peer_run_s, 2),
        "peer_total_s": round(peer_total_s, 2),
        "texts_per_s": round(options.texts / run_s, 1),
        "peer_texts_per_s": round(options.texts / peer_run_s, 1),
        "ratio_without_start": round(peer_run_s / run_s, 2),
        "ratio_with_start": round(peer_total_s / total_s, 2),
        "limit_s": round(limit_s, 2),
        "share_of_limit": round(limit_s / run_s, 3),
    }


def _print(sweep: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """The peer's settings and a table for people, then one line of JSON for machines."""
    for run in sweep:
        print(f"peer, {run['dtype']}, batches of {run['batch_size']:<4} {run['run_s']:.2f} s for the sample")
    for name, value in result.items():
        print(f"{name:24} {value:,}" if isinstance(value, (int, float)) else f"{name:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
