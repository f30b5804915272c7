"""The settings that the embedded engine's answers depend on, and the check for missing models.

A run resumes only with equal settings. Those that only change speed are left out: device memory, batch sizes, threads,
prefix caching.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchline.config import EngineConfig, RequestLimits
from batchline.errors import UsageError
from batchline.plugins import installed
from batchline.text.parser_registry import REASONING_PARSERS, TOOL_PARSERS

_WHOLE_FILE_BYTES = 4 * 1024 * 1024
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 1 << 14
_TEXTS_FOR_PEOPLE = frozenset({".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"})


def result_settings(engines: Sequence[EngineConfig]) -> Mapping[str, str]:
    """Option names and values to compare, of all engines."""
    settings = {}
    for number, engine in enumerate(engines):
        suffix = f" ({engine.model.names[0]})" if number else ""
        settings.update({f"{name}{suffix}": value for name, value in _settings(engine).items()})
    return settings


def refuse_missing_folder(model: str) -> None:
    """Refuse a model at once if it is written as a path that does not exist. Raises: UsageError.

    Anything else may be a hub id, which only loading can check.
    """
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        hint = " A ~ inside quotes or a configuration file is not expanded." if model.startswith("~") else ""
        raise UsageError(f"There is no model at {model!r}.{hint}")


def _settings(engine: EngineConfig) -> dict[str, str]:
    model, text = engine.model, engine.text
    values = {
        "--model": model_stamp(model.model),
        "--served-model-name": " ".join(model.names),
        "--task": model.task,
        "--scoring": model.scoring,
        "--tokenizer": None if model.tokenizer is None else model_stamp(model.tokenizer),
        "--revision": model.revision,
        "--dtype": model.dtype,
        "--quantization": model.quantization,
        "--max-model-len": model.max_model_len,
        "--chat-template": _text_stamp(text.chat_template),
        "--chat-template-content-format": text.chat_template_content_format,
        "--trust-request-chat-template": text.allow_request_chat_template,
        "--special-tokens-in-content": text.special_tokens_in_content,
        "--max-logprobs": text.max_logprobs,
        "--tool-call-parser": text.tool_parser,
        "--reasoning-parser": text.reasoning_parser,
        "parser plugins": " ".join([*_installed_plugins(), *(_text_stamp(path) or "" for path in text.parser_plugins)]),
        "--strict": text.strict,
        "--seed": text.seed,
        "--generation-config": _generation_stamp(model.generation_config),
        "--override-generation-config": _json(text.override_generation_config),
        "--default-chat-template-kwargs": _json(text.default_chat_template_kwargs),
        "--hf-overrides": _json(model.hf_overrides),
        "--request-limit": _changed_limits(text.limits),
    }
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _installed_plugins() -> list[str]:
    """Parsers of installed packages, with the packages' versions: one may read what a model writes."""
    entries = [entry for group in (TOOL_PARSERS, REASONING_PARSERS) for entry in installed(group)]
    return [f"{entry.name}={entry.value}@{entry.dist.version if entry.dist else ''}" for entry in entries]


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True) if settings else ""


def _generation_stamp(source: str) -> str | None:
    return source if source in ("auto", "vllm") else _text_stamp(os.path.join(source, "generation_config.json"))


def _changed_limits(limits: RequestLimits) -> str:
    """The settings that differ from the defaults."""
    pairs = ((field.name, getattr(limits, field.name), field.default) for field in dataclasses.fields(limits))
    return " ".join(f"{name}={value}" for name, value, default in pairs if value != default)


def model_stamp(model: str) -> str:
    """A hub id as it is; a local folder by its contents, so that a copy of it is the same model."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if _is_of_model(path.relative_to(folder)) and path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        _digest_samples(path, digest)
    return f"a folder with digest {digest.hexdigest()[:12]}"


def _is_of_model(path: Path) -> bool:
    """Whether a file of a model's folder may change results: hidden files, caches and documents do not."""
    is_hidden = any(part.startswith((".", "__pycache__")) for part in path.parts)
    return not is_hidden and path.suffix.lower() not in _TEXTS_FOR_PEOPLE


def _digest_samples(path: Path, digest: hashlib._Hash) -> None:
    """Digest a small file whole; of a large one, its start (the header of safetensors) and samples, because different
    weights of the same shapes differ almost everywhere."""
    with path.open("rb", buffering=0) as file:
        digest.update(file.read(_WHOLE_FILE_BYTES))
        size = os.fstat(file.fileno()).st_size
        for number in range(_NUM_SAMPLES if size > _WHOLE_FILE_BYTES else 0):
            file.seek(size * number // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))


def _text_stamp(text_or_path: str | None) -> str | None:
    """A digest of a text, given inline or as a path."""
    if text_or_path is None:
        return None
    try:
        text = Path(text_or_path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        text = text_or_path
    return hashlib.sha256(text.encode()).hexdigest()[:12]
