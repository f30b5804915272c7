"""Whether a model fits beside others: the files that count, the data type they will have, the device's free memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchline.backends.model_memory import MEMORY_PER_WEIGHT, fits_in_memory, weight_bytes
from batchline.config import CacheConfig, Device, DType, EngineConfig, ModelConfig


def model_in(folder: Path, *, dtype: DType = "float32", device: Device = "cpu") -> ModelConfig:
    return ModelConfig(model=str(folder), dtype=dtype, device=device)


def write_weights(path: Path, num_elements: int, dtype: type = np.float32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.zeros((2, num_elements // 2), dtype), "b": np.zeros(0, dtype)}, path)


@pytest.mark.parametrize(("dtype", "item_size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weights_count_in_the_data_type_that_they_are_loaded_in(tmp_path: Path, dtype: DType, item_size: int) -> None:
    write_weights(tmp_path / "model.safetensors", 1000, np.float16)
    assert weight_bytes(model_in(tmp_path, dtype=dtype), "generate") == 1000 * item_size


def test_an_embedding_model_is_float32_unless_asked_otherwise(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", 1000, np.float16)
    assert weight_bytes(model_in(tmp_path, dtype="auto"), "embed") == 4000


def test_files_that_no_loader_reads_do_not_count(tmp_path: Path) -> None:
    """The same weights in `.bin` files made a model look twice as large, so that it was unloaded for no reason."""
    write_weights(tmp_path / "model.safetensors", 1000)
    for unused in ("pytorch_model.bin", "training_args.bin", "openvino/openvino_model.bin", "onnx/model.bin"):
        (tmp_path / unused).parent.mkdir(exist_ok=True)
        (tmp_path / unused).write_bytes(bytes(100_000))
    write_weights(tmp_path / "consolidated.safetensors", 1000)
    write_weights(tmp_path / "original/model.safetensors", 1000)
    assert weight_bytes(model_in(tmp_path), "generate") == 4000


def test_the_files_of_an_index_count_and_no_others(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_weights(tmp_path / f"model-{number}.safetensors", 1000)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(model_in(tmp_path), "generate") == 8000


def test_bin_files_count_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))
    assert weight_bytes(model_in(tmp_path), "generate") == 5000


def test_the_further_modules_of_an_embedding_model_count(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", 1000)
    write_weights(tmp_path / "2_Dense/model.safetensors", 100)
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert weight_bytes(model_in(tmp_path), "embed") == 4400


@pytest.mark.parametrize("index", ["no JSON", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_left_to_the_load(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert weight_bytes(model_in(tmp_path), "generate") == 0


def test_a_model_that_is_not_on_this_machine_fits_beside_no_other() -> None:
    config = EngineConfig(model=ModelConfig(model="nobody/has-this-model"))
    assert weight_bytes(config.model, "embed") is None
    assert not fits_in_memory(config, "embed")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_the_memory_of_the_models_own_device_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    write_weights(tmp_path / "model.safetensors", 1000)
    asked: list[str | None] = []

    def free_bytes(device_type: str | None) -> int:
        asked.append(device_type)
        return int(4000 * MEMORY_PER_WEIGHT)

    monkeypatch.setattr("batchline.backends.model_memory.free_bytes", free_bytes)
    config = EngineConfig(model=model_in(tmp_path, device=device))
    assert fits_in_memory(config, "embed")
    assert asked == [None if device == "auto" else device]
    with_cache = EngineConfig(model=config.model, cache=CacheConfig(num_bytes=4000))
    assert not fits_in_memory(with_cache, "generate"), "the cache that was asked for has to fit, too"
