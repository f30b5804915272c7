"""Embedding models: texts to token ids, and token ids to vectors.

Vectors equal those of sentence-transformers' `SentenceTransformer.encode`: the model's own pooling, normalisation and
further layers, its default prompt in front of texts, and its own `truncate_dim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from batchline.config import ModelConfig
from batchline.errors import BadRequest
from batchline.pooling.batching import TokenSequence
from batchline.pooling.loading import LoadedPoolingModel, load_pooling_model
from batchline.pooling.matryoshka import Matryoshka, read_matryoshka
from batchline.pooling.model import PoolingModel
from batchline.pooling.tokenizing import PoolingTokenizer
from batchline.pooling.vectors import normalise
from batchline.pooling.worker import Rows


class EmbeddingModel(PoolingModel):
    """A pooling model whose rows are vectors. matryoshka: None if vectors must not be shortened."""

    def __init__(self, name: str, loaded: LoadedPoolingModel, matryoshka: Matryoshka | None) -> None:
        module = loaded.module
        excludes_prompt = any(isinstance(part, Pooling) and not part.include_prompt for part in module)
        super().__init__(name, loaded, PoolingTokenizer(loaded.tokenizer, excludes_prompt=excludes_prompt))
        self.matryoshka = matryoshka
        self._own_size: int | None = module.truncate_dim
        self._normalises = any(isinstance(part, Normalize) for part in module)

    async def embed(
        self,
        sequences: Sequence[TokenSequence],
        *,
        dimensions: int | None = None,
        normalises: bool | None = None,
        priority: int = 0,
    ) -> Rows:
        """(num_sequences, dimensions) float32. Each sequence fits `max_model_len`; `matryoshka` allows `dimensions`.

        normalises: None leaves it to the model. Shortened vectors are normalised again if the model normalises.
        Raises: BadRequest if the model's own layers normalise but `normalises` is False, EngineDead, EngineError.
        """
        if normalises is False and self._normalises:
            raise BadRequest(
                f"use_activation: the last layer of {self.name} normalises its vectors, and this cannot be turned off",
                param="use_activation",
            )
        vectors = await self._worker.run(sequences, priority=priority)
        cut = vectors[:, : dimensions or self._own_size]
        needs_it = normalises and not self._normalises
        return normalise(cut) if needs_it or (self._normalises and dimensions is not None) else cut


def load_embedding_model(config: ModelConfig) -> EmbeddingModel:
    """Load an embedding model from a folder or hub id. Raises: ModelLoadError, UnsupportedModel."""
    loaded = load_pooling_model(config, SentenceTransformer, _read_vectors)
    matryoshka = read_matryoshka(
        config.model,
        config.revision,
        full=loaded.run_batch(loaded.probe()).shape[1],
        overrides=config.hf_overrides,
    )
    return EmbeddingModel(config.names[0], loaded, matryoshka)


def _read_vectors(module: Any, features: dict[str, Any]) -> torch.Tensor:
    """(num_sequences, size), in the model's dtype."""
    vectors: torch.Tensor = features["sentence_embedding"]
    return vectors
