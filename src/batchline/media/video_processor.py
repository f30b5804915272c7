"""What a video becomes for a model: its frames, prepared like images, and the text of its place in a prompt.

The video processors of `transformers` need torchvision. Their arithmetic is repeated here with the image processors on
Pillow and numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from batchline.media.image_processor import unusable
from batchline.media.items import MediaItem
from batchline.media.prepared import PreparedItem, PreparedMedia
from batchline.media.video import Sampling, Video


class VideoProcessor:
    """Prepares the videos of one model, each once as long as the result is kept. Safe to use from several threads.

    sampling: which frames the model sees. placeholder: what chat templates write for a video. feature_token_id: the
    token that takes features.
    """

    sampling: ClassVar[Sampling] = "ends"

    def __init__(
        self, processor: Any, feature_token_id: int, prepared: PreparedMedia, settings: Mapping[str, Any]
    ) -> None:
        """processor: of `transformers`, with its image processor. prepared: where results are kept. settings: of the
        video processor, as the model's files name them."""
        self._processor = processor
        self._images = processor.image_processor
        self._kept = prepared
        self._settings = settings
        self.feature_token_id = feature_token_id
        self.placeholder: str = processor.video_token
        self._feature_token: str = processor.tokenizer.convert_ids_to_tokens(feature_token_id)

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Raises: UnprocessableEntity for a video that the model's processor refuses."""
        key = hashlib.sha256(b"video:" + item.digest).digest()
        return self._kept.get(key) or self._kept.put(self._prepared(item, key))

    def _prepared(self, item: MediaItem, key: bytes) -> PreparedItem:
        video = item.content
        assert isinstance(video, Video)
        try:
            text, inputs = self._text_and_inputs(video)
        except (ValueError, TypeError, ZeroDivisionError, LookupError) as exc:
            raise unusable("video", video.frames[0], exc) from exc
        num_features = text.count(self._feature_token)
        return PreparedItem(kind="video", key=key, text=text, num_features=num_features, inputs=inputs)

    def _text_and_inputs(self, video: Video) -> tuple[str, Mapping[str, np.ndarray]]:
        """What replaces the placeholder, and the encoder's arguments. Raises: ValueError, TypeError."""
        raise NotImplementedError


