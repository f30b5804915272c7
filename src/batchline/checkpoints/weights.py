"""Compares what a checkpoint's files hold with what the model took from them.

`transformers` fills weights that are missing with random numbers, drops those that it has no place for, and converts
whatever number format the files have. Each gives a model that answers nonsense without an error.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from batchline.checkpoints.files import local_folder
from batchline.errors import ModelLoadError

LoadingReport = Mapping[str, Any]
"""Of `from_pretrained`: `missing_keys`, `unexpected_keys` (names) and `mismatched_keys` (name, shape, wanted shape)."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

INTEGER_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|relative_position_index|causal_mask|masked_bias|version"
    r"|(attn|attention)\.bias|(cache_)?position|inv_freq)$"
)
"""Tensors that are integers in old checkpoints too: positions and attention masks."""

HARMLESS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(masked_bias|position_ids|causal_mask)$|(attn|attention)\.bias$"
    r"|(^|\.)mtp(\.|_)|(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)
"""Weights that a model may leave in its files: buffers of older versions, heads for predicting several tokens, and the
parts of a multimodal model that its language model does without."""

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}

POOLER = re.compile(r"(^|\.)pooler\.")


def refuse_odd_numbers(model: str, revision: str | None = None) -> None:
    """Refuse weights that are stored as integers or 8-bit floats: converted, they are not the model's.

    Files that cannot be read are not judged; loading explains them. Raises: ModelLoadError.
    """
    folder = local_folder(model, revision)
    for path in [] if folder is None else _weight_files(folder):
        odd = [
            (name, dtype)
            for name, dtype in _stored_dtypes(path)
            if dtype not in FLOATS and not (_may_be_integer(name, dtype) and not dtype.startswith("F8"))
        ]
        if odd:
            name, dtype = odd[0]
            raise ModelLoadError(
                model,
                f"{name} is stored as {dtype} and not as floating-point numbers of 16 bits or more: it is a quantized "
                "checkpoint that does not say how; give the unquantized model",
            )


def refuse_wrong_weights(name: str, model: Any, report: LoadingReport, *, has_pooler: bool = True) -> None:
    """Refuse a model whose files lack weights, have more for a part than it takes, or have them in another shape.

    Weights of parts that the model does not have are another task's head or the like, and change nothing.
    has_pooler: whether its pooler is used; else it may be missing. Raises: ModelLoadError.
    """
    missing = [key for key in report["missing_keys"] if has_pooler or not POOLER.search(key)]
    if missing:  # transformers fills them with random numbers
        raise ModelLoadError(name, f"its files lack weights: {_first_few(missing)}")
    if report["mismatched_keys"]:
        key, shape, wanted = min(report["mismatched_keys"])
        raise ModelLoadError(
            name,
            f"its weights do not fit its config.json: {key} is {_size(shape)}, the config makes it {_size(wanted)}",
        )
    unexpected = [key for key in _unexpected(report) if _is_part_of(model, key)]
    if unexpected:
        raise ModelLoadError(
            name,
            f"its files hold weights that its config.json has no place for: {_first_few(unexpected)}; "
            "the config must be the one that the weights were trained with",
        )


def unused_weights(model: Any, report: LoadingReport) -> str | None:
    """Names of weights of parts that the model does not have, for the user; None where there are none."""
    unused = [key for key in _unexpected(report) if not _is_part_of(model, key)]
    return _first_few(unused) if unused else None


def _unexpected(report: LoadingReport) -> list[str]:
    return [key for key in report["unexpected_keys"] if not HARMLESS.search(key)]


_patching = threading.Lock()


@contextmanager
def loading_reports() -> Iterator[list[tuple[Any, LoadingReport]]]:
    """Models and reports of every `from_pretrained` in the block, which a library calls that drops the reports.

    One block at a time: `from_pretrained` of all models is replaced meanwhile.
    """
    own = PreTrainedModel.__dict__["from_pretrained"]
    reports: list[tuple[Any, LoadingReport]] = []

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **settings: Any) -> Any:
        settings = {**settings, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = own.__func__(cls, *args, **settings)
        reports.append((model, report))
        return model

    with _patching:
        PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        try:
            yield reports
        finally:
            PreTrainedModel.from_pretrained = own


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: safetensors where there are any."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _stored_dtypes(path: Path) -> Iterator[tuple[str, str]]:
    """Names and dtypes of a file's tensors, as safetensors writes dtypes; nothing for a file that cannot be read."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                dtypes = [(name, file.get_slice(name).get_dtype()) for name in file.keys()]  # noqa: SIM118
        else:
            tensors = torch.load(path, map_location="meta", weights_only=True)
            dtypes = [(name, _dtype_name(x.dtype)) for name, x in tensors.items() if isinstance(x, torch.Tensor)]
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, UnpicklingError, AttributeError):
        return
    yield from dtypes


def _may_be_integer(name: str, dtype: str) -> bool:
    """Whether a tensor is a table of indices or a mask, which some models keep beside their weights."""
    is_table = dtype in ("I64", "BOOL") and not name.endswith((".weight", ".bias"))
    return is_table or INTEGER_BUFFERS.search(name) is not None


def _dtype_name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch.").upper().replace("FLOAT8", "F8"))


def _is_part_of(model: Any, key: str) -> bool:
    """Whether a weight is of a part of the model or of its base, whose name it may leave out."""
    prefix = f"{model.base_model_prefix}."
    return _has(model.base_model, key.removeprefix(prefix)) or (not key.startswith(prefix) and _has(model, key))


def _has(module: torch.nn.Module, key: str) -> bool:
    first = key.partition(".")[0]
    return first in module._modules or first in module._parameters


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _first_few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
