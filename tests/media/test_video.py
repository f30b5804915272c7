"""Videos: which frames are seen, and what is wrong with files that cannot be decoded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from media_families import FRAME_COUNTS, load_processor, make_media_model, own_processor, smolvlm_video, video
from tiny_videos import tiny_video
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from batchline.config import ModelConfig
from batchline.errors import UnprocessableEntity
from batchline.media.processor import load_media_processor
from batchline.media.video import (
    ENDS,
    MIDDLES,
    PAIRS,
    Sampling,
    VideoLimits,
    decode_video,
    sampled_frames,
    video_bytes,
)
from batchline.media.video_processor import number_words

LIMITS = VideoLimits(seconds=10.0, frames=32, pixels=1_000_000)


@pytest.mark.parametrize(
    ("num_frames", "rate", "max_frames", "wanted"),
    [
        (20, 10.0, 32, [0, 5, 10, 15]),
        (100, 10.0, 32, list(range(0, 100, 5))),
        (100, 10.0, 4, [0, 25, 50, 75]),
        (100, 10.0, 5, [0, 25, 50, 75]),
        (3, 10.0, 32, [0, 1]),
        (2, 30.0, 32, [0, 1]),
        (1, 30.0, 32, [0]),
        (30, 30.0, 1, [0]),
        (10, 1.0, 32, list(range(10))),
    ],
)
def test_two_frames_of_a_second_are_seen_in_pairs_and_within_the_limit(
    num_frames: int, rate: float, max_frames: int, wanted: list[int]
) -> None:
    assert sampled_frames(num_frames, rate, max_frames, PAIRS) == wanted


def test_frames_from_the_first_to_the_last_are_those_of_transformers() -> None:
    own = Qwen3VLVideoProcessor(max_frames=32)
    for num_frames in (1, 2, 3, 7, 20, 100, 333):
        for rate in (1.0, 10.0, 29.97):
            expected = own.sample_frames(VideoMetadata(num_frames, fps=rate)).tolist()
            assert sampled_frames(num_frames, rate, 32, ENDS) == expected


@pytest.mark.parametrize(
    ("num_frames", "max_frames", "wanted"),
    [(20, 32, [2, 7, 12, 17]), (21, 32, [2, 7, 13, 18]), (100, 5, [10, 30, 50, 70, 90]), (1, 32, [0])],
)
def test_frames_from_the_middles_of_parts_are_those_of_transformers(
    num_frames: int, max_frames: int, wanted: list[int]
) -> None:
    """As InternVL's video processor, which needs torchvision to be imported, computes them."""
    count = len(wanted)
    assert wanted == torch.arange(num_frames / count / 2, num_frames, num_frames / count).int().tolist()
    assert sampled_frames(num_frames, 10.0, max_frames, MIDDLES) == wanted


@pytest.mark.parametrize(("per_second", "most"), [(1, 64), (1, 4), (0.5, 8), (3, 5), (2, 1)])
def test_frames_without_the_ends_of_long_videos_are_those_of_transformers(per_second: float, most: int) -> None:
    own = SmolVLMVideoProcessor(video_sampling={"fps": per_second, "max_frames": most, "video_size": 32})
    sampling = Sampling("inner", per_second, min_frames=1, max_frames=most)
    for num_frames in (1, 2, 3, 7, 20, 100, 333, 2000):
        for rate in (0.4, 1.0, 10.0, 29.97):
            metadata = VideoMetadata(num_frames, fps=rate, duration=num_frames / rate)
            assert sampled_frames(num_frames, rate, 32, sampling) == own.sample_frames(metadata, min(most, 32)).tolist()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (1, "one"),
        (12, "twelve"),
        (19, "nineteen"),
        (20, "twenty"),
        (21, "twenty-one"),
        (64, "sixty-four"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (768, "seven hundred and sixty-eight"),
        (999, "nine hundred and ninety-nine"),
    ],
)
def test_numbers_are_written_as_num2words_writes_them(number: int, words: str) -> None:
    assert number_words(number) == words