class Qwen2VideoProcessor(VideoProcessor):
    """Frames two by two: a patch holds both of them, where an image's patch holds the image twice."""

    sampling: ClassVar[Sampling] = "pairs"

    def _text_and_inputs(self, video: Video) -> tuple[str, Mapping[str, np.ndarray]]:
        patches = self._patches([*video.frames, *video.frames[-1:] * (len(video.frames) % 2)], len(video.frames))
        num_pairs = len(patches["image_grid_thw"]) // 2
        grid = np.array([[num_pairs, *patches["image_grid_thw"][0][1:]]], dtype=np.int64)
        inputs = {
            "pixel_values_videos": self._paired(patches["pixel_values"], num_pairs),
            "video_grid_thw": grid,
            "second_per_grid_ts": np.array([2 / video.rate], dtype=np.float32),
        }
        return self._text(video, num_pairs, int(grid[0, 1:].prod()) // self._images.merge_size**2), inputs

    def _patches(self, frames: list[Image.Image], _num_sampled: int) -> Mapping[str, np.ndarray]:
        """Of each frame, as if it were an image. The default size is that of `Qwen2VLVideoProcessor`."""
        size = self._settings.get("size") or {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
        patches: Mapping[str, np.ndarray] = self._images(frames, return_tensors="np", size=dict(size))
        return patches

    def _paired(self, patches: np.ndarray, num_pairs: int) -> np.ndarray:
        """(patches of all pairs, numbers of a patch), from the patches of each frame, which hold it twice."""
        side = self._images.patch_size
        both = patches.reshape(num_pairs, 2, -1, 3, 2, side * side)
        pairs = np.stack([both[:, 0, :, :, 0], both[:, 1, :, :, 1]], axis=3)
        return pairs.reshape(-1, patches.shape[-1])

    def _text(self, _video: Video, num_pairs: int, num_features: int) -> str:
        """num_features: of a pair."""
        return self.placeholder * (num_pairs * num_features)


class Qwen3VideoProcessor(Qwen2VideoProcessor):
    """The same pairs, each after a text that says when it is shown. The size is that of all frames together."""

    sampling: ClassVar[Sampling] = "ends"

    def _patches(self, frames: list[Image.Image], num_sampled: int) -> Mapping[str, np.ndarray]:
        """The default settings are those of `Qwen3VLVideoProcessor`."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize  # heavy

        own, (width, height) = self._images, frames[0].size
        size = self._settings.get("size") or {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
        factor, num_sampled = own.patch_size * own.merge_size, max(2, num_sampled)
        most = self._max_pixels(size, num_sampled, factor)
        height, width = smart_resize(num_sampled, height, width, 2, factor, size["shortest_edge"], most)
        resized = [frame.resize((width, height), own.resample) for frame in frames]
        colours = {name: self._settings.get(name) or [0.5, 0.5, 0.5] for name in ("image_mean", "image_std")}
        patches: Mapping[str, np.ndarray] = own(resized, return_tensors="np", do_resize=False, **colours)
        return patches

    def _max_pixels(self, size: Mapping[str, int], num_frames: int, factor: int) -> int:
        """Of all frames, with the limit on each that `cap_pixels_per_frame` sets: `Qwen3VLVideoProcessor.resize`."""
        most = int(size["longest_edge"])
        if not self._settings.get("cap_pixels_per_frame"):
            return most
        of_each = min(int(self._settings.get("max_video_tokens", 768)) * factor**2, most // num_frames)
        return num_frames * max(of_each, int(1.05 * size["shortest_edge"]))

    def _text(self, video: Video, num_pairs: int, num_features: int) -> str:
        own = self._processor
        times = [*video.times, *video.times[-1:] * (2 * num_pairs - len(video.times))]
        pair = f"{own.vision_start_token}{self.placeholder * num_features}{own.vision_end_token}"
        return "".join(
            f"<{(first + second) / 2:.1f} seconds>{pair}" for first, second in zip(times[::2], times[1::2], strict=True)
        )


class FrameVideoProcessor(VideoProcessor):
    """Each frame by itself, all resized to one size."""

    def _text_and_inputs(self, video: Video) -> tuple[str, Mapping[str, np.ndarray]]:
        inputs = {"pixel_values_videos": self._pixels(video)[None]}
        text: str = self._processor.replace_video_token(inputs, video_idx=0)
        return text, inputs

    def _pixels(self, video: Video) -> np.ndarray:
        """(frames, 3, height, width), normalized. As `BaseVideoProcessor._preprocess`."""
        own, size = self._images, self._setting("size")
        resized = [frame.resize((size["width"], size["height"]), self._setting("resample")) for frame in video.frames]
        scaled = [own.rescale(np.asarray(frame).transpose(2, 0, 1), own.rescale_factor) for frame in resized]
        mean, std = self._setting("image_mean"), self._setting("image_std")
        return np.stack([own.normalize(frame, mean, std) for frame in scaled]).astype(np.float32)

    def _setting(self, name: str) -> Any:
        """Of images, if the model's files have none for videos."""
        return self._settings.get(name) or getattr(self._images, name)


class InternVideoProcessor(FrameVideoProcessor):
    """Each frame as an image that is seen as a whole: between the same tokens, for the same encoder."""

    sampling: ClassVar[Sampling] = "middles"

    def _text_and_inputs(self, video: Video) -> tuple[str, Mapping[str, np.ndarray]]:
        text, inputs = super()._text_and_inputs(video)
        return text, {"pixel_values": inputs["pixel_values_videos"][0]}
