"""Every benchmark in turn, and the figures into `RESULTS.md`.

    python benchmarks/run_all.py [--runs 1] [--minutes 28] [--only NAME ...] [--smoke]
        [--vllm VENV] [--llama-cpp FOLDER] [--sentence-transformers VENV] [--compare]

Each benchmark is a script beside this one whose last line is JSON; the most telling come first. Figures are kept in
`results.json` as they come, and table and plot are made anew from all that it holds, so that parts can be run one by
one (`--only`). What does not fit into the minutes, or fails, is left out with a word and keeps its earlier figures.
`--compare` runs only what is compared with other engines, each beside theirs; `make bench-peers` sets them up first.
`--smoke` runs everything in a size that measures nothing, into a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Results
from workload import WORKLOADS, make_workload

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / "batchline-benchmarks"

HEADLINE = "chat"
TO_BE_SURE_OF = (HEADLINE, "mixed_sampling", "mixed_sampling_greedy")
"""Workloads with a figure to reach: run at least three times, as are pooling models and quantized ones."""


COMPARED = (
    *(HEADLINE, f"vllm-{HEADLINE}", f"llama-cpp-{HEADLINE}", f"llama-cpp-{HEADLINE}-Q4_0"),
    *("batch-sizes", "batch-sizes-int8", "batch-sizes-int4", "llama-cpp-batch-sizes"),
    *("embed", "score"),
)
"""What `--compare` runs, in this order: ours and theirs one after the other, as machines change from hour to hour."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where other engines are set up (see peers/README.md); of a peer that is None, nothing runs.

    sentence_transformers: None for the one beside this script's packages.
    """

    vllm: str | None
    llama_cpp: str | None
    sentence_transformers: str | None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script with its arguments; smoke: further ones that make it tiny; needs: a workload that must be on disk."""

    name: str
    command: tuple[str, ...]
    smoke: tuple[str, ...] = ()
    needs: str | None = None


def main() -> None:
    """Run, and write the results after each."""
    options = _parse()
    deadline = time.monotonic() + 60 * options.minutes
    results = Results(FOLDER / "smoke" if options.smoke else HERE)
    for benchmark in _chosen(options):
        print(f"{benchmark.name} ...", flush=True)
        figures = run(benchmark, deadline - time.monotonic(), is_smoke=options.smoke)
        print(f"{benchmark.name}: {figures if isinstance(figures, str) else json.dumps(figures)}", flush=True)
        if not isinstance(figures, str):
            results.put(benchmark.name, figures)
            results.write()
    print(f"written: {results.page}")


def _chosen(options: argparse.Namespace) -> list[Benchmark]:
    """What is to run, in order. Peers that are not given are left out with a word."""
    for option in ("vllm", "llama_cpp"):
        if getattr(options, option) is None:
            print(f"{option}: left out, no --{option.replace('_', '-')} was given", flush=True)
    peers = Peers(options.vllm, options.llama_cpp, options.sentence_transformers)
    found = {benchmark.name: benchmark for benchmark in benchmarks(options.runs, peers)}
    names = [name for name in COMPARED if name in found] if options.compare else list(found)
    return [found[name] for name in names if not options.only or name in options.only]


def benchmarks(runs: int, peers: Peers) -> list[Benchmark]:
    """All of them that are here, in the order in which they run; a peer's where it is given."""
    names = [HEADLINE, *(name for name in WORKLOADS if name != HEADLINE)]
    found = [_throughput(name, max(runs, 3) if name in TO_BE_SURE_OF else runs) for name in names]
    found.append(_batch_sizes("batch-sizes"))
    times, at_least_three = str(runs), str(max(runs, 3))
    found += [
        *(_pooling(kind, at_least_three, peers.sentence_transformers) for kind in ("embed", "score")),
        *(
            Benchmark(
                kind,
                ("quantization.py", "--quantization", kind, "--runs", at_least_three),
                ("--num-requests", "4", "--runs", "1"),
            )
            for kind in ("int8", "int4")
        ),
        Benchmark("batch-layer", ("runner_overhead.py", "--lines", "200000", "--repeat", times), ("--lines", "2000")),
        Benchmark(
            "structured-output",
            ("structured_output.py", "--runs", str(max(runs, 2))),
            ("--requests", "4", "--tokens", "4", "--runs", "1"),
        ),
        Benchmark(
            "media",
            ("media_throughput.py", "--runs", at_least_three),
            ("--requests", "4", "--images", "2", "--output-tokens", "2", "--runs", "1"),
        ),
        Benchmark(
            "transcription",
            ("transcription_throughput.py", "--runs", at_least_three),
            ("--recordings", "2", "--tokens", "8", "--runs", "1"),
        ),
        Benchmark("journal", ("journal_overhead.py", "--runs", str(max(runs, 2))), ("--requests", "4", "--runs", "1")),
        Benchmark("server", ("server_load.py", "--runs", times), ("--workload", "tiny", "--concurrency", "8")),
        Benchmark(
            "http-backend",
            ("http_backend.py", "--repeat", times),
            ("--lines", "500", "--repeat", "1", "--reject-for", "1"),
        ),
        Benchmark("stored-batches", ("stored_batches.py",), ("--batches", "20", "--requests", "2")),
    ]
    if peers.vllm is not None:
        found += [_vllm(name, peers.vllm, max(runs, 3) if name == HEADLINE else runs) for name in names]
    if peers.llama_cpp is not None:
        found += _llama_cpp(peers.llama_cpp, at_least_three)
    return [benchmark for benchmark in found if (HERE / benchmark.command[0]).exists()]