@pytest.mark.parametrize(("num_frames", "size"), [(2, (40, 40)), (5, (64, 24)), (6, (31, 77)), (3, (300, 20))])
def test_videos_of_smolvlm_have_the_text_and_the_pixels_of_transformers(
    tmp_path: Path, num_frames: int, size: tuple[int, int]
) -> None:
    processor = load_processor(make_media_model("smolvlm", tmp_path))
    clip = video(1, num_frames, *size)
    clip = replace(clip, content=replace(clip.content, seconds=3725.9, times=tuple(range(55, 55 + 9 * num_frames, 9))))
    prepared = processor.prepare(clip)
    made, text = smolvlm_video(clip.content, own_processor(processor))
    assert prepared.text == text
    assert text.startswith(f"You are provided the following series of {FRAME_COUNTS[num_frames]} frames from a 1:02:05")
    assert "\nFrame from 00:55:<fake" in text
    assert "\nFrame from 01:04:<fake" in text
    assert prepared.num_features == 4 * num_frames
    np.testing.assert_array_equal(prepared.inputs["pixel_values"], made["pixel_values"])
    np.testing.assert_array_equal(prepared.inputs["pixel_attention_mask"], made["pixel_attention_mask"])


@pytest.mark.parametrize("place", ["processor", "video_preprocessor", "preprocessor", None])
def test_smolvlm_sees_as_many_frames_as_its_files_say(tmp_path: Path, place: str | None) -> None:
    """Published folders have the settings beside those of images, newer ones in files of their own."""
    folder = make_media_model("smolvlm", tmp_path)
    files = {
        name: json.loads((folder / f"{name}_config.json").read_text()) for name in ("processor", "preprocessor")
    } | {"video_preprocessor": {}}
    del files["processor"]["video_processor"]
    wanted = {"video_sampling": {"fps": 3, "max_frames": 7, "video_size": {"longest_edge": 48}}}
    if place == "processor":
        files["processor"]["video_processor"] = wanted
    elif place is not None:
        files[place] |= wanted
    for name, values in files.items():
        (folder / f"{name}_config.json").write_text(json.dumps(values))
    assert load_processor(folder).sampling == (
        Sampling("inner", 1.0, min_frames=1, max_frames=64)
        if place is None
        else Sampling("inner", 3.0, min_frames=1, max_frames=7)
    )


@pytest.mark.parametrize(
    ("codec", "container"), [("mpeg4", "mp4"), ("libx264", "mp4"), ("libvpx", "webm"), ("libvpx-vp9", "matroska")]
)
def test_the_sampled_frames_of_usual_formats_are_decoded(codec: str, container: str) -> None:
    data = tiny_video(codec=codec, container=container)
    video, digest = decode_video(data, LIMITS, PAIRS)
    assert video.rate == pytest.approx(2.0)
    assert video.times == pytest.approx((0, 0.5, 1, 1.5))
    assert [frame.size for frame in video.frames] == [(48, 32)] * 4
    shades = [float(np.asarray(frame).mean()) for frame in video.frames]
    np.testing.assert_allclose(shades, [10 + index * 10 for index in (0, 5, 10, 15)], atol=8)
    assert digest == decode_video(data, LIMITS, PAIRS)[1]
    assert digest != decode_video(tiny_video(num_frames=24, codec=codec, container=container), LIMITS, PAIRS)[1]
    assert 3 * 48 * 32 * 4 <= video.num_bytes <= video_bytes(data, LIMITS, PAIRS)


@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        (b"none", LIMITS, "not a video of a known format"),
        (tiny_video(), VideoLimits(1.0, 32, 10**6), "longer than 1 seconds"),
        (tiny_video(), VideoLimits(10.0, 32, 32_000), "a frame of the video has more than 1,000 pixels"),
        (tiny_video(codec="ffv1", container="matroska"), LIMITS, r"a format that is not decoded \(ffv1\)"),
        (tiny_video(rate=200), LIMITS, "its size or frame rate is not valid"),
    ],
)
def test_what_is_no_video_or_over_a_limit_is_refused(data: bytes, limits: VideoLimits, reason: str) -> None:
    with pytest.raises(UnprocessableEntity, match=reason):
        video_bytes(data, limits, PAIRS)


