"""What a video becomes for a model of the Qwen-VL families: its frames, two by two, prepared like images.

The video processors of `transformers` need torchvision. Their arithmetic is that of the image processors on each frame,
but that a patch holds two frames; an image's patches hold the image twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from batchline.media.image_processor import unusable
from batchline.media.items import MediaItem
from batchline.media.prepared import PreparedItem, PreparedMedia
from batchline.media.video import Video

DEFAULT_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Pixels of a frame, of `Qwen2VLVideoProcessor`."""


class VideoProcessor:
    """Prepares the videos of one model, each once as long as the result is kept. Safe to use from several threads.

    placeholder: what chat templates write for a video. feature_token_id: the token that takes features.
    """

    def __init__(
        self, processor: Any, feature_token_id: int, prepared: PreparedMedia, size: Mapping[str, int] | None
    ) -> None:
        """processor: of `transformers`, with its image processor. prepared: where results are kept. size: the fewest
        and the most pixels of a frame, as its files name them; None for the default."""
        self._images = processor.image_processor
        self._kept = prepared
        self._size = dict(size or DEFAULT_SIZE)
        self.feature_token_id = feature_token_id
        self.placeholder: str = processor.tokenizer.convert_ids_to_tokens(feature_token_id)

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Raises: UnprocessableEntity for a video that the model's processor refuses."""
        key = hashlib.sha256(b"video:" + item.digest).digest()
        return self._kept.get(key) or self._kept.put(self._prepared(item, key))

    def _prepared(self, item: MediaItem, key: bytes) -> PreparedItem:
        video = item.content
        assert isinstance(video, Video)
        frames = [*video.frames, *video.frames[-1:] * (len(video.frames) % 2)]
        try:
            inputs = self._images(frames, return_tensors="np", size=self._size)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as exc:
            raise unusable("video", frames[0], exc) from exc
        grid = np.array([[len(frames) // 2, *inputs["image_grid_thw"][0][1:]]], dtype=np.int64)
        num_features = int(grid.prod()) // self._images.merge_size**2
        return PreparedItem(
            kind="video",
            key=key,
            text=self.placeholder * num_features,
            num_features=num_features,
            inputs={
                "pixel_values_videos": self._paired(inputs["pixel_values"], len(frames)),
                "video_grid_thw": grid,
                "second_per_grid_ts": np.array([2 / video.rate], dtype=np.float32),
            },
        )

    def _paired(self, patches: np.ndarray, num_frames: int) -> np.ndarray:
        """(patches of all pairs, numbers of a patch), from the patches of each frame, which hold it twice."""
        side = self._images.patch_size
        both = patches.reshape(num_frames // 2, 2, -1, 3, 2, side * side)
        pairs = np.stack([both[:, 0, :, :, 0], both[:, 1, :, :, 1]], axis=3)
        return pairs.reshape(-1, patches.shape[-1])
