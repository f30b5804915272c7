"""Speculative decoding as a user sees it: its settings, a draft model's vocabulary, and the counts of a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchline import run_batch
from batchline.backends.in_process import InProcessBackend
from batchline.backends.resident_models import _warn_of_unused_settings
from batchline.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from batchline.errors import ModelLoadError, UsageError
from batchline.text.tokenizer import load_tokenizer

TINY_CHAT = Path(__file__).parents[2] / "examples" / "models" / "tiny-chat"
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "one two three one two three one two three", "max_tokens": 60, "ignore_eos": True},
}


def config(**speculation: str) -> EngineConfig:
    model = ModelConfig(model=str(TINY_CHAT), served_names=("m",), dtype="float32", device="cpu", num_threads=1)
    return EngineConfig(
        model=model,
        cache=CacheConfig(num_bytes=8 << 20),
        speculation=replace(SpeculationConfig(), **speculation),  # type: ignore[arg-type]
    )


def test_a_run_gives_the_same_answers_with_and_without_guesses_and_counts_them(tmp_path: Path) -> None:
    """With a draft model too. Greedy and seeded requests alike."""
    bodies = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"temperature": 0, "logit_bias": {"50": 3}}]
    lines = [{**LINE, "custom_id": str(n), "body": {**LINE["body"], **body}} for n, body in enumerate(bodies)]  # type: ignore[dict-item]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts, counts = {}, {}
    settings = {
        "off": config(mode="off"),
        "always": config(mode="always"),
        "draft": config(mode="always", draft_model=str(TINY_CHAT)),
    }
    for name, engine in settings.items():
        output = tmp_path / f"{name}.jsonl"
        summary = run_batch(tmp_path / "in.jsonl", output, model=engine)
        results = [json.loads(line) for line in output.read_text().splitlines()]
        texts[name] = [result["response"]["body"]["choices"][0]["text"] for result in results]
        counts[name] = (summary.guessed_tokens, summary.accepted_tokens)
    assert texts["always"] == texts["draft"] == texts["off"]
    assert counts["off"] == (0, 0)
    assert 0 < counts["always"][1] <= counts["always"][0]
    assert counts["draft"][1] > 60


async def test_a_draft_model_with_other_tokens_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Its guesses would be other texts; every one would be wrong."""
    draft = shutil.copytree(TINY_CHAT, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelLoadError, match="their tokenizers have different vocabularies"):
        await InProcessBackend([config(draft_model=str(draft))]).start()


def with_table(folder: Path, copy: Path, size: int) -> Path:
    """A copy of a model whose embeddings are cut or padded to so many."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            kept = tensor[:size]
            tensors[name] = torch.cat([kept, kept.new_zeros(size - len(kept), kept.shape[1])])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "vocab_size": size}))
    return copy


async def test_a_draft_model_needs_all_tokens_of_the_tokenizer_but_no_padding(tmp_path: Path) -> None:
    """Qwen2.5-7B has 152,064 embeddings and Qwen2.5-0.5B 151,936, with the same tokenizer."""
    size = len(load_tokenizer(str(TINY_CHAT)).vocabulary)
    padded = with_table(TINY_CHAT, tmp_path / "padded", size + 60)
    cut = with_table(TINY_CHAT, tmp_path / "cut", size - 1)
    for target in (padded, TINY_CHAT):
        engine = config(draft_model=str(cut))
        engine = replace(engine, model=replace(engine.model, model=str(target)))
        with pytest.raises(ModelLoadError, match=f"it has {size - 1:,} token ids, and needs {size:,}"):
            await InProcessBackend([engine]).start()
    for target, draft in ((padded, TINY_CHAT), (TINY_CHAT, padded)):
        engine = config(draft_model=str(draft))
        backend = InProcessBackend([replace(engine, model=replace(engine.model, model=str(target)))])
        await backend.start()
        await backend.close()


def test_a_draft_model_for_a_model_that_generates_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    settings = config(draft_model="draft", mode="always")
    _warn_of_unused_settings(settings, "generate")
    assert not caplog.messages
    _warn_of_unused_settings(settings, "embed")
    assert "options, which are for models with other tasks: " in caplog.text
    assert "--speculation, --draft-model" in caplog.text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SpeculationConfig\.mode must be one of auto, always, off"):
        InProcessBackend([config(mode="sometimes")])


def test_a_draft_model_without_speculation_is_refused() -> None:
    with pytest.raises(UsageError, match="no effect while speculation is off"):
        SpeculationConfig(mode="off", draft_model="d")
