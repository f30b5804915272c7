"""Decoding audio: every usual format, one channel, and nothing that a stranger sends does harm."""

from __future__ import annotations

import io
import struct
import tracemalloc
from typing import Any

import av
import numpy as np
import pytest
from media_server import recording

from batchline.errors import UnprocessableEntity
from batchline.media.audio import DECODED_RATE, audio_bytes, decode_audio, resampled

FORMATS = {
    "wav": ("wav", "pcm_s16le", 16000),
    "wav-u8": ("wav", "pcm_u8", 8000),
    "wav-float": ("wav", "pcm_f32le", 44100),
    "flac": ("flac", "flac", 16000),
    "mp3": ("mp3", "libmp3lame", 16000),
    "ogg": ("ogg", "libopus", 48000),
    "m4a": ("ipod", "aac", 16000),
    "webm": ("webm", "libopus", 48000),
    "aac": ("adts", "aac", 16000),
}
MAX_SECONDS = 10.0


def encoded(name: str, **options: Any) -> bytes:
    container, codec, rate = FORMATS[name]
    return recording(container, codec, rate=rate, **options)


def seconds_or_none(data: bytes) -> float | None:
    """The decoded length; None if the recording is refused. Anything else fails the test."""
    try:
        samples, rate, _ = decode_audio(data, MAX_SECONDS)
    except UnprocessableEntity:
        return None
    return len(samples) / rate


@pytest.mark.parametrize("name", FORMATS)
def test_every_usual_format_is_decoded(name: str) -> None:
    samples, rate, digest = decode_audio(encoded(name), MAX_SECONDS)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert rate == DECODED_RATE
    assert len(samples) / rate == pytest.approx(1.0, abs=0.1)
    strongest = np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples)
    assert strongest == pytest.approx(440, abs=5)
    assert len(digest) == 32
    assert np.abs(samples)[1000:-1000].max() == pytest.approx(0.5, abs=0.05)


def test_channels_are_averaged() -> None:
    mono, _, _ = decode_audio(recording(), MAX_SECONDS)
    stereo, _, _ = decode_audio(recording(channels=2), MAX_SECONDS)
    assert np.abs(mono).max() == pytest.approx(0.5, abs=0.01)
    assert np.abs(stereo - mono * 0.75).max() < 1e-3


def test_the_digest_is_of_the_samples_and_their_rate() -> None:
    wav, flac = (decode_audio(encoded(name), MAX_SECONDS)[2] for name in ("wav", "flac"))
    slower = bytearray(encoded("wav"))
    slower[24:28] = struct.pack("<I", 8000)
    assert wav == flac
    assert decode_audio(bytes(slower), MAX_SECONDS)[2] != wav


def test_a_recording_over_the_limit_is_refused_while_it_is_decoded() -> None:
    with pytest.raises(UnprocessableEntity, match=r"longer than 1\.5 seconds"):
        decode_audio(recording(seconds=2), 1.5)


