"""A packed step on the device: where its layers write to the cache, and how they attend to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchline.engine.cuda.flash import attend_fresh, can_flash
from batchline.engine.cuda.packed_step import PackedStep
from batchline.engine.cuda.paged_attention import (
    AttentionParams,
    attend_decodes,
    attend_prefills,
    choose_num_splits,
    write_cache,
)
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
    """The tensors of a `PackedStep`, int64, on the cache's device. max_queries: the limit of a prefill's tile."""

    cache: KVCache
    slots: torch.Tensor
    tables: torch.Tensor
    decodes: torch.Tensor
    prefills: torch.Tensor
    num_chunked: int
    fresh: tuple[FreshRows, ...]
    max_queries: int

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend. Shapes as `attention.StepLayout.attend`."""
        params = AttentionParams(scale, sliding_window, softcap)
        queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
        cached_keys, cached_values = self.cache.keys[layer], self.cache.values[layer]
        write_cache(keys, values, cached_keys, cached_values, self.slots)
        out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[-1])
        if len(self.decodes):
            splits = choose_num_splits(len(self.decodes), keys.shape[1], num_processors(queries.device))
            attend_decodes(queries, cached_keys, cached_values, out, self.decodes, self.tables, params, splits)
        prefills = self.prefills
        if self.fresh and can_flash(queries, values, params):
            self._attend_fresh(queries, keys, values, out, params)
            prefills = prefills[: self.num_chunked]
        if len(prefills):
            attend_prefills(queries, cached_keys, cached_values, out, prefills, self.tables, params, self.max_queries)
        return out

    def _attend_fresh(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        params: AttentionParams,
    ) -> None:
        for run in self.fresh:
            rows = slice(run.start, run.end)
            out[rows] = attend_fresh(queries[rows], keys[rows], values[rows], run.bounds, run.longest, params)


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
        tables=tables,
        decodes=decodes.view(packed.decodes.shape),
        prefills=prefills.view(packed.prefills.shape),
        num_chunked=packed.num_chunked,
        fresh=tuple(
            FreshRows(int(run.bounds[0]), int(run.bounds[-1]), bound.int(), run.longest)
            for run, bound in zip(runs, fresh, strict=True)
        ),
        max_queries=max_queries,
    )
    return StepTensors(tokens, positions, rows, layout)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    return on_host(array, device).to(device, non_blocking=True)


def on_host(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in pinned memory; torch keeps it until transfers from it are done."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
