"""Transcriptions: seconds of sound per second, against transformers' `generate` in the same run.

    python benchmarks/transcription_throughput.py [--recordings 64] [--runs 3]

A random model of whisper-tiny's shape (or `--size base`), which ends no text early, and recordings of 30 seconds. Ours
answers requests with WAV data URLs, all at once; `generate` gets the samples, in batches of the best of several sizes.
Both write as many tokens. The limit is the time of the encoder's and the decoder's products at the machine's matrix
rate, and of reading the decoder's weights and the keys and values of the sound. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import tempfile
import time
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ceiling import Ceiling, matrix_flops, read_bytes
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from batchline.backends.base import EndpointRequest
from batchline.backends.in_process import InProcessBackend
from batchline.config import EngineConfig, ModelConfig
from batchline.speech.model import MAX_ROWS

RATE, WINDOW_S, NUM_MELS = 16_000, 30, 80
SIZES: Mapping[str, tuple[int, int]] = {"tiny": (384, 4), "base": (512, 6), "small": (768, 12)}
"""Width and layers, of the encoder and of the decoder."""

VOCAB_SIZE = 51_865
CONTROL = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startoflm", "startofprev", "nospeech")
NUM_PROMPT = 4
BATCH_SIZES = (4, 8, 16)


def main() -> None:
    """Make the model and the recordings, run both in turn, and print."""
    options = _parse()
    torch.set_num_threads(options.threads)
    folder = Path(options.folder) / f"whisper-{options.size}-{options.tokens}"
    if not (folder / "config.json").exists():
        _make_model(folder, options)
    recordings = [_sound(seed) for seed in range(options.recordings)]
    peer = _Peer(folder, options)
    times = {size: peer.run(recordings[: max(BATCH_SIZES)], size)[0] for size in BATCH_SIZES}
    best = min(times, key=lambda size: times[size])
    ours, peers = asyncio.run(_alternate(folder, recordings, peer, best, options))
    _print(options, ours, peers, best)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Transcriptions against transformers' generate.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--recordings", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "batchline-benchmarks"))
    return parser.parse_args()


def _make_model(folder: Path, options: argparse.Namespace) -> None:
    """A checkpoint that suppresses its end token, so that the limit of length ends every text."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}" for number in range(VOCAB_SIZE - len(alphabet) - len(CONTROL) - 1 - WINDOW_S * 50 - 1)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in (*CONTROL, "notimestamps")])
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(WINDOW_S * 50 + 1)])
    end, start, *_ = ids = [tokenizer.token_to_id(f"<|{name}|>") for name in (*CONTROL, "notimestamps")]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    width, layers = SIZES[options.size]
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _side(width, layers).items()}
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, num_mel_bins=NUM_MELS, d_model=width, decoder_start_token_id=start, **sides, **ends
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        max_length=options.tokens,
        suppress_tokens=list(range(end, VOCAB_SIZE)),
        no_timestamps_token_id=ids[-1],
        prev_sot_token_id=ids[6],
        is_multilingual=True,
        lang_to_id={"<|en|>": ids[2]},
        task_to_id={"translate": ids[3], "transcribe": ids[4]},
        **ends,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=NUM_MELS).save_pretrained(folder)


def _side(width: int, layers: int) -> dict[str, int]:
    return {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}


def _sound(seed: int) -> NDArray[np.float32]:
    """30 seconds of tones that change, with noise."""
    random = np.random.default_rng(seed)
    pitch = np.repeat(random.uniform(100, 2000, WINDOW_S * 4), RATE // 4)
    samples = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE) + 0.05 * random.standard_normal(len(pitch))
    return samples.astype(np.float32)


def _data_url(samples: NDArray[np.float32]) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


