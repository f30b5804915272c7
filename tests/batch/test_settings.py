from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchline.batch.settings import refuse_missing_folder, result_settings
from batchline.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, TextConfig
from batchline.errors import UsageError


def settings(*, text: TextConfig | None = None, **model: Any) -> dict[str, str]:
    config = EngineConfig(model=ModelConfig(**{"model": "org/name", **model}), text=text or TextConfig())
    return dict(result_settings([config]))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"model": "org/other"}, "--model"),
        ({"served_names": ("a",)}, "--served-model-name"),
        ({"revision": "main"}, "--revision"),
        ({"dtype": "float32"}, "--dtype"),
        ({"quantization": "int8"}, "--quantization"),
        ({"max_model_len": 512}, "--max-model-len"),
        ({"tokenizer": "other"}, "--tokenizer"),
        ({"text": TextConfig(chat_template="{{ x }}")}, "--chat-template"),
        ({"text": TextConfig(strict=True)}, "--strict"),
        ({"text": TextConfig(tool_parser="hermes")}, "--tool-call-parser"),
        ({"text": TextConfig(reasoning_parser="qwen3")}, "--reasoning-parser"),
        ({"text": TextConfig(parser_plugins=("a.py",))}, "parser plugins"),
    ],
)
def test_what_changes_results_changes_its_setting_alone(changed: dict[str, Any], name: str) -> None:
    before, now = settings(), settings(**changed)
    assert [key for key in before if before[key] != now[key]] == [name]


def test_what_changes_speed_alone_changes_nothing() -> None:
    model = ModelConfig(model="m")
    fast = EngineConfig(
        model=ModelConfig(model="m", num_threads=7),
        cache=CacheConfig(num_bytes=1, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=3),
    )
    assert result_settings([EngineConfig(model=model)]) == result_settings([fast])


def test_other_files_in_the_models_folder_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = settings(model=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    now = settings(model=str(tmp_path))
    assert [key for key in before if before[key] != now[key]] == ["the model's files"]


def test_a_template_is_compared_by_its_text_not_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    by_path = settings(text=TextConfig(chat_template=str(tmp_path / "t.jinja")))
    assert by_path == settings(text=TextConfig(chat_template="{{ messages }}"))
    (tmp_path / "t.jinja").write_text("{{ other }}")
    assert by_path != settings(text=TextConfig(chat_template=str(tmp_path / "t.jinja")))


@pytest.mark.parametrize("model", ["/no/such/model", "./nope", "../nope", "~/nope"])
def test_a_model_written_as_a_path_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="There is no model at"):
        refuse_missing_folder(model)


def test_a_folder_that_is_there_and_a_hub_id_are_fine(tmp_path: Path) -> None:
    refuse_missing_folder(str(tmp_path))
    refuse_missing_folder("org/name")


def test_several_models_have_settings_of_their_own() -> None:
    both = result_settings([EngineConfig(model=ModelConfig(model=name)) for name in ("a", "b")])
    assert (both["--model"], both["--model (b)"]) == ("a", "b")
