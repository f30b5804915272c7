"""Scores texts against each other: by a cross-encoder, pair by pair, or by the cosine similarity of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchline.endpoints.embedders import Embedder
from batchline.endpoints.pooling_limits import check_sequences, engine_errors_answered, resolve_truncation, salted
from batchline.errors import BadRequest, InternalServerError
from batchline.openai_api.common import TruncationSide
from batchline.pooling.batching import TokenSequence
from batchline.pooling.tokenizing import Role
from batchline.pooling.vectors import are_finite, cosine_similarities

ROLES: tuple[Role, Role] = ("query", "document")
"""Field names of the two sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """What to score: `firsts` (one, or as many as `seconds`) against `seconds`.

    names: the request's field names, for errors. are_queries: whether firsts are queries and seconds documents, for
    models that put different prompts before them. truncate, truncation_side, use_activation, cache_salt,
    max_tokens_per_doc: as in the request; None if it has no value. cuts_to_fit: whether texts that are too long are cut
    instead of refused, if the model can do that.
    """

    firsts: Sequence[str]
    seconds: Sequence[str]
    names: tuple[str, str]
    are_queries: bool
    truncate: int | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None
    cache_salt: str | None = None
    max_tokens_per_doc: int | None = None
    cuts_to_fit: bool = False
    priority: int = 0

    def max_tokens(self, *, max_model_len: int, num_special_tokens: int, can_cut: bool = True) -> int | None:
        """The length that sequences are cut to. can_cut: whether the model can cut sequences. Raises: BadRequest."""
        keep = -1 if self.truncate is None and self.cuts_to_fit and can_cut else self.truncate
        return resolve_truncation(keep, max_model_len=max_model_len, num_special_tokens=num_special_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One score per second text, and the tokens that were computed for all."""

    values: list[float]
    num_prompt_tokens: int


class Scorer(Protocol):
    """Scores texts. name: the model's name in answers."""

    @property
    def name(self) -> str: ...

    async def score(self, task: ScoringTask) -> Scores:
        """Raises: BadRequest, InternalServerError, EngineDead."""


class TextCutter(Protocol):
    """Cuts texts by the model's own tokens."""

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The texts' beginnings, of at most this many tokens. Raises: BadRequest."""


async def cut_documents(task: ScoringTask, cutter: TextCutter) -> Sequence[str]:
    """The second texts, cut to `max_tokens_per_doc`. Raises: BadRequest."""
    if task.max_tokens_per_doc is None:
        return task.seconds
    return await cutter.cut(task.seconds, task.max_tokens_per_doc)


class PairModel(TextCutter, Protocol):
    """A cross-encoder: pairs to token sequences, token sequences to scores.

    takes_whole_pairs: whether its pairs cannot be cut.
    """

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_pair_special_tokens(self) -> int: ...
    @property
    def takes_whole_pairs(self) -> bool: ...

    async def tokenize_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int | None = None, side: TruncationSide | None = None
    ) -> list[TokenSequence]:
        """One sequence per pair, cut to `max_tokens` if it is given."""

    async def score(
        self, sequences: Sequence[TokenSequence], *, use_activation: bool = True, priority: int = 0
    ) -> NDArray[np.float32]:
        """(num_sequences,) float32. Raises: EngineDead, EngineError."""


class PairScorer:
    """Scores by a cross-encoder."""

    def __init__(self, model: PairModel) -> None:
        self.name = model.name
        self._model = model

    async def score(self, task: ScoringTask) -> Scores:
        """Uses the model's own activation unless the task says otherwise. Raises: BadRequest, InternalServerError."""
        max_tokens = task.max_tokens(
            max_model_len=self._model.max_model_len,
            num_special_tokens=self._model.num_pair_special_tokens,
            can_cut=not self._model.takes_whole_pairs,
        )
        if task.cuts_to_fit and task.truncate is None and max_tokens is not None:
            await self._check_room(task)
        firsts = task.firsts if len(task.firsts) > 1 else [task.firsts[0]] * len(task.seconds)
        pairs = list(zip(firsts, await cut_documents(task, self._model), strict=True))
        sequences = await self._model.tokenize_pairs(pairs, max_tokens=max_tokens, side=task.truncation_side)
        check_sequences(
            sequences, max_model_len=self._model.max_model_len, vocab_size=self._model.vocab_size, param=task.names[1]
        )
        with engine_errors_answered():
            scores = await self._model.score(
                sequences, use_activation=task.use_activation is not False, priority=task.priority
            )
        return checked_scores(scores, sequences)

    async def _check_room(self, task: ScoringTask) -> None:
        """Refuse a query that leaves no room for documents: scores for a cut query mean little. Raises: BadRequest."""
        (alone,) = await self._model.tokenize_pairs([(task.firsts[0], "")])
        if len(alone) >= self._model.max_model_len:
            num_tokens = len(alone) - self._model.num_pair_special_tokens
            raise BadRequest(
                f"{task.names[0]}: its {num_tokens} tokens leave no room for documents: this model's maximum context "
                f"length is {self._model.max_model_len} tokens for both; send a shorter {task.names[0]}",
                param=task.names[0],
            )


class SimilarityScorer:
    """Scores by the cosine of the angle between two vectors."""

    def __init__(self, embedder: Embedder) -> None:
        self.name = embedder.name
        self._embedder = embedder

    async def score(self, task: ScoringTask) -> Scores:
        """Cosine similarity, without an activation. Raises: BadRequest, InternalServerError."""
        if task.use_activation:
            raise BadRequest(
                f"use_activation: {self.name} scores by cosine similarity, which has no activation",
                param="use_activation",
            )
        firsts = await self._tokenize(task.firsts, task, side=0)
        seconds = await self._tokenize(await cut_documents(task, self._embedder), task, side=1)
        sequences = salted([*firsts, *seconds], task.cache_salt)
        with engine_errors_answered():
            vectors = await self._embedder.embed(sequences, priority=task.priority)
        return checked_scores(cosine_similarities(vectors[: len(firsts)], vectors[len(firsts) :]), sequences)

    async def _tokenize(self, texts: Sequence[str], task: ScoringTask, *, side: int) -> list[TokenSequence]:
        embedder = self._embedder
        max_tokens = task.max_tokens(
            max_model_len=embedder.max_model_len, num_special_tokens=embedder.num_special_tokens
        )
        role = ROLES[side] if task.are_queries else None
        sequences = await embedder.tokenize(texts, role=role, max_tokens=max_tokens, side=task.truncation_side)
        check_sequences(
            sequences, max_model_len=embedder.max_model_len, vocab_size=embedder.vocab_size, param=task.names[side]
        )
        return sequences


def checked_scores(scores: NDArray[np.float32], sequences: Sequence[TokenSequence]) -> Scores:
    """The scores for the answer. Raises: InternalServerError if one is not a number."""
    if not are_finite(scores):
        raise InternalServerError("The model's score is not a number; a wider dtype may help")
    return Scores(values=scores.tolist(), num_prompt_tokens=sum(len(sequence) for sequence in sequences))
