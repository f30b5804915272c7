"""`--hf-overrides`: what reaches transformers, and what is refused instead of dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchline.checkpoints.overrides import config_arguments, read_config
from batchline.config import ModelConfig
from batchline.errors import ModelLoadError
from batchline.pooling.detection import detect_task

TINY_CHAT = str(Path(__file__).parents[2] / "examples/models/tiny-chat")


def model(**overrides: Any) -> ModelConfig:
    return ModelConfig(model=TINY_CHAT, hf_overrides=overrides)


def test_known_names_are_passed_on() -> None:
    assert config_arguments(model(max_position_embeddings=512)) == {"max_position_embeddings": 512}
    assert config_arguments(model()) == {}


def test_an_unknown_name_is_an_error() -> None:
    """transformers drops it without a word."""
    with pytest.raises(ModelLoadError, match="--hf-overrides: a llama config has no max_position_embedding"):
        config_arguments(model(max_position_embedding=512))


def test_older_names_of_rope_settings_change_its_parameters() -> None:
    """transformers reads them only while it makes a configuration, and would ignore them."""
    rope = config_arguments(model(rope_theta=77.0, rope_scaling={"type": "linear", "factor": 2.0}))["rope_parameters"]
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (77.0, "linear", 2.0)


def test_what_our_own_code_reads_is_not_for_transformers() -> None:
    changed = model(architectures=["Qwen3ForSequenceClassification"], classifier_from_token=["no", "yes"])
    assert config_arguments(changed) == {}
    config = read_config(changed)
    assert config is not None
    assert config["classifier_from_token"] == ["no", "yes"]


def test_a_generative_reranker_marked_as_vllms_guide_does_is_generative() -> None:
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    assert detect_task(TINY_CHAT, None, overrides) == "generate"
    assert detect_task(TINY_CHAT, None, {"architectures": ["BertForSequenceClassification"]}) == "classify"
