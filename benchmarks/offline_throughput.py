"""The whole job as a user sees it: `batchline run-batch` on a made workload, against what the machine can do.

    python benchmarks/offline_throughput.py [--workload chat] [--runs 3] [--baseline]

Prints output tokens a second (steady: after the model is loaded, and end to end), startup seconds (from the command to
the first result on disk), peak memory, the matrix and memory rates measured in the same run, the limit that follows
from them and the share of it reached; where prompts share several prefixes, how many of their tokens were computed for
each that had to be. `--baseline` runs `transformers`' generate, padded and sorted by length, on the same requests. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from ceiling import Ceiling, ModelShape, Request, limit_seconds, measure, num_common, unshared_ranges
from workload import MODEL_NAME, WORKLOADS, WorkloadFiles, make_workload

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command. loaded_s: until the model is loaded; startup_s: until the first result is on disk;
    run_s: from loaded to the finished file; memory_mib: the process's peak."""

    total_s: float
    loaded_s: float
    startup_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    memory_mib: float

    @property
    def run_s(self) -> float:
        """Everything after loading."""
        return self.total_s - self.loaded_s


def main() -> None:
    """Make the workload, run it, and print. The rates are measured before and after; the better ones count."""
    options = _parse()
    workload = WORKLOADS[options.workload]
    torch.set_num_threads(options.threads)
    files = make_workload(workload, Path(options.folder), options.num_requests)
    requests = _tokenized(files)
    dtype = getattr(torch, options.dtype)
    shape = ModelShape.of(workload.model)
    before = measure(shape, dtype)
    more = ["--dtype", options.dtype, *options.option]
    runs = [run_command(files, more) for _ in range(options.runs)]
    ceiling = before.or_better(measure(shape, dtype))
    limit_s = limit_seconds(shape, _without_copies(files, requests), dtype.itemsize, ceiling)
    result = _result(options, runs, ceiling, limit_s)
    if workload.chat.num_system_prompts > 1:
        result["prefix_tokens_x_minimum"] = round(_prefix_ratio(requests, runs[0]), 3)
    if options.baseline:
        result["baseline_run_s"] = round(_run_baseline(files, dtype), 2)
    _print(result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of run-batch against the machine's limit.")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="chat")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    parser.add_argument("--baseline", action="store_true", help="run transformers' generate too")
    parser.add_argument(
        "--option", action="append", default=[], help="passed on to run-batch, e.g. --option=--no-dedup"
    )
    return parser.parse_args()


def _tokenized(files: WorkloadFiles) -> list[Request]:
    """The requests as the model sees them, in the file's order."""
    from transformers import AutoTokenizer  # heavy

    tokenizer = AutoTokenizer.from_pretrained(files.model)
    requests = []
    for body in _bodies(files):
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        requests.append(Request(tuple(prompt["input_ids"]), body["max_tokens"]))
    return requests


def _bodies(files: WorkloadFiles) -> list[dict[str, Any]]:
    return [json.loads(line)["body"] for line in files.batch.read_text().splitlines()]


def _without_copies(files: WorkloadFiles, requests: list[Request]) -> list[Request]:
    """Those that must be run: of identical requests whose answer cannot differ, one."""
    distinct: dict[Any, Request] = {}
    for number, (body, request) in enumerate(zip(_bodies(files), requests, strict=True)):
        is_deterministic = body.get("temperature") == 0 or "seed" in body
        distinct.setdefault(json.dumps(body) if is_deterministic else number, request)
    return list(distinct.values())


def _prefix_ratio(requests: list[Request], run: Run) -> float:
    """Prompt tokens computed beyond those that are each prompt's own, for each that several prompts share."""
    prompts = sorted(request.prompt for request in requests)
    common = [0, *(num_common(*pair) for pair in pairwise(prompts)), 0]
    own = sum(len(prompt) - max(common[index : index + 2]) for index, prompt in enumerate(prompts))
    minimum = sum(end - start for start, end in unshared_ranges(prompts))
    return (run.prompt_tokens - run.cached_tokens - own) / (minimum - own)


def run_command(files: WorkloadFiles, more: Sequence[str]) -> Run:
    """Run the command in a process of its own, with more options, watching its messages and its journal."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.jsonl"
        command = [sys.executable, "-m", "batchline.run_batch", "-i", str(files.batch), "-o", str(output)]
        command += ["--model", str(files.model), "--served-model-name", MODEL_NAME, *more]
        start = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        messages: list[tuple[float, str]] = []
        reader = threading.Thread(target=_collect, args=(process, messages))
        reader.start()
        startup_s = _wait_for_result(Path(f"{output}.partial") / "journal", reader) - start
        reader.join()
        _, status, usage = os.wait4(process.pid, 0)
        total_s = time.perf_counter() - start
        process.returncode = status  # reaped here, for its resource usage
        if status != 0:
            raise SystemExit("run-batch failed:\n" + "".join(line for _, line in messages))
        loaded_s = next(at for at, line in messages if "Running " in line) - start
        return Run(total_s, loaded_s, startup_s, *_usage(output), memory_mib=usage.ru_maxrss / 1024)


def _collect(process: subprocess.Popen[str], messages: list[tuple[float, str]]) -> None:
    """Note each line of the command's messages with its time, until it ends."""
    assert process.stderr is not None
    messages.extend((time.perf_counter(), line) for line in process.stderr)


def _wait_for_result(journal: Path, reader: threading.Thread) -> float:
    """When the journal's second line, the first result, was there; now, when the command ended without one."""
    while reader.is_alive():
        if journal.exists() and journal.read_bytes().count(b"\n") > 1:
            break
        time.sleep(POLL_S)
    return time.perf_counter()


def _usage(output: Path) -> tuple[int, int, int]:
    """Prompt, cached and output tokens of all results. Exits where one failed."""
    prompt = cached = produced = 0
    with output.open() as lines:
        for line in lines:
            response = json.loads(line)["response"]
            if response is None or response["status_code"] != 200:
                raise SystemExit(f"a request failed: {line[:500]}")
            usage = response["body"]["usage"]
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            produced += usage["completion_tokens"]
    return prompt, cached, produced


def _run_baseline(files: WorkloadFiles, dtype: torch.dtype, batch_size: int = 64) -> float:
    """Seconds that `transformers` takes for the same requests: sorted by length, padded, in batches.

    A batch runs until its longest answer is done; what the others get beyond theirs is thrown away.
    """
    from transformers import AutoModelForCausalLM, logging  # heavy

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(files.model, dtype=dtype).eval()
    requests = sorted(_tokenized(files), key=lambda request: len(request.prompt))
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        part = requests[first : first + batch_size]
        longest = max(len(request.prompt) for request in part)
        rows = [[0] * (longest - len(request.prompt)) + list(request.prompt) for request in part]
        mask = [[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in part]
        num_new = max(request.num_output for request in part)
        model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def _result(options: argparse.Namespace, runs: list[Run], ceiling: Ceiling, limit_s: float) -> dict[str, Any]:
    """Medians over the runs, and the share of the limit that the steady rate reaches."""
    middle = {name: statistics.median(asdict(run)[name] for run in runs) for name in asdict(runs[0])}
    run_s = statistics.median(run.run_s for run in runs)
    tokens = middle["prompt_tokens"] + middle["output_tokens"]
    return {
        "workload": options.workload,
        "dtype": options.dtype,
        "threads": options.threads,
        "runs": len(runs),
        **{name: round(value, 2) for name, value in middle.items()},
        "run_s": round(run_s, 2),
        "output_tokens_per_s": round(middle["output_tokens"] / run_s, 1),
        "total_tokens_per_s": round(tokens / run_s, 1),
        "end_to_end_output_tokens_per_s": round(middle["output_tokens"] / middle["total_s"], 1),
        "matrix_gflops": round(ceiling.matrix_flops / 1e9, 1),
        "read_gb_per_s": round(ceiling.read_bytes / 1e9, 1),
        "limit_s": round(limit_s, 2),
        "share_of_limit": round(limit_s / run_s, 3),
    }


def _print(result: dict[str, Any]) -> None:
    """A table for people, then one line of JSON for machines."""
    for name, value in result.items():
        print(f"{name:34} {value:,}" if isinstance(value, (int, float)) else f"{name:34} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
