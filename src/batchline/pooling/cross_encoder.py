"""Cross-encoders: turns pairs of texts into token ids, and those into scores.

Scores equal those of sentence-transformers' `CrossEncoder.predict`, with the model's own activation (sigmoid, unless
its configuration says otherwise) or without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder

from batchline.config import ModelConfig
from batchline.errors import UnsupportedModel
from batchline.pooling.batching import TokenSequence
from batchline.pooling.loading import LoadedPoolingModel, load_pooling_model
from batchline.pooling.tokenizing import PoolingTokenizer, Side, WritePair, pairs_cannot_be_cut
from batchline.pooling.worker import PoolingStats, PoolingWorker

LOGIT, ACTIVATED = 0, 1
"""Columns of the rows that the worker returns."""


class CrossEncoderModel:
    """A cross-encoder that runs on its own thread, for callers on any event loop.

    name: the name in answers. max_model_len: the limit on tokens of both texts together. transformers_tokenizer: not
    safe to share; copy it before use.
    """

    def __init__(self, name: str, loaded: LoadedPoolingModel) -> None:
        module = loaded.module
        self.name = name
        self.facts = loaded.facts(name)
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size
        self.transformers_tokenizer = loaded.tokenizer
        self._prompt: str = module.prompts.get(module.default_prompt_name or "", "")
        self._tokenizer = PoolingTokenizer(loaded.tokenizer, write_pair=_pair_writer(module[0], loaded.tokenizer))
        self.num_special_tokens = self._tokenizer.num_pair_special_tokens
        self._worker = PoolingWorker(
            loaded.run_batch, loaded.limits, probe=loaded.probe(), on_start=loaded.enter_thread
        )

    @property
    def takes_whole_pairs(self) -> bool:
        """Whether pairs are written by a template and cannot be cut."""
        return self._tokenizer.takes_whole_pairs

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The texts' beginnings, of at most this many tokens. Raises: BadRequest."""
        return await asyncio.to_thread(self._tokenizer.cut, texts, max_tokens)

    async def tokenize_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int | None = None, side: Side | None = None
    ) -> list[TokenSequence]:
        """One sequence per pair. If `max_tokens` is given, pairs are truncated to fit, the longer text first.

        Raises: BadRequest if this model's pairs cannot be truncated.
        """
        if max_tokens is not None and self._tokenizer.takes_whole_pairs:
            raise pairs_cannot_be_cut()
        return await asyncio.to_thread(
            self._tokenizer.encode_pairs, pairs, prompt=self._prompt, max_tokens=max_tokens, side=side
        )

    async def score(
        self, sequences: Sequence[TokenSequence], *, use_activation: bool = True, priority: int = 0
    ) -> NDArray[np.float32]:
        """(num_sequences,) float32: activated scores, or the model's logits. Raises: EngineDead, EngineError."""
        rows = await self._worker.run(sequences, priority=priority)
        return rows[:, ACTIVATED if use_activation else LOGIT]

    @property
    def is_alive(self) -> bool:
        """Whether the model still accepts requests."""
        return self._worker.is_alive

    def stats(self) -> PoolingStats:
        """Counters since the start."""
        return self._worker.stats()

    def close(self) -> None:
        """Stop the thread; calls still waiting get EngineDead. Idempotent."""
        self._worker.close()


def load_cross_encoder(config: ModelConfig) -> CrossEncoderModel:
    """Load a cross-encoder with one label from a folder or hub id. Raises: ModelLoadError, UnsupportedModel."""
    loaded = load_pooling_model(config, CrossEncoder, _read_scores)
    if loaded.module.num_labels != 1:
        raise UnsupportedModel(
            config.model, f"it has {loaded.module.num_labels} labels; scoring takes a cross-encoder with one"
        )
    return CrossEncoderModel(config.names[0], loaded)


def _pair_writer(transformer: Any, tokenizer: Any) -> WritePair | None:
    """A function that writes a pair with the model's chat template; None if no template takes queries and documents.

    Without one (a template may be for chats only), pairs are tokenized as two texts.
    """
    formatter = transformer.input_formatter
    if "message" not in transformer.modality_config or formatter.pair_roles_failure() is not None:
        return None

    def write(prompt: str, first: str, second: str) -> str:
        messages = [formatter.pair_to_messages((first, second))]
        if prompt:
            messages = formatter.prepend_prompt_to_messages(messages, prompt)
        return str(tokenizer.apply_chat_template(messages[0], tokenize=False))

    return write


def _read_scores(module: Any, features: dict[str, Any]) -> torch.Tensor:
    """(num_sequences, 2) float32: logit and activated score."""
    logits: torch.Tensor = features["scores"].float().reshape(len(features["scores"]), -1)[:, :1]
    return torch.cat([logits, module.activation_fn(logits)], dim=1)
