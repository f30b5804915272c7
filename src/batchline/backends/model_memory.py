"""Finds whether a model fits in memory next to the loaded ones, from the headers of its weight files.

Counts only the files that would be loaded (folders often hold the same weights in several formats), in the data type
that the model will have, and compares them with the free memory of its device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from batchline.config import EngineConfig, ModelConfig, Task
from batchline.engine.memory import free_bytes

MEMORY_PER_WEIGHT = 1.5
"""The memory that a model needs at least, as a multiple of its weights: weights, some cache, activations."""

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""In the order in which loaders look for them; each may be split into several files with an index."""

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def fits_in_memory(config: EngineConfig, task: Task) -> bool:
    """Whether the model fits. False if its size is not known before it is downloaded."""
    num_bytes = weight_bytes(config.model, task)
    if num_bytes is None:
        return False
    needed = max(MEMORY_PER_WEIGHT * num_bytes, num_bytes + (config.cache.num_bytes or 0))
    return needed <= free_bytes(None if config.model.device == "auto" else config.model.device)


def weight_bytes(model: ModelConfig, task: Task) -> int | None:
    """Bytes of the model's weights in memory; None for a hub id that is not on this machine."""
    folder = _local_folder(model)
    if folder is None:
        return None
    item_size = _item_size(model, task)
    return sum(_file_bytes(path, item_size) for part in _parts(folder) for path in _weight_files(part))


def _local_folder(model: ModelConfig) -> Path | None:
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _parts(folder: Path) -> list[Path]:
    """The folder, and the module folders of a sentence-transformers model with several modules."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return sorted({folder / module["path"] for module in modules} | {folder})
    except (OSError, ValueError, TypeError, KeyError):
        return [folder]


def _weight_files(folder: Path) -> Iterator[Path]:
    """The files that a loader reads: those of the first existing format."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            yield folder / name
            return
        if index.is_file():
            yield from (folder / part for part in _names_in(index) if (folder / part).is_file())
            return


def _names_in(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return set()  # the load will say what is wrong with it


def _file_bytes(path: Path, item_size: int) -> int:
    """Elements of a safetensors file times their size in memory; for other formats, the size of the file."""
    if path.suffix != ".safetensors":
        return path.stat().st_size
    try:
        with safe_open(path, framework="np") as file:
            shapes: list[list[int]] = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
            return item_size * sum(map(prod, shapes))
    except (SafetensorError, OSError):
        return path.stat().st_size  # the load will say what is wrong with it


def _item_size(model: ModelConfig, task: Task) -> int:
    """Bytes of one weight in memory. Quantized models are loaded whole first, so they need as much for a moment."""
    if model.dtype == "auto" and task == "generate":
        from batchline.engine.model_loader import choose_device, choose_dtype  # imports torch and transformers

        item_size: int = choose_dtype(model, choose_device(model)).itemsize
        return item_size
    return ITEM_SIZES.get(model.dtype, ITEM_SIZES["float32"])
