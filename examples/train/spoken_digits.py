"""Spoken digits, made with espeak-ng (`apt-get install espeak-ng`), and recordings of them.

A recording has phrases of one to three digits by one voice, with short gaps between digits and long pauses between
phrases. It may end within a phrase. Writes the examples; knows nothing of tokenizers.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

Samples = NDArray[np.float32]

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("en-us", "en-gb", "en-us+f3")

MAX_DIGITS = 3
GAP_S = (0.04, 0.12)
PAUSE_S = (0.4, 0.9)
MARGIN_S = 0.1
"""A segment begins so long before its first sound and ends so long after its last one."""

_QUIET = 0.004  # sound that is cut off at both ends of a digit

EXAMPLES: tuple[tuple[str, tuple[tuple[int, ...], ...], dict[str, str]], ...] = (
    ("en-us", ((4, 7, 2), (5, 1)), {}),
    ("en-gb", ((8, 0, 6), (3, 9, 9)), {"response_format": "srt"}),
    ("en-us+f3", ((3, 1, 4), (1, 5, 9)), {"response_format": "verbose_json"}),
)
"""Voice, what is said, and options of each example."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """Some digits by one voice. times: the first and last sample of each. samples: without silence around them."""

    digits: tuple[int, ...]
    times: list[tuple[int, int]]
    samples: Samples

    @property
    def text(self) -> str:
        """In words, each after a space."""
        return "".join(f" {WORDS[digit]}" for digit in self.digits)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A phrase in a recording. first: its first sample. start, end: of its segment, in seconds. is_cut: whether the
    recording ends before it."""

    first: int
    start: float
    end: float
    phrase: Phrase
    is_cut: bool = False

    def word_times(self) -> list[tuple[float, float]]:
        """When each digit begins and ends, in seconds."""
        return [((self.first + a) / RATE, (self.first + b) / RATE) for a, b in self.phrase.times]


class Speaker:
    """A voice that has said each digit several times, at random speeds and pitches."""

    def __init__(self, voice: str, num_takes: int, rng: random.Random) -> None:
        self._rng = rng
        self._takes = [[_speak(word, voice, rng) for _ in range(num_takes)] for word in WORDS]

    def phrase(self, digits: Sequence[int] | None = None) -> Phrase:
        """These digits, or some at random."""
        rng = self._rng
        said = tuple(digits or [rng.randrange(10) for _ in range(rng.randint(1, MAX_DIGITS))])
        pieces: list[Samples] = []
        times: list[tuple[int, int]] = []
        position = 0
        for digit in said:
            take = rng.choice(self._takes[digit])
            gap = np.zeros(int(rng.uniform(*GAP_S) * RATE), dtype=np.float32)
            times.append((position, position + len(take)))
            pieces += [take, gap]
            position += len(take) + len(gap)
        return Phrase(said, times, np.concatenate(pieces[:-1]))


def _speak(word: str, voice: str, rng: random.Random) -> Samples:
    command = ["espeak-ng", "-v", voice, "-s", str(rng.randint(125, 175)), "-p", str(rng.randint(35, 65)), "--stdout"]
    wav = subprocess.run([*command, word], capture_output=True, check=True).stdout
    spoken = np.frombuffer(wav[44:], dtype="<i2").astype(np.float32) / 32768  # espeak-ng's own rate is 22,050 Hz
    samples: Samples = resample_poly(spoken, 320, 441).astype(np.float32)
    loud = np.flatnonzero(np.abs(samples) > _QUIET)
    return samples[loud[0] : loud[-1] + 1]


def recorded(phrases: Sequence[Phrase], rng: random.Random, seconds: float) -> tuple[Samples, list[Spoken]]:
    """As much of the phrases as `seconds` hold, with pauses between them. Returns all samples, silence at the end."""
    samples = np.zeros(int(seconds * RATE), dtype=np.float32)
    spoken: list[Spoken] = []
    position = int(rng.uniform(MARGIN_S, PAUSE_S[1]) * RATE)
    loudness = 10 ** rng.uniform(-0.8, 0.2)
    for phrase in phrases:
        start, end = position / RATE - MARGIN_S, (position + len(phrase.samples)) / RATE + MARGIN_S
        if start >= seconds:
            break
        piece = loudness * phrase.samples[: max(0, len(samples) - position)]
        samples[position : position + len(piece)] = piece
        spoken.append(Spoken(position, max(0.0, start), end, phrase, is_cut=end > seconds))
        if end > seconds:
            break
        position += len(phrase.samples) + int(rng.uniform(*PAUSE_S) * RATE)
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(samples), dtype=np.float32)
    return np.clip(samples, -1, 1) + noise * np.float32(10 ** rng.uniform(-5.5, -3)), spoken


def write_examples(folder: Path) -> None:
    """Write each example's recording into `audio/`, and a batch file that has them as data URLs."""
    rng = random.Random(1)
    lines = []
    (folder / "audio").mkdir(exist_ok=True)
    for number, (voice, digits, options) in enumerate(EXAMPLES, 1):
        speaker = Speaker(voice, 2, rng)
        samples, spoken = recorded([speaker.phrase(each) for each in digits], rng, 60.0)
        path = folder / "audio" / f"{voice.replace('+', '-')}.ogg"
        _write_ogg(path, samples[: int((spoken[-1].end + 0.3) * RATE)])
        recording = "data:audio/ogg;base64," + base64.b64encode(path.read_bytes()).decode()
        body = {"model": "tiny-whisper", "file_url": recording, **options}
        line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/audio/transcriptions", "body": body}
        lines.append(line)
    (folder / "audio.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_ogg(path: Path, samples: Samples) -> None:
    with av.open(path, "w") as file:
        stream = file.add_stream("libopus", rate=RATE, layout="mono", options={"b": "20000"})
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype("int16")[None], format="s16", layout="mono")
        frame.rate = RATE
        file.mux([*stream.encode(frame), *stream.encode(None)])
