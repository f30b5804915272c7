"""Finds out a model's task from its small files, without torch or transformers.

A model with a `modules.json` is a sentence-transformers model of the type that its config names. For other models, the
architecture in `config.json` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchline.checkpoints.files import read_json
from batchline.config import Task
from batchline.errors import ModelLoadError, UnsupportedModel

GENERATIVE_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
CLASSIFIER_SUFFIX = "ForSequenceClassification"
SENTENCE_TRANSFORMERS_TASKS: dict[str, Task] = {"SentenceTransformer": "embed", "CrossEncoder": "score"}


def detect_task(model: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> Task:
    """`generate`, `embed` or `score`, for a local folder or a hub id (whose two small files are fetched).

    overrides: values that override config.json.

    Raises: ModelLoadError, UnsupportedModel.
    """
    modules = read_json(model, "modules.json", revision)
    if modules is not None:
        if any(str(module.get("type", "")).endswith(".LogitScore") for module in modules.get("items", ())):
            return "generate"  # a reranker that answers yes or no
        settings = read_json(model, "config_sentence_transformers.json", revision) or {}
        model_type = settings.get("model_type", "SentenceTransformer")
        if model_type not in SENTENCE_TRANSFORMERS_TASKS:
            raise UnsupportedModel(model, f"{model_type} models are neither embedding models nor cross-encoders")
        return SENTENCE_TRANSFORMERS_TASKS[model_type]
    config = read_json(model, "config.json", revision)
    if config is None:
        raise ModelLoadError(model, "it has neither a config.json nor a modules.json")
    config.update(overrides or {})
    architectures = config.get("architectures") or []
    if config.get("classifier_from_token"):  # a generative reranker, marked for vLLM
        return "generate"
    if any(name.endswith(CLASSIFIER_SUFFIX) for name in architectures):
        return "score"
    if any(name.endswith(GENERATIVE_SUFFIXES) for name in architectures) or not architectures:
        return "generate"
    return "embed"