def run(benchmark: Benchmark, seconds: float, *, is_smoke: bool) -> dict[str, Any] | str:
    """Run one for at most so long. Returns the figures that it told, or why there are none."""
    if seconds <= 0:
        return "left out: no time left"
    if benchmark.needs is not None:
        make_workload(WORKLOADS[benchmark.needs], FOLDER)
    script, *arguments = [*benchmark.command, *(benchmark.smoke if is_smoke else ())]
    command = [sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "left out: it did not end in time"
    finally:
        if process.poll() is None:  # its time is up, or ours: what it has started ends with it
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a run of ours would answer its running requests first
    last = (output.strip().splitlines() or [""])[-1]
    if process.returncode != 0 or not last.startswith("{"):
        return f"failed with status {process.returncode}: {last}"
    figures: dict[str, Any] = json.loads(last)
    return figures


def _throughput(workload: str, runs: int) -> Benchmark:
    command = ("offline_throughput.py", "--workload", workload, "--runs", str(runs), "--folder", str(FOLDER))
    return Benchmark(workload, command, ("--num-requests", "4", "--runs", "1"))


def _vllm(workload: str, venv: str, runs: int) -> Benchmark:
    command = ("peers/vllm_run_batch.py", "--vllm", venv, "--workload", str(FOLDER / workload), "--runs", str(runs))
    return Benchmark(f"vllm-{workload}", command, ("--num-requests", "4", "--runs", "1"), needs=workload)


def _llama_cpp(programs: str, runs: str) -> list[Benchmark]:
    """llama.cpp's, and ours with weights of the sizes that it is compared in."""
    common = ("--llama-cpp", programs, "--workload", str(FOLDER / HEADLINE), "--runs", runs)
    few_sizes = ("--sizes", "1", "2", "--steps", "2", "--runs", "1")
    few_requests = ("--num-requests", "4", "--slots", "2", "--runs", "1")
    serve = ("peers/llama_cpp_server_run.py", *common)
    return [
        *(_batch_sizes(f"batch-sizes-{kind}", "--quantization", kind) for kind in ("int8", "int4")),
        Benchmark("llama-cpp-batch-sizes", ("peers/llama_cpp_decode.py", *common), few_sizes, needs=HEADLINE),
        Benchmark(f"llama-cpp-{HEADLINE}", serve, few_requests, needs=HEADLINE),
        Benchmark(f"llama-cpp-{HEADLINE}-Q4_0", (*serve, "--kind", "Q4_0"), few_requests, needs=HEADLINE),
    ]


def _batch_sizes(name: str, *more: str) -> Benchmark:
    command = ("batch_sizes.py", "--workload", HEADLINE, "--folder", str(FOLDER), *more)
    return Benchmark(name, command, ("--sizes", "1", "2", "4", "--steps", "2"))


def _pooling(kind: str, runs: str, venv: str | None) -> Benchmark:
    command = ("pooling_throughput.py", "--kind", kind, "--runs", runs, "--folder", str(FOLDER))
    if venv is not None:
        command += ("--peer-python", str(Path(venv) / "bin" / "python"))
    return Benchmark(kind, command, ("--texts", "40", "--sample", "8", "--runs", "1"))


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=1, help="of each benchmark; at least three where a figure has to be reached"
    )
    parser.add_argument("--minutes", type=float, default=28, help="for everything together")
    parser.add_argument("--vllm", metavar="VENV", help="vLLM's virtual environment (see peers/README.md)")
    parser.add_argument("--llama-cpp", metavar="FOLDER", help="where llama.cpp's programs are (see peers/README.md)")
    parser.add_argument(
        "--sentence-transformers", metavar="VENV", help="its virtual environment, if it is not to run in this one"
    )
    parser.add_argument("--compare", action="store_true", help="only what is compared with other engines")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything works")
    names = [benchmark.name for benchmark in benchmarks(1, Peers("", "", ""))]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"one or more of {', '.join(names)}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
