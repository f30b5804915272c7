"""The CPU build of vLLM as a peer: one batch file through `vllm run-batch` at its best known settings on a CPU.

    python benchmarks/peers/vllm_run_batch.py --vllm VENV --workload FOLDER [--num-requests 8]

FOLDER holds `model/` and `batch.jsonl`, as `make_workload` writes them. vLLM runs from its own virtual environment (see
README.md here), as a command, the way a user runs it; the time is read off its own log lines as they arrive, the memory
is sampled from outside. Without `--vllm` it is left out with a word. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from measured_process import PeerError, TreeMemory, started_process

BEST_SETTINGS = (
    "--enforce-eager",
    *("--block-size", "32"),
    *("--max-num-batched-tokens", "4096"),
    *("--max-num-seqs", "256"),
)
"""The fastest of those tried on the chat workload. Compilation gains less than it costs to start."""

KV_CACHE_GIB = 4
"""Enough for every workload here to run without preemption. By default vLLM asks for nearly all of the memory."""

READY_LINE = "Reading batch from"
"""Logged when the model is loaded and warm, before the first request is submitted."""

ANSWERED_LINE = "Writing outputs to"
"""Logged when the last answer is there; the output file is written after it."""

FOREIGN_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "LD_PRELOAD")
"""Environment variables that would change the run, by their beginning: the caller's are not passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRun:
    """What one run took. Start, run and exit add up to `total_s`, the wall time of the command."""

    vllm_version: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    startup_s: float
    """From the command to the model being ready."""
    run_s: float
    """From there to the last answer."""
    total_s: float
    peak_memory_mib: float
    """Of all its processes together, see `TreeMemory`."""

    @property
    def output_tokens_per_s(self) -> float:
        """The steady rate: without start and exit."""
        return self.output_tokens / self.run_s

    def to_json(self) -> str:
        """All fields and the steady rate on one line."""
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return json.dumps({"engine": "vllm", **rounded, "output_tokens_per_s": round(self.output_tokens_per_s, 1)})


def measure_vllm(
    venv: Path, model: Path, batch: Path, *, dtype: str = "bfloat16", num_requests: int | None = None
) -> VllmRun:
    """Run the batch file, or its first `num_requests` lines, and measure.

    Raises:
        PeerError: the environment is not set up as README.md says, or the command or a request failed.
    """
    version = _installed_version(venv)
    environment = _environment(venv)
    with tempfile.TemporaryDirectory() as folder:
        source, answers = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with batch.open() as lines:
            source.write_text("".join(islice(lines, num_requests)))
        command = [str(venv / "bin" / "vllm"), "run-batch", "-i", str(source), "-o", str(answers)]
        command += ["--model", str(model), "--served-model-name", _model_name(source), "--dtype", dtype, *BEST_SETTINGS]
        times, peak_bytes = _run_measured(command, environment)
        num_answers, prompt_tokens, output_tokens = _count_answers(answers)
    return VllmRun(
        vllm_version=version,
        num_requests=num_answers,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        startup_s=times.ready_s,
        run_s=times.answered_s - times.ready_s,
        total_s=times.ended_s,
        peak_memory_mib=peak_bytes / 2**20,
    )


def venv_of(path: Path) -> Path:
    """The virtual environment that `path` names: its folder, or an executable in its bin/."""
    return path.absolute().parent.parent if path.is_file() else path.absolute()


def _installed_version(venv: Path) -> str:
    """The version as the `vllm` command sees it, which does not start without one."""
    ask = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    try:
        done = subprocess.run([venv / "bin" / "python", "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise PeerError(f"no vLLM in {venv}; benchmarks/peers/README.md says how to set it up") from exc
    return done.stdout.strip()


def _environment(venv: Path) -> dict[str, str]:
    """All cores that this process may use for the model, none kept free, and the allocator and OpenMP that suit it."""
    openmp = venv / "lib" / "libiomp5.so"
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    if tcmalloc is None or not openmp.exists():
        raise PeerError(f"tcmalloc or {openmp} is missing; benchmarks/peers/README.md says how to set them up")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_SETTINGS)}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": f"{tcmalloc}:{openmp}",
        "PYTHONUNBUFFERED": "1",  # a line's time is when it arrives here
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
    }


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds since the command was started."""

    ready_s: float
    answered_s: float
    ended_s: float


def _run_measured(command: list[str], environment: Mapping[str, str]) -> tuple[_Times, int]:
    """Run to the end. Returns its times and its peak memory in bytes."""
    marks: dict[str, float] = {}
    last_lines: deque[str] = deque(maxlen=30)
    started = time.perf_counter()
    with started_process(command, environment) as (process, output), TreeMemory(process.pid) as memory:
        for line in output:
            last_lines.append(line)
            for mark in (READY_LINE, ANSWERED_LINE):
                if mark in line:
                    marks.setdefault(mark, time.perf_counter() - started)
        status = process.wait()
        ended_s = time.perf_counter() - started
    if status != 0 or len(marks) < 2:
        raise PeerError(f"`{' '.join(command)}` ended with status {status}:\n{''.join(last_lines)}")
    return _Times(marks[READY_LINE], marks[ANSWERED_LINE], ended_s), memory.peak_bytes


def _model_name(batch: Path) -> str:
    """What the requests call the model, by the first of them."""
    with batch.open() as lines:
        return str(json.loads(lines.readline())["body"]["model"])


def _count_answers(path: Path) -> tuple[int, int, int]:
    """(answers, prompt tokens, output tokens) of a result file. Raises: PeerError where a request failed."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    failed = [answer for answer in answers if answer["error"]]
    if failed:
        raise PeerError(f"{len(failed)} of {len(answers)} requests failed, the first so: {json.dumps(failed[0])[:500]}")
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    return len(answers), sum(usage["prompt_tokens"] for usage in usages), sum(u["completion_tokens"] for u in usages)


def main() -> int:
    """Measure and print; of several runs, the middle one by total time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment, or its bin/python")
    parser.add_argument("--workload", type=Path, required=True, help="folder with model/ and batch.jsonl")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-requests", type=int, help="only the first so many lines")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends vLLM too, on the way out
    if options.vllm is None:
        print("vllm: left out, no --vllm PATH was given")
        return 0
    model, batch = options.workload / "model", options.workload / "batch.jsonl"
    try:
        venv = venv_of(options.vllm)
        runs = [
            measure_vllm(venv, model, batch, dtype=options.dtype, num_requests=options.num_requests)
            for _ in range(options.runs)
        ]
    except PeerError as exc:
        print(exc, file=sys.stderr)
        return 1
    run = sorted(runs, key=lambda run: run.total_s)[len(runs) // 2]
    print(
        f"vLLM {run.vllm_version}: {run.num_requests} requests; start {run.startup_s:.1f} s, "
        f"run {run.run_s:.1f} s, total {run.total_s:.1f} s; {run.output_tokens_per_s:.0f} output tokens/s, "
        f"{run.peak_memory_mib:,.0f} MiB"
    )
    print(run.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