def test_memory_is_estimated_without_decoding() -> None:
    data = recording(seconds=2)
    assert audio_bytes(data, MAX_SECONDS) >= decode_audio(data, MAX_SECONDS)[0].nbytes
    assert audio_bytes(data, 1.0) == 8 * 16000


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_cut_off_anywhere_is_refused(name: str) -> None:
    """A header tells the length, or the last packet is torn. Ogg and raw AAC may end after any packet."""
    data = encoded(name, seconds=3)
    outcomes = [seconds_or_none(data[: len(data) * twentieth // 20]) for twentieth in range(20)]
    if name in ("ogg", "aac"):
        assert all(length is None or length <= 3.1 for length in outcomes)
    else:
        assert outcomes[:18] == [None] * 18


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_with_damaged_bytes_is_refused_or_decoded(name: str) -> None:
    data = encoded(name)
    random = np.random.default_rng(7)
    for _ in range(60):
        damaged = bytearray(data)
        for position in random.integers(0, len(data), size=random.integers(1, 6)):
            damaged[position] = random.integers(0, 256)
        length = seconds_or_none(bytes(damaged))
        assert length is None or length <= MAX_SECONDS + 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"not audio",
        b"#EXTM3U\n#EXTINF:1,\nhttp://169.254.169.254/\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD/>",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\n",
        b"RIFF\x24\0\0\0AVI LIST",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_what_is_no_audio_of_a_known_format_is_refused(data: bytes) -> None:
    """Playlists above all: FFmpeg, left alone, opens the files and URLs in them."""
    with pytest.raises(UnprocessableEntity, match=r"it is not audio of a known format"):
        decode_audio(data, MAX_SECONDS)


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\x24\0\0\0WAVE",
        b"fLaC" + bytes(50),
        b"OggS" + bytes(50),
        b"ID3\x04\0\0\0\0\0\0",
        b"\0\0\0\x18ftypM4A \0\0\0\0",
        b"\x1aE\xdf\xa3" + bytes(50),
        b"\xff\xfb\x90\0" + bytes(50),
        b"\xff\xf1" + bytes(50),
    ],
)
def test_a_header_alone_is_refused(data: bytes) -> None:
    with pytest.raises(UnprocessableEntity):
        decode_audio(data, MAX_SECONDS)


def test_a_wav_whose_rate_or_samples_make_no_sense_is_refused() -> None:
    wav = recording()
    for rate in (0, 1, 3_999, 192_001, 10_000_000, 2**32 - 1):
        broken = bytearray(wav)
        broken[24:28] = struct.pack("<I", rate)
        with pytest.raises(UnprocessableEntity):
            decode_audio(bytes(broken), MAX_SECONDS)
    floats = bytearray(recording("wav", "pcm_f32le"))
    floats[-4:] = struct.pack("<f", float("nan"))
    with pytest.raises(UnprocessableEntity, match=r"not finite"):
        decode_audio(bytes(floats), MAX_SECONDS)
    floats[-4:] = struct.pack("<f", 1e17)  # its square was infinite: the model's error was a 500
    with pytest.raises(UnprocessableEntity, match=r"too loud"):
        decode_audio(bytes(floats), MAX_SECONDS)


def wav(code: int, channels: int, rate: int, bits: int, payload: bytes) -> bytes:
    """A wav file by hand, whose header may be wrong. code: of the format, 1 for integers."""
    width = channels * bits // 8
    layout = struct.pack("<HHIIHH", code, channels, rate, rate * width & 0xFFFFFFFF, width & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"data" + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "num_samples", "level"),
    [
        (wav(7, 1, 8000, 8, b"\x80" * 8000), 16000, 0.98),
        (wav(6, 1, 8000, 8, b"\xaa" * 8000), 16000, 0.98),
        (wav(1, 1, 16000, 24, b"\0\0\x40\0\0\xc0" * 4000), 8000, 0.5),
        (wav(1, 1, 16000, 32, b"\0\0\0\x40" * 4000), 4000, 0.5),
        (wav(1, 6, 48000, 16, struct.pack("<6h", 24576, 0, 0, 0, 0, 0) * 4800), 1600, 0.125),
    ],
    ids=["mu-law", "a-law", "24-bit", "32-bit", "5.1"],
)
def test_a_wav_of_telephones_studios_and_films_is_decoded(data: bytes, num_samples: int, level: float) -> None:
    samples, _, _ = decode_audio(data, MAX_SECONDS)
    assert abs(len(samples) - num_samples) <= 1
    assert np.median(np.abs(samples)) == pytest.approx(level, abs=0.02)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav(1, 1, 16000, 16, b""), "no samples, or too few"),
        (wav(1, 0, 16000, 16, bytes(3200)), "damaged or cut off"),
        (wav(1, 65535, 16000, 16, bytes(65535 * 4)), "damaged or cut off"),
        (wav(1, 1, 16000, 0, bytes(100)), "damaged or cut off"),
        (wav(2, 1, 16000, 4, bytes(3200)), "a format that is not decoded"),
        (wav(0x55, 1, 16000, 0, bytes(3200)), "damaged or cut off"),
    ],
    ids=["empty", "no-channels", "too-many-channels", "no-bits", "adpcm", "mp3-by-name-only"],
)
def test_a_wav_with_a_wrong_header_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnprocessableEntity, match=reason):
        decode_audio(data, MAX_SECONDS)


