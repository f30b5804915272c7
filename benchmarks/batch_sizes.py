"""Output tokens a second against the number of sequences that run together, beside what the machine allows.

    python benchmarks/batch_sizes.py [--workload chat] [--sizes 1 2 4 ... 256] [--context 256] [--steps 24]
        [--quantization int8|int4]

So many sequences are given their prompts and then decode together, a token each a step, through the engine alone. The
ceiling of a step is the larger of two times: reading all weights once and every sequence's keys and values at the
measured memory rate, and its matrix products at the measured rate of large ones. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ceiling import Ceiling, ModelShape, decode_step_seconds, measure
from workload import WORKLOADS, make_workload

from batchline.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from batchline.engine.core import Engine
from batchline.engine.request import GenerationRequest, SamplingParams

CACHE_BYTES = 4 << 30


def main() -> None:
    """Measure every size, smallest first, and print."""
    options = _parse()
    torch.set_num_threads(options.threads)
    workload = WORKLOADS[options.workload]
    shape, dtype = ModelShape.of(workload.model), getattr(torch, options.dtype)
    engine = _engine(str(make_workload(workload, Path(options.folder)).model), options)
    engine.enter_thread()
    before = measure(shape, dtype)
    rates = {size: _rate(engine, size, shape.vocab, options) for size in options.sizes}
    ceiling = before.or_better(measure(shape, dtype))
    points = [_point(size, rate, shape, dtype.itemsize, ceiling, options) for size, rate in rates.items()]
    print("sequences  tokens/s  ceiling  share  bound by")
    for point in points:
        told = (point["output_tokens_per_s"], point["ceiling_tokens_per_s"], point["share"], point["bound_by"])
        print(f"{point['num_seqs']:9} {told[0]:9.1f} {told[1]:8.1f} {told[2]:6.0%}  {told[3]}")
    figures = {"matrix_gflops": round(ceiling.matrix_flops / 1e9), "read_gb_per_s": round(ceiling.read_bytes / 1e9, 1)}
    print(json.dumps({**vars(options), **figures, "points": points}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="chat", help="whose model")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=24, help="measured decode steps of each size")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    return parser.parse_args()


def _engine(model: str, options: argparse.Namespace) -> Engine:
    """One engine for all sizes: what runs together is decided by how many requests there are."""
    return Engine(
        EngineConfig(
            model=ModelConfig(
                model=model,
                dtype=options.dtype,
                device="cpu",
                num_threads=options.threads,
                quantization=options.quantization,
            ),
            cache=CacheConfig(num_bytes=CACHE_BYTES, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max(options.sizes)),
            speculation=SpeculationConfig(mode="off"),  # a token a step for each sequence
        )
    )


def _rate(engine: Engine, num_seqs: int, vocab: int, options: argparse.Namespace) -> float:
    """Output tokens a second of steps in which so many sequences get a token each: by the median step."""
    rng = random.Random(num_seqs)
    for number in range(num_seqs):
        prompt = tuple(rng.randrange(vocab) for _ in range(options.context))
        sampling = SamplingParams(max_tokens=1_000, temperature=0.0)
        engine.add(GenerationRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while any(s.num_uncomputed_tokens > 1 for s in engine.scheduler.running) or engine.scheduler.num_waiting:
        engine.step()
    engine.step()  # the first step of its shape
    if len(engine.scheduler.running) != num_seqs:
        raise SystemExit(f"only {len(engine.scheduler.running)} of {num_seqs} sequences run")
    times = []
    for _ in range(options.steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for number in range(num_seqs):
        engine.abort(str(number))
    return num_seqs / statistics.median(times)


def _point(
    num_seqs: int, rate: float, shape: ModelShape, itemsize: int, ceiling: Ceiling, options: argparse.Namespace
) -> dict[str, Any]:
    context = options.context + options.steps / 2
    reading_s, arithmetic_s = decode_step_seconds(shape, num_seqs, context, itemsize, ceiling, options.quantization)
    allowed = num_seqs / max(reading_s, arithmetic_s)
    return {
        "num_seqs": num_seqs,
        "output_tokens_per_s": round(rate, 1),
        "ceiling_tokens_per_s": round(allowed, 1),
        "share": round(rate / allowed, 3),
        "bound_by": "memory" if reading_s > arithmetic_s else "arithmetic",
    }


if __name__ == "__main__":
    main()
