"""Videos: which frames are seen, and what is wrong with files that cannot be decoded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from media_families import load_processor, make_media_model, video
from tiny_videos import tiny_video
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from batchline.errors import UnprocessableEntity
from batchline.media.video import VideoLimits, decode_video, sampled_frames, video_bytes

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
    assert sampled_frames(num_frames, rate, max_frames, "pairs") == wanted


def test_frames_from_the_first_to_the_last_are_those_of_transformers() -> None:
    own = Qwen3VLVideoProcessor(max_frames=32)
    for num_frames in (1, 2, 3, 7, 20, 100, 333):
        for rate in (1.0, 10.0, 29.97):
            expected = own.sample_frames(VideoMetadata(num_frames, fps=rate)).tolist()
            assert sampled_frames(num_frames, rate, 32, "ends") == expected


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
    assert sampled_frames(num_frames, 10.0, max_frames, "middles") == wanted


@pytest.mark.parametrize(
    ("codec", "container"), [("mpeg4", "mp4"), ("libx264", "mp4"), ("libvpx", "webm"), ("libvpx-vp9", "matroska")]
)
def test_the_sampled_frames_of_usual_formats_are_decoded(codec: str, container: str) -> None:
    data = tiny_video(codec=codec, container=container)
    video, digest = decode_video(data, LIMITS, "pairs")
    assert video.rate == pytest.approx(2.0)
    assert video.times == pytest.approx((0, 0.5, 1, 1.5))
    assert [frame.size for frame in video.frames] == [(48, 32)] * 4
    shades = [float(np.asarray(frame).mean()) for frame in video.frames]
    np.testing.assert_allclose(shades, [10 + index * 10 for index in (0, 5, 10, 15)], atol=8)
    assert digest == decode_video(data, LIMITS, "pairs")[1]
    assert digest != decode_video(tiny_video(num_frames=24, codec=codec, container=container), LIMITS, "pairs")[1]
    assert 3 * 48 * 32 * 4 <= video.num_bytes <= video_bytes(data, LIMITS)


@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        (b"none", LIMITS, "not a video of a known format"),
        (tiny_video(), VideoLimits(1.0, 32, 10**6), "longer than 1 seconds"),
        (tiny_video(), VideoLimits(10.0, 32, 1000), "32 frames of the video have more than 1,000 pixels"),
        (tiny_video(codec="ffv1", container="matroska"), LIMITS, r"a format that is not decoded \(ffv1\)"),
        (tiny_video(rate=200), LIMITS, "its size or frame rate is not valid"),
    ],
)
def test_what_is_no_video_or_over_a_limit_is_refused(data: bytes, limits: VideoLimits, reason: str) -> None:
    with pytest.raises(UnprocessableEntity, match=reason):
        video_bytes(data, limits)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_video_cut_off_anywhere_is_refused_or_seen_as_far_as_it_goes(container: str) -> None:
    data = tiny_video(container=container, num_frames=40)
    for twentieth in range(20):
        try:
            video, _ = decode_video(data[: len(data) * twentieth // 20], LIMITS, "pairs")
        except UnprocessableEntity:
            continue
        assert container == "matroska", "an mp4 file has its index at its end"
        assert len(video.frames) >= 1


def test_damaged_bytes_give_an_error_or_frames() -> None:
    data = tiny_video(num_frames=40)
    random = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(data)
        for place in random.integers(0, len(data), 8):
            damaged[place] ^= 0xFF
        try:
            video, _ = decode_video(bytes(damaged), LIMITS, "pairs")
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
        decode_video(file.getvalue(), LIMITS, "pairs")


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
