"""llama.cpp's server as a peer: the requests of a batch file with parallel slots and continuous batching.

    python benchmarks/peers/llama_cpp_server_run.py --llama-cpp FOLDER --workload FOLDER [--kind BF16|Q8_0|Q4_0]
        [--slots 8 16 32 64] [--runs 3] [--num-requests 8]

FOLDER holds `model/` and `batch.jsonl`, as `make_workload` writes them. The best number of slots is found on the first
requests. Then all are sent to a fresh server in each run, as token ids: tokenizing is not part of the time. A prompt
that begins like the one before in its slot is computed from where they differ. Without `--llama-cpp` it is left out
with a word. The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from subprocess import Popen
from threading import Thread
from typing import Any

from llama_cpp_model import QUANTIZATIONS, check_programs, gguf_file, version
from measured_process import PeerError, TreeMemory, started_process

HOST = "127.0.0.1"

SETTINGS = ("--cache-ram", "0", "--no-ui")
"""Keeping the states of earlier prompts in memory costs copies, and no prompt here comes twice."""

CACHE_STEP = 256
"""Positions of a slot's cache are rounded up to a multiple of this."""

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """What one run took. Start and run add up to `total_s`; the server's end, when it is killed, is not counted."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    startup_s: float
    """From the command to the server being ready."""
    run_s: float
    """From there to the last answer."""
    total_s: float
    peak_memory_mib: float

    @property
    def output_tokens_per_s(self) -> float:
        """The steady rate: without start."""
        return self.output_tokens / self.run_s


def main() -> int:
    """Find the best number of slots, measure, and print; of several runs, the middle one by total time."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the server too, on the way out
    if options.llama_cpp is None:
        print("llama.cpp: left out, no --llama-cpp FOLDER was given")
        return 0
    try:
        check_programs(options.llama_cpp)
        file = gguf_file(options.llama_cpp, options.workload / "model", options.kind)
        requests = read_requests(options.workload, options.num_requests)
        trials = _trials(file, requests[: options.trial_requests], options)
        slots = max(trials, key=lambda slots: trials[slots])
        runs = [measure_server(file, requests, slots, options) for _ in range(options.runs)]
        llama_cpp_version = version(options.llama_cpp)
    except PeerError as exc:
        print(exc, file=sys.stderr)
        return 1
    run = sorted(runs, key=lambda run: run.total_s)[len(runs) // 2]
    print(
        f"llama.cpp {llama_cpp_version}, {options.kind}, {slots} slots: {run.num_requests} requests; "
        f"start {run.startup_s:.1f} s, run {run.run_s:.1f} s, total {run.total_s:.1f} s; "
        f"{run.output_tokens_per_s:.0f} output tokens/s, {run.peak_memory_mib:,.0f} MiB"
    )
    told = {"engine": "llama.cpp", "version": llama_cpp_version, "kind": options.kind, "slots": slots}
    told |= {"slots_tried": {str(slots): round(rate, 1) for slots, rate in trials.items()}, "runs": len(runs)}
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(run).items()}
    print(json.dumps({**told, **rounded, "output_tokens_per_s": round(run.output_tokens_per_s, 1)}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="where llama-server is")
    parser.add_argument("--workload", type=Path, required=True, help="folder with model/ and batch.jsonl")
    parser.add_argument("--kind", choices=QUANTIZATIONS, default="BF16")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32, 64], help="numbers of slots to try")
    parser.add_argument("--trial-requests", type=int, default=64, help="how many requests each number is tried with")
    parser.add_argument("--num-requests", type=int, help="only the first so many lines")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def read_requests(workload: Path, num_requests: int | None) -> list[Request]:
    """The batch file's requests, with the template applied."""
    from transformers import AutoTokenizer  # heavy

    tokenizer = AutoTokenizer.from_pretrained(workload / "model")
    requests = []
    with (workload / "batch.jsonl").open() as lines:
        for line in islice(lines, num_requests):
            body = json.loads(line)["body"]
            prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
            requests.append(Request(list(prompt["input_ids"]), body["max_tokens"]))
    return requests


def _trials(file: Path, requests: Sequence[Request], options: argparse.Namespace) -> dict[int, float]:
    """Output tokens a second with each number of slots; a single number is not tried."""
    if len(options.slots) == 1:
        return {options.slots[0]: 0.0}
    rates = {}
    for slots in options.slots:
        rates[slots] = measure_server(file, requests, slots, options).output_tokens_per_s
        print(f"{slots:3} slots: {rates[slots]:.1f} output tokens/s on {len(requests)} requests", flush=True)
    return rates


def measure_server(file: Path, requests: Sequence[Request], slots: int, options: argparse.Namespace) -> ServerRun:
    """Start a server, send all requests, and end it.

    Raises:
        PeerError: the server ended, or a request failed or got another number of tokens.
    """
    positions = max(len(request.prompt) + request.num_output for request in requests)
    positions = -(-positions // CACHE_STEP) * CACHE_STEP
    senders, port = 2 * slots, _free_port()  # a request always waits for the next free slot
    command = [str(options.llama_cpp / "llama-server"), "-m", str(file), *SETTINGS]
    command += ["--host", HOST, "--port", str(port), "--threads-http", str(senders + 2)]
    command += ["--parallel", str(slots), "-c", str(slots * positions)]
    command += ["-t", str(options.threads), "-tb", str(options.threads)]
    start = time.perf_counter()
    with _server(command) as (process, last_lines), TreeMemory(process.pid) as memory:
        try:
            _wait_until_ready(process, port)
            ready = time.perf_counter()
            with ThreadPoolExecutor(senders) as threads:
                usages = list(threads.map(lambda request: _answer(port, request), requests))
        except (PeerError, OSError, http.client.HTTPException) as exc:
            raise PeerError(f"`{' '.join(command)}`: {exc}\n{''.join(last_lines)}") from exc
        end = time.perf_counter()
    return ServerRun(
        num_requests=len(usages),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(usages),
        startup_s=ready - start,
        run_s=end - ready,
        total_s=end - start,
        peak_memory_mib=memory.peak_bytes / 2**20,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _server(command: list[str]) -> Iterator[tuple[Popen[str], deque[str]]]:
    """The running command and the last lines of its output, which a thread reads so that it never waits."""
    last_lines: deque[str] = deque(maxlen=30)
    with started_process(command, os.environ) as (process, output):
        reader = Thread(target=last_lines.extend, args=(output,))
        reader.start()
        try:
            yield process, last_lines
        finally:
            process.kill()
            reader.join()


def _wait_until_ready(process: Popen[str], port: int) -> None:
    while process.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            if _ask(port, "GET", "/health")[0] == 200:
                return
        time.sleep(POLL_S)
    raise PeerError(f"it ended with status {process.returncode}")


def _answer(port: int, request: Request) -> int:
    """Get one answer. Returns the number of its tokens."""
    body = {"prompt": request.prompt, "n_predict": request.num_output, "temperature": 0, "ignore_eos": True}
    status, content = _ask(port, "POST", "/completion", json.dumps(body | {"cache_prompt": True}))
    if status != 200:
        raise PeerError(f"a request failed with status {status}: {content[:500]!r}")
    answer: dict[str, Any] = json.loads(content)
    if (answer["tokens_evaluated"], answer["tokens_predicted"]) != (len(request.prompt), request.num_output):
        raise PeerError(
            f"{len(request.prompt)} prompt tokens were sent and {request.num_output} output tokens asked for, but it "
            f"counted {answer['tokens_evaluated']} and {answer['tokens_predicted']}"
        )
    return request.num_output


def _ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