@pytest.mark.parametrize(("codec", "container"), [("mpeg4", "mp4"), ("vp8", "webm")])
def test_a_film_without_sound_is_refused(codec: str, container: str) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        output.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(UnprocessableEntity, match="it has no audio"):
        decode_audio(file.getvalue(), MAX_SECONDS)


def test_a_wav_of_a_program_that_does_not_know_its_size_is_decoded() -> None:
    streamed = bytearray(recording())
    streamed[4:8] = b"\xff\xff\xff\xff"
    assert seconds_or_none(bytes(streamed)) == 1.0


def test_a_file_without_audio_in_it_is_refused() -> None:
    video_box = b"\0\0\0\x08free"
    with pytest.raises(UnprocessableEntity):
        decode_audio(b"\0\0\0\x18ftypM4A \0\0\0\0M4A mp42" + video_box * 4, MAX_SECONDS)


def test_resampling_keeps_what_the_new_rate_can_hold_and_drops_the_rest() -> None:
    times = np.arange(2 * 44_100) / 44_100
    low, high = (np.sin(2 * np.pi * pitch * times).astype(np.float32) for pitch in (440, 12_000))
    found = resampled(low + high, 44_100, 16_000)
    assert abs(len(found) - 32_000) <= 16
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000)
    assert np.abs(found - expected)[1000:-1000].max() < 0.01
    assert resampled(low, 44_100, 44_100) is low


@pytest.mark.parametrize("rate", [4_000, 192_000])
def test_recordings_of_the_lowest_and_the_highest_rate_are_decoded(rate: int) -> None:
    samples, _, _ = decode_audio(recording(rate=rate), MAX_SECONDS)
    assert abs(len(samples) - DECODED_RATE) <= 1


@pytest.mark.parametrize(("rate", "num_samples"), [(48_000, 1), (44_100, 1), (192_000, 5), (16_000, 0)])
def test_a_recording_that_is_too_short_for_a_single_sample_is_refused(rate: int, num_samples: int) -> None:
    """It was a 500: nothing was left of it at the model's rate."""
    with pytest.raises(UnprocessableEntity, match="no samples, or too few"):
        decode_audio(wav(1, 1, rate, 8, b"\x90" * num_samples), MAX_SECONDS)
    with pytest.raises(UnprocessableEntity, match="no samples, or too few"):
        resampled(np.zeros(num_samples, np.float32), 4 * DECODED_RATE, DECODED_RATE)


def flac_of_silence(seconds: int, rate: int, announced: int) -> bytes:
    """announced: the number of samples that its header says."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as output:
        stream = output.add_stream("flac", rate=rate, layout="mono", format="s16", options={"frame_size": "65535"})
        for _ in range(seconds):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, rate), np.int16), format="s16", layout="mono")
            frame.sample_rate = rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    data = bytearray(file.getvalue())
    data[21] &= 0xF0
    data[22:26] = struct.pack(">I", announced)
    return bytes(data)


@pytest.mark.parametrize(("rate", "announced"), [(192_000, 0), (192_000, 192_000), (8_000, 0), (8_000, 8_000)])
def test_no_recording_takes_more_memory_than_is_reserved_for_it(rate: int, announced: int) -> None:
    """32 KB of silence, whose header tells no length, became 439 MiB of samples."""
    data = flac_of_silence(120, rate, announced)
    tracemalloc.start()
    try:
        with pytest.raises(UnprocessableEntity, match="longer than its header or its size says"):
            decode_audio(data, 3600.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= audio_bytes(data, 3600.0) < 20 << 20


def test_a_recording_whose_header_tells_no_length_is_decoded() -> None:
    data = bytearray(encoded("flac", seconds=3.0))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    samples, _, _ = decode_audio(bytes(data), MAX_SECONDS)
    assert len(samples) == 3 * DECODED_RATE


def test_memory_is_reserved_by_the_rate_at_which_samples_are_held() -> None:
    """A wav with a rate of 1 Hz reserved a thousandth of what its samples took at the model's rate."""
    sizes = {audio_bytes(recording(rate=rate, seconds=5.0), 3600.0) for rate in (4_000, 16_000, 192_000)}
    assert sizes == {int(8 * DECODED_RATE * (5 * 1.1 + 10))}
