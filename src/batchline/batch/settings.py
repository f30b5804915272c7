"""Which settings of the engine change results: a run is resumed only under equal ones; and models that are not there.

Left out is what changes speed alone: device memory, batch sizes, threads, prefix caching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchline.config import EngineConfig, ModelConfig
from batchline.errors import UsageError


def result_settings(engines: Sequence[EngineConfig]) -> Mapping[str, str]:
    """Option names and values to compare, one engine's after the other's."""
    settings = {}
    for number, engine in enumerate(engines):
        suffix = f" ({engine.model.model})" if number else ""
        settings.update({f"{name}{suffix}": value for name, value in _settings(engine).items()})
    return settings


def refuse_missing_folder(model: str) -> None:
    """Refuse at once a model that is written as a path and is not there. Raises: UsageError.

    Anything else may be a hub id, which only loading can tell.
    """
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        hint = " A ~ inside quotes or a configuration file is not expanded." if model.startswith("~") else ""
        raise UsageError(f"There is no model at {model!r}.{hint}")


def _settings(engine: EngineConfig) -> dict[str, str]:
    model, text = engine.model, engine.text
    values = {
        "--model": model.model,
        "the model's files": _folder_stamp(model),
        "--served-model-name": " ".join(model.served_names),
        "--task": model.task,
        "--scoring": model.scoring,
        "--tokenizer": model.tokenizer,
        "--revision": model.revision,
        "--dtype": model.dtype,
        "--quantization": model.quantization,
        "--max-model-len": model.max_model_len,
        "--chat-template": _template_stamp(text.chat_template),
        "--chat-template-content-format": text.chat_template_content_format,
        "--trust-request-chat-template": text.allow_request_chat_template,
        "--special-tokens-in-content": text.special_tokens_in_content,
        "--max-logprobs": text.max_logprobs,
        "--tool-call-parser": text.tool_parser,
        "--reasoning-parser": text.reasoning_parser,
        "parser plugins": " ".join(text.parser_plugins),
        "--strict": text.strict,
    }
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _folder_stamp(model: ModelConfig) -> str:
    """Names, sizes and times of change of a local model's files, in short: cheap even where weights are large."""
    folder = Path(model.model)
    if not folder.is_dir():
        return ""
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()
    )
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]


def _template_stamp(template: str | None) -> str | None:
    """The template's text in short, whether it was given inline or as a path."""
    if template is None:
        return None
    try:
        text = Path(template).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        text = template
    return hashlib.sha256(text.encode()).hexdigest()[:12]
