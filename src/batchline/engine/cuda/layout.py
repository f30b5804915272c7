"""A packed step on the device: where its layers write to the cache, and how they attend to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchline.engine.attention import AttentionParams
from batchline.engine.cuda.flash import attend_fresh, can_flash
from batchline.engine.cuda.packed_step import PackedStep
from batchline.engine.cuda.paged_attention import Tiles, attend_tiles, choose_num_splits, write_cache
from batchline.engine.kv_cache import KVCache

INTERPRETER_PROCESSORS = 4
"""Assumed on a CPU, where kernels are interpreted, so that contexts are split there too."""


@dataclass(frozen=True, slots=True)
class FreshRows:
    """`FreshRun` on the device: rows [start, end), bounds (num_chunks + 1,) int32 from `start` on."""

    start: int
    end: int
    bounds: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """A step's tensors on the cache's device. slots: (num_tokens,) int64. Of the prefills, the first `num_chunked`
    continue a context; the others are the tiles of `fresh`."""

    cache: KVCache
    slots: torch.Tensor
    decodes: Tiles
    prefills: Tiles
    num_chunked: int
    fresh: tuple[FreshRows, ...]

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `attention.StepLayout.attend`."""
        queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
        cache = self.cache.layers[layer]
        write_cache(cache, self.slots, keys, values)
        out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[-1])
        if len(self.decodes):
            splits = choose_num_splits(len(self.decodes), keys.shape[1], num_processors(queries.device))
            attend_tiles(queries, cache, self.decodes, params, out, splits)
        prefills = self.prefills
        if self.fresh and can_flash(queries, values, params):
            for run in self.fresh:
                rows = slice(run.start, run.end)
                out[rows] = attend_fresh(queries[rows], keys[rows], values[rows], run.bounds, run.longest, params)
            prefills = prefills.first(self.num_chunked)
        if len(prefills):
            attend_tiles(queries, cache, prefills, params, out)
        return out


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The model's inputs. tokens, positions: (num_tokens,); rows: the rows whose logits are wanted."""

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    layout: CudaLayout


def send_step(
    packed: PackedStep, cache: KVCache, device: torch.device, max_queries: int, *, use_flash: bool
) -> StepTensors:
    """Send the step to the device, in one transfer that the host does not wait for."""
    runs = packed.fresh if use_flash else ()
    arrays = [packed.tokens, packed.positions, packed.slots, packed.rows, packed.tables]
    tiles = [packed.decodes, packed.prefills]
    bounds = [run.bounds - run.bounds[0] for run in runs]
    everything = [*arrays, *(tile.ravel() for tile in tiles), *bounds]
    sent = torch.split(send(np.concatenate(everything), device), [len(array) for array in everything])
    tokens, positions, slots, rows, tables, decodes, prefills, *fresh = sent
    layout = CudaLayout(
        cache=cache,
        slots=slots,
        decodes=Tiles(decodes.view(packed.decodes.shape), tables, 1),
        prefills=Tiles(prefills.view(packed.prefills.shape), tables, max_queries),
        num_chunked=packed.num_chunked,
        fresh=tuple(
            FreshRows(int(run.bounds[0]), int(run.bounds[-1]), bound.int(), run.longest)
            for run, bound in zip(runs, fresh, strict=True)
        ),
    )
    return StepTensors(tokens, positions, rows, layout)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    return on_host(array, device).to(device, non_blocking=True)


def on_host(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in pinned memory; torch keeps it until transfers from it are done."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