def test_only_the_frames_that_are_seen_count() -> None:
    """The operator's maximum counted in their place: --max-video-frames 768 refused ordinary videos."""
    data = tiny_video()
    limits = VideoLimits(seconds=10.0, frames=768, pixels=32 * 48 * 32)
    assert len(decode_video(data, limits, PAIRS)[0].frames) == 4
    assert video_bytes(data, limits, PAIRS) <= 3 * 48 * 32 * (20 + 2)
    with pytest.raises(UnprocessableEntity, match="the 40 frames that a model sees of the video have more than"):
        decode_video(tiny_video(num_frames=40), limits, Sampling("pairs", per_second=100.0))


def test_all_frames_of_a_fragmented_file_are_seen() -> None:
    """Its header counts those of the first fragment."""
    data = tiny_video(num_frames=60, options={"movflags": "frag_keyframe+empty_moov"})
    limits = replace(LIMITS, pixels=10**7)
    video, _ = decode_video(data, limits, PAIRS)
    assert len(video.frames) == 12
    assert video.num_bytes <= video_bytes(data, limits, PAIRS)


def test_decoding_takes_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchline.media.video.MAX_DECODING_S", -1.0)
    with pytest.raises(UnprocessableEntity, match="decoding the video takes more than"):
        decode_video(tiny_video(), LIMITS, PAIRS)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_video_cut_off_anywhere_is_refused_or_seen_as_far_as_it_goes(container: str) -> None:
    """An mp4 file has its index at its end."""
    data = tiny_video(container=container, num_frames=40)
    num_seen = 0
    for twentieth in range(20):
        try:
            video, _ = decode_video(data[: len(data) * twentieth // 20], LIMITS, PAIRS)
        except UnprocessableEntity:
            continue
        assert len(video.frames) >= 1
        num_seen += 1
    assert (num_seen > 0) == (container == "matroska")


def test_damaged_bytes_give_an_error_or_frames() -> None:
    data = tiny_video(num_frames=40)
    random = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(data)
        for place in random.integers(0, len(data), 8):
            damaged[place] ^= 0xFF
        try:
            video, _ = decode_video(bytes(damaged), LIMITS, PAIRS)
        except UnprocessableEntity:
            continue
        assert {frame.size for frame in video.frames} == {video.frames[0].size}


def test_a_recording_without_pictures_is_no_video() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with pytest.raises(UnprocessableEntity, match="it has no video"):
        decode_video(file.getvalue(), LIMITS, PAIRS)


def test_frames_for_qwen2_5_omni_have_the_size_that_its_processor_sets(tmp_path: Path) -> None:
    """The settings in published folders are those of images, which may be much larger."""
    folder = make_media_model("qwen2_5_omni_thinker", tmp_path)
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 2048}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    size = transformers.Qwen2_5OmniProcessor.videos_kwargs["size"]
    height, width = smart_resize(40, 90, 16, size["shortest_edge"], size["longest_edge"])
    clip = video(1, 3, 90, 40)
    clip = replace(clip, content=replace(clip.content, seconds=6.0))
    prepared = load_media_processor(ModelConfig(model=str(folder)), {}).prepare(clip)
    assert prepared.num_features == 2 * (height // 16) * (width // 16)
    assert prepared.inputs["second_per_grid_ts"].tolist() == [4.0], "two of the frames, which are two seconds apart"


@pytest.mark.parametrize("settings", [{}, {"cap_pixels_per_frame": True, "max_video_tokens": 6}])
def test_videos_of_qwen3_vl_have_as_many_tokens_as_in_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    size = {"shortest_edge": 1024, "longest_edge": 16_384}
    folder = make_media_model("qwen3_vl", tmp_path)
    files = {"processor_class": "Qwen3VLProcessor", "video_processor": {"size": size, **settings}}
    (folder / "processor_config.json").write_text(json.dumps(files))
    processor, own = load_processor(folder), Qwen3VLVideoProcessor(size=size, patch_size=8, **settings)
    for seed, num_frames in enumerate((2, 3, 4, 12)):
        for width, height in ((40, 40), (200, 90), (16, 8), (20, 300)):
            prepared = processor.prepare(video(seed, num_frames, width, height))
            assert prepared.num_features == own.get_num_of_video_patches(num_frames, height, width) // 4
