"""What depends on where a model runs: its kernels, the room for its KV cache, and the runner of its steps.

The engine's other parts see a `StepRunner` and a number of blocks, and know nothing of devices.
"""

from __future__ import annotations

import logging

import torch

from batchline.config import EngineConfig
from batchline.engine.kv_cache import KVCache, bytes_per_block, choose_num_blocks
from batchline.engine.memory import free_bytes
from batchline.engine.model_loader import LoadedModel
from batchline.engine.model_runner import ModelRunner
from batchline.engine.native_cache import PANEL, NativeKVCache, padded
from batchline.errors import ModelLoadError
from batchline.native.library import NativeKernels, open_kernels

logger = logging.getLogger(__name__)


def choose_kernels(config: EngineConfig) -> NativeKernels | None:
    """The native kernels to load the model with; None leaves everything to torch."""
    if config.cache.block_size % PANEL != 0:
        return None
    return open_kernels(config.model.cpu_kernels)


def size_cache(config: EngineConfig, loaded: LoadedModel) -> tuple[int, int]:
    """(context length, number of blocks) that fit together. Raises: ModelLoadError when the length asked for cannot."""
    size = config.cache.block_size
    layers = loaded.layers if loaded.kernels is None else [padded(spec, loaded.dtype) for spec in loaded.layers]
    block_bytes = bytes_per_block(layers, size, loaded.dtype)
    num_blocks = choose_num_blocks(
        config.cache,
        block_bytes,
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        free_bytes=_cache_room(loaded.device),
    )
    capacity = num_blocks * size
    if capacity >= loaded.max_model_len:
        return loaded.max_model_len, num_blocks
    if config.model.max_model_len is not None:
        raise ModelLoadError(
            config.model.model,
            f"a context of {loaded.max_model_len} tokens needs "
            f"{-(-loaded.max_model_len // size) * block_bytes:,} bytes of KV cache and there is room for "
            f"{num_blocks * block_bytes:,}; "
            "lower --max-model-len or raise --kv-cache-memory-bytes",
        )
    logger.warning("the KV cache holds %d tokens: the context is cut from %d to that", capacity, loaded.max_model_len)
    return capacity, num_blocks


def make_runner(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> ModelRunner:
    """The runner of the model's steps, with a cache in the layout that the model's attention reads."""
    size = config.cache.block_size
    if loaded.kernels is None:
        return ModelRunner(loaded, KVCache(loaded.layers, num_blocks, size, loaded.dtype, loaded.device))
    return ModelRunner(loaded, NativeKVCache(loaded.kernels, loaded.layers, num_blocks, size, loaded.dtype))


def _cache_room(device: torch.device) -> int:
    """Memory that the cache may take from. On a CPU half of what is free: the rest is for everything else."""
    return free_bytes() if device.type == "cuda" else free_bytes("cpu") // 2
