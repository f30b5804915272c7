"""What serving costs: the same requests streamed from `batchline serve` and run by `batchline run-batch`.

    python benchmarks/server_load.py [--workload chat | tiny] [--runs 3] [--concurrency 256]

The two take turns, with the same engine settings; rates are output tokens a second while requests run, medians over the
runs. All of the streams are open at once, up to `--concurrency`. `chat` is the chat workload; `tiny` is the model that
ships, whose steps are so short that everything around them shows: the worst case. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from workload import MODEL_NAME, WORKLOADS, WorkloadFiles, make_workload

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("stream_client.py")
TINY_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens a second of one round, and what the streams were like."""

    offline: float
    streamed: float
    tokens_per_chunk: float
    first_chunk_s: float
    server_cpu_s: float
    client_cpu_s: float


def main() -> None:
    """Rounds of both, then the table and the line of JSON."""
    parser = argparse.ArgumentParser(description="Throughput of streams against the offline runner.")
    parser.add_argument("--workload", choices=["chat", "tiny"], default="chat")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    options = parser.parse_args()
    files = _tiny(Path(options.folder)) if options.workload == "tiny" else _chat(Path(options.folder))
    rounds = []
    for number in range(options.runs):
        offline = _offline(files)
        rounds.append(_streamed(files, options.concurrency, offline))
        print(f"round {number + 1}: offline {offline:,.0f} tokens/s, streamed {rounds[-1].streamed:,.0f}", flush=True)
    _print({"workload": options.workload, "concurrency": options.concurrency, "runs": options.runs, **_medians(rounds)})


def _chat(folder: Path) -> WorkloadFiles:
    return make_workload(WORKLOADS["chat"], folder)


def _tiny(folder: Path) -> WorkloadFiles:
    """The shipped model, asked all that it was trained on, with answers of one length."""
    dialogues = (ROOT / "examples/train/dialogues.jsonl").read_text().splitlines()
    batch = folder / "tiny" / "batch.jsonl"
    batch.parent.mkdir(parents=True, exist_ok=True)
    sampling = {"max_tokens": TINY_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    with batch.open("w") as out:
        for number, dialogue in enumerate(dialogues):
            body = {"model": MODEL_NAME, "messages": json.loads(dialogue)["messages"][:-1], **sampling}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    return WorkloadFiles(ROOT / "examples/models/tiny-chat", batch)


def _model_options(files: WorkloadFiles) -> list[str]:
    return ["--model", str(files.model), "--served-model-name", MODEL_NAME]


def _offline(files: WorkloadFiles) -> float:
    """Output tokens a second of `run-batch`, from its start of running to the finished file."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.jsonl"
        command = [sys.executable, "-m", "batchline", "run-batch", "-i", str(files.batch), "-o", str(output)]
        command += [*_model_options(files), "--no-dedup"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        started = time.perf_counter()
        for line in process.stderr:
            if "Running " in line:
                started = time.perf_counter()
        if process.wait() != 0:
            raise SystemExit("run-batch failed")
        seconds = time.perf_counter() - started
        bodies = [json.loads(line)["response"]["body"] for line in output.read_text().splitlines()]
    return float(sum(body["usage"]["completion_tokens"] for body in bodies) / seconds)


def _streamed(files: WorkloadFiles, concurrency: int, offline: float) -> Rates:
    """The same requests as streams, from a fresh server."""
    with _server(files) as (process, url):
        address = urlsplit(url)
        command = [sys.executable, str(CLIENT), str(address.hostname), str(address.port), str(files.batch)]
        before = sum(process.cpu_times()[:2])
        client = subprocess.run(
            [*command, "--concurrency", str(concurrency)], stdout=subprocess.PIPE, text=True, check=True
        )
        server_cpu_s = sum(process.cpu_times()[:2]) - before
    result = json.loads(client.stdout)
    return Rates(
        offline=offline,
        streamed=result["output_tokens"] / result["seconds"],
        tokens_per_chunk=result["output_tokens"] / result["chunks"],
        first_chunk_s=result["first_chunk_s"],
        server_cpu_s=server_cpu_s,
        client_cpu_s=result["client_cpu_s"],
    )


@contextmanager
def _server(files: WorkloadFiles) -> Iterator[tuple[psutil.Process, str]]:
    """A server on a free port, with a place for every request; its process and URL."""
    command = [sys.executable, "-m", "batchline", "serve", "--port", "0", "--no-access-log", *_model_options(files)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "Serving " in line:
                yield psutil.Process(process.pid), line.split()[-1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.stderr.read()
        process.wait()


def _medians(rounds: list[Rates]) -> dict[str, float]:
    def median(name: str) -> float:
        return statistics.median(getattr(rates, name) for rates in rounds)

    return {
        "offline_tokens_per_s": round(median("offline"), 1),
        "streamed_tokens_per_s": round(median("streamed"), 1),
        "share_of_offline": round(statistics.median(rates.streamed / rates.offline for rates in rounds), 3),
        "tokens_per_chunk": round(median("tokens_per_chunk"), 2),
        "first_chunk_s": round(median("first_chunk_s"), 3),
        "server_cpu_s": round(median("server_cpu_s"), 2),
        "client_cpu_s": round(median("client_cpu_s"), 2),
    }


def _print(result: dict[str, Any]) -> None:
    """A table for people, then one line of JSON for machines."""
    for name, value in result.items():
        print(f"{name:34} {value:,}" if isinstance(value, (int, float)) else f"{name:34} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