class _Peer:
    """transformers' own code: the feature extractor, and `generate` on padded batches."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        dtype = getattr(torch, options.dtype)
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self._num_tokens = options.tokens

    def run(self, recordings: list[NDArray[np.float32]], batch_size: int) -> tuple[float, int]:
        """Seconds for all of them, and how many tokens they have."""
        start, num_tokens = time.perf_counter(), 0
        for first in range(0, len(recordings), batch_size):
            part = recordings[first : first + batch_size]
            features = self._extractor(part, sampling_rate=RATE, return_tensors="pt").input_features
            tokens = self._model.generate(
                features.to(self._model.dtype), language="en", task="transcribe", max_new_tokens=self._num_tokens
            )
            num_tokens += tokens[:, NUM_PROMPT:].numel() if tokens.shape[1] > self._num_tokens else tokens.numel()
        return time.perf_counter() - start, num_tokens


async def _alternate(
    folder: Path, recordings: list[NDArray[np.float32]], peer: _Peer, batch_size: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Seconds of runs of ours and of the peer in turn, after one of ours to warm up."""
    model = ModelConfig(
        model=str(folder), served_names=("m",), dtype=options.dtype, num_threads=options.threads, device="cpu"
    )
    backend = InProcessBackend([EngineConfig(model=model)])
    urls = [_data_url(samples) for samples in recordings]
    ours: list[float] = []
    peers: list[float] = []
    await backend.start()
    try:
        await _run(backend, urls[:4])
        for _ in range(options.runs):
            before = backend.stats().output_tokens
            ours.append(await _run(backend, urls))
            written = backend.stats().output_tokens - before
            seconds, expected = peer.run(recordings, batch_size)
            peers.append(seconds)
            if written != expected:
                raise SystemExit(f"{written} tokens were written instead of {expected}")
    finally:
        await backend.close()
    return ours, peers


async def _run(backend: InProcessBackend, urls: list[str]) -> float:
    start = time.perf_counter()
    answers = await asyncio.gather(*(backend.answer(_request(number, url)) for number, url in enumerate(urls)))
    failed = [answer for answer in answers if answer.status_code != 200]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].body}")
    return time.perf_counter() - start


def _request(number: int, url: str) -> EndpointRequest:
    """Almost greedy. With a temperature of its own, text that looks wrong, as all of these do, is not decoded again."""
    body: dict[str, Any] = {"model": "m", "file_url": url, "language": "en", "temperature": 1e-4}
    return EndpointRequest(url="/v1/audio/transcriptions", body=body, request_id=str(number))


def _limit_s(options: argparse.Namespace, ceiling: Ceiling) -> float:
    """The least time for all recordings."""
    width, layers = SIZES[options.size]
    itemsize = getattr(torch, options.dtype).itemsize
    positions = WINDOW_S * 50
    convolutions = 2 * positions * 3 * width * (2 * NUM_MELS + width)
    encoder = convolutions + layers * positions * (2 * 12 * width**2 + 4 * positions * width)
    sound = layers * 2 * 2 * positions * width**2
    token = 2 * (layers * 14 * width**2 + VOCAB_SIZE * width) + layers * 4 * positions * width
    num_tokens = options.tokens + NUM_PROMPT - 1
    flops = options.recordings * (encoder + sound + num_tokens * token)
    weights = (layers * 14 * width**2 + VOCAB_SIZE * width) / MAX_ROWS["cpu"]
    read = options.recordings * options.tokens * itemsize * (weights + layers * 2 * positions * width)
    return flops / ceiling.matrix_flops + read / ceiling.read_bytes


def _print(options: argparse.Namespace, ours: list[float], peers: list[float], best: int) -> None:
    """A table for people, then one line of JSON for machines."""
    width, _ = SIZES[options.size]
    dtype = getattr(torch, options.dtype)
    products = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    ceiling = Ceiling(matrix_flops(products, dtype), read_bytes())
    limit_s = _limit_s(options, ceiling)
    run_s, peer_s = statistics.median(ours), statistics.median(peers)
    sound_s = options.recordings * WINDOW_S
    result = {
        "size": options.size,
        "recordings": options.recordings,
        "tokens_each": options.tokens,
        "runs": options.runs,
        "threads": options.threads,
        "dtype": options.dtype,
        "run_s": round(run_s, 2),
        "sound_s_per_s": round(sound_s / run_s, 1),
        "peer_run_s": round(peer_s, 2),
        "peer_sound_s_per_s": round(sound_s / peer_s, 1),
        "peer_batch_size": best,
        "ratio": round(peer_s / run_s, 2),
        "limit_s": round(limit_s, 2),
        "share_of_limit": round(limit_s / run_s, 3),
    }
    for name, value in result.items():
        print(f"{name:20} {value:,}" if isinstance(value, (int, float)) else f"{name:20} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
