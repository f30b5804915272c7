"""llama.cpp as a peer in plain decoding: output tokens a second against the number of sequences that run together.

    python benchmarks/peers/llama_cpp_decode.py --llama-cpp FOLDER --workload FOLDER [--kinds BF16 Q8_0 Q4_0]
        [--sizes 1 2 4 ... 256] [--context 256] [--steps 24] [--runs 3]

The same as `batch_sizes.py` measures for Batchline, by llama.cpp's own `llama-batched-bench`, on the same model in
bfloat16 and quantized by `llama-quantize`. Each size runs in a process of its own, with a cache for so many sequences;
the rate is the median of the runs in it. The machine's rates are measured before and after, and the ceiling is the one
of `batch_sizes.py`. Without `--llama-cpp` it is left out with a word. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
from llama_cpp_model import QUANTIZATIONS, check_programs, gguf_file, run_program, version
from measured_process import PeerError

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from ceiling import Ceiling, ModelShape, decode_step_seconds, measure

CACHE_ITEMSIZE = 2
"""llama.cpp keeps keys and values in float16."""

CACHE_STEP = 256
"""Positions of a sequence's cache are rounded up to a multiple of this."""


def main() -> int:
    """Measure every kind and size, and print."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs ends with us
    if options.llama_cpp is None:
        print("llama.cpp: left out, no --llama-cpp FOLDER was given")
        return 0
    try:
        check_programs(options.llama_cpp)
        kinds = {kind: _measured(kind, options) for kind in options.kinds}
        llama_cpp_version = version(options.llama_cpp)
    except PeerError as exc:
        print(exc, file=sys.stderr)
        return 1
    print(f"llama.cpp {llama_cpp_version}")
    for kind, figures in kinds.items():
        print(f"{kind}: sequences  tokens/s  ceiling  share")
        for point in figures["points"]:
            shown = (point["output_tokens_per_s"], point["ceiling_tokens_per_s"], point["share"])
            print(f"{point['num_seqs']:15} {shown[0]:9.1f} {shown[1]:8.1f} {shown[2]:6.0%}")
    told = {name: getattr(options, name) for name in ("context", "steps", "runs", "threads")}
    print(json.dumps({"engine": "llama.cpp", "version": llama_cpp_version, **told, "kinds": kinds}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="where llama-batched-bench is")
    parser.add_argument("--workload", type=Path, required=True, help="folder with model/")
    parser.add_argument("--kinds", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=24, help="measured decode steps of each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def _measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """All sizes for which there is memory, and the machine's rates around them."""
    model = options.workload / "model"
    shape = ModelShape.of(json.loads((model / "config.json").read_text()))
    file = gguf_file(options.llama_cpp, model, kind)
    torch.set_num_threads(options.threads)
    before = measure(shape, torch.bfloat16)
    rates = {}
    for size in options.sizes:
        needed = file.stat().st_size + size * _cache_positions(options) * shape.kv_bytes(CACHE_ITEMSIZE)
        if needed > psutil.virtual_memory().available:
            print(f"{kind}, {size} sequences: left out, they take {needed >> 20:,} MiB of memory", flush=True)
        else:
            rates[size] = _rate(file, size, options)
    ceiling = before.or_better(measure(shape, torch.bfloat16))
    return {
        "matrix_gflops": round(ceiling.matrix_flops / 1e9),
        "read_gb_per_s": round(ceiling.read_bytes / 1e9, 1),
        "points": [_point(size, rate, shape, ceiling, kind, options) for size, rate in rates.items()],
    }


def _cache_positions(options: argparse.Namespace) -> int:
    """For one sequence."""
    return -(-(options.context + options.steps) // CACHE_STEP) * CACHE_STEP


def _rate(file: Path, num_seqs: int, options: argparse.Namespace) -> float:
    """Output tokens a second, by the median run. One prompt is computed and copied to all sequences."""
    command = [str(options.llama_cpp / "llama-batched-bench"), "-m", str(file), "--output-format", "jsonl", "-pps"]
    command += ["-npp", str(options.context), "-ntg", ",".join([str(options.steps)] * options.runs)]
    command += ["-npl", str(num_seqs), "-c", str(num_seqs * _cache_positions(options))]
    command += ["-t", str(options.threads), "-tb", str(options.threads)]
    lines = [json.loads(line) for line in run_program(command).splitlines() if line.startswith("{")]
    if len(lines) != options.runs:
        raise PeerError(f"`{' '.join(command)}` reported {len(lines)} instead of {options.runs} runs")
    return statistics.median(line["speed_tg"] for line in lines)


def _point(
    num_seqs: int, rate: float, shape: ModelShape, ceiling: Ceiling, kind: str, options: argparse.Namespace
) -> dict[str, Any]:
    context = options.context + options.steps / 2
    itemsize = torch.bfloat16.itemsize
    allowed = num_seqs / max(decode_step_seconds(shape, num_seqs, context, itemsize, ceiling, QUANTIZATIONS[kind]))
    return {
        "num_seqs": num_seqs,
        "output_tokens_per_s": round(rate, 1),
        "ceiling_tokens_per_s": round(allowed, 1),
        "share": round(rate / allowed, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
