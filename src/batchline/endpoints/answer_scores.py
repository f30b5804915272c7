"""Rerankers that are generative models. They score a pair by the logits of the answers "yes" and "no".

`find_reranker` recognises such a model and the form of its prompt. `AnswerScorer` computes the prompt's last hidden
state in the engine, and from it only the logits of the two answers, not of the whole vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchline.checkpoints.files import read_json
from batchline.checkpoints.overrides import read_config
from batchline.config import ModelConfig
from batchline.endpoints.embedders import EngineEmbedder
from batchline.endpoints.model import GenerativeModel, TextParts
from batchline.endpoints.pooling_limits import check_sequences, engine_errors_answered, salted
from batchline.endpoints.scorers import Scores, ScoringTask, checked_scores, cut_documents
from batchline.errors import BadRequest, UnsupportedModel
from batchline.pooling.batching import TokenSequence
from batchline.pooling.tokenizing import beginning_is_needed, pairs_cannot_be_cut
from batchline.text.chat_template import ChatPrompt, ChatTemplate
from batchline.text.control_tokens import ControlTokens, RenderedChat
from batchline.text.tokenizer import Tokenizer

QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_NAME = re.compile(r"qwen3.*rerank", re.IGNORECASE)
QWEN3_ARCHITECTURES = frozenset({"Qwen3ForCausalLM", "Qwen3ForSequenceClassification"})
QWEN3_FLAGS = ("is_original_qwen3_reranker", "is_qwen3_rerank")


class PairFormat(Protocol):
    """The form of a model's prompt for a pair of texts.

    num_special_tokens: tokens of every prompt besides the texts. can_cut: whether a prompt can be truncated.
    """

    @property
    def num_special_tokens(self) -> int: ...
    @property
    def can_cut(self) -> bool: ...

    def encode(self, first: str, second: str, max_tokens: int | None) -> tuple[int, ...]:
        """Token ids of the prompt, cut to `max_tokens` if it is given. Raises: BadRequest."""


class Qwen3Format:
    """The form on Qwen3-Reranker's model card. Parts are tokenized one by one; truncation cuts the document's end."""

    can_cut = True

    def __init__(self, tokenizer: Tokenizer, control_tokens: ControlTokens | None = None) -> None:
        self._tokenizer = tokenizer
        self._control_tokens = control_tokens
        self._prefix = tokenizer.encode(QWEN3_PREFIX, add_special_tokens=False)
        self._suffix = tokenizer.encode(QWEN3_SUFFIX, add_special_tokens=False)
        self.num_special_tokens = len(self._prefix) + len(self._suffix)

    def encode(self, first: str, second: str, max_tokens: int | None) -> tuple[int, ...]:
        """See `PairFormat`."""
        text = f"<Instruct>: {QWEN3_INSTRUCTION}\n<Query>: {first}\n<Document>: {second}"
        if self._control_tokens is None:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = self._control_tokens.encode_checked(text)
        if max_tokens is not None:
            token_ids = token_ids[: max_tokens - self.num_special_tokens]
        return (*self._prefix, *token_ids, *self._suffix)


class TemplateFormat:
    """The form of sentence-transformers: the chat template renders a message `query` and a message `document`."""

    num_special_tokens = 0
    can_cut = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        instruction: str,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        """instruction: the model's own, a system message; "" for none."""
        self._tokenizer = tokenizer
        self._control_tokens = control_tokens
        self._template = template
        self._system = [{"role": "system", "content": instruction}] if instruction else []

    def encode(self, first: str, second: str, max_tokens: int | None) -> tuple[int, ...]:
        """See `PairFormat`."""
        if max_tokens is not None:
            raise pairs_cannot_be_cut()
        pair = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        prompt = ChatPrompt(messages=[*self._system, *pair], add_generation_prompt=False)
        if self._control_tokens is None:
            rendered = RenderedChat(self._template.render(prompt))
        else:
            rendered = self._control_tokens.render_checked(self._template, prompt)
        return rendered.token_ids(self._tokenizer, add_special_tokens=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranker:
    """How a generative model scores. yes, no: token ids; without a `no` the logit of `yes` is the score.

    is_activated: whether scores go through a sigmoid unless a request says otherwise.
    """

    format: PairFormat
    yes: int
    no: int | None
    is_activated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownReranker:
    """The scorer of a reranker whose prompt for a pair is not known. The model's other endpoints work."""

    name: str

    async def score(self, task: ScoringTask) -> Scores:
        """Raises: BadRequest."""
        raise BadRequest(
            f"{self.name} is marked as a reranker (classifier_from_token), but only the prompt of Qwen3-Reranker is "
            "known. Start with --scoring yes-no to use that prompt, or with --scoring similarity to compare vectors",
            param="model",
        )


def find_reranker(config: ModelConfig, text: TextParts) -> Reranker | UnknownReranker | None:
    """How the model scores pairs; None if it is not a reranker. Raises: UnsupportedModel."""
    if config.scoring == "similarity":
        return None
    saved = _saved_by_sentence_transformers(config, text)
    if saved is not None:
        return saved
    settings = read_config(config) or {}
    answers = settings.get("classifier_from_token")
    if config.scoring != "yes-no" and not _is_qwen3_reranker(config.model, settings):
        return UnknownReranker(name=config.names[0]) if answers else None
    if answers and len(answers) != 2:
        raise UnsupportedModel(config.model, "it cannot score by yes or no: classifier_from_token is not two tokens")
    no, yes = (_token_id(config, text, answer) for answer in answers or ("no", "yes"))
    return Reranker(format=Qwen3Format(text.tokenizer, text.control_tokens), yes=yes, no=no)


def _is_qwen3_reranker(model: str, settings: Mapping[str, Any]) -> bool:
    """Whether config.json says so, or the architecture fits and the model's name or another mark says so."""
    if any(settings.get(flag) for flag in QWEN3_FLAGS):
        return True
    if not QWEN3_ARCHITECTURES.intersection(settings.get("architectures") or ()):
        return False
    names = (PurePath(model).name, str(settings.get("_name_or_path", "")))
    return bool(settings.get("classifier_from_token")) or any(map(QWEN3_NAME.search, names))


def _saved_by_sentence_transformers(config: ModelConfig, text: TextParts) -> Reranker | None:
    path = _logit_score_path(read_json(config.model, "modules.json", config.revision))
    if path is None:
        return None
    score = read_json(config.model, f"{path}/config.json", config.revision) or {}
    settings = read_json(config.model, "config_sentence_transformers.json", config.revision) or {}
    if text.chat_template is None:
        raise UnsupportedModel(config.model, "it scores the answer to a chat and has no chat template")
    activation = str(settings.get("activation_fn") or "Sigmoid").rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise UnsupportedModel(config.model, f"its scores go through {activation}, not Sigmoid or Identity")
    instruction = (settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or ""
    return Reranker(
        format=TemplateFormat(text.tokenizer, text.chat_template, instruction, text.control_tokens),
        yes=int(score["true_token_id"]),
        no=None if score.get("false_token_id") is None else int(score["false_token_id"]),
        is_activated=activation == "Sigmoid",
    )


def _logit_score_path(modules: Mapping[str, Any] | None) -> str | None:
    """The folder of the module that turns logits into scores."""
    for module in (modules or {}).get("items", ()):
        if str(module.get("type", "")).endswith(".LogitScore"):
            return str(module["path"])
    return None


def _token_id(config: ModelConfig, text: TextParts, answer: str) -> int:
    token_ids = text.tokenizer.encode(answer, add_special_tokens=False)
    if len(token_ids) != 1 or text.tokenizer.token_bytes(token_ids[0], is_first=True) != answer.encode():
        raise UnsupportedModel(config.model, f"it cannot score by yes or no: {answer!r} is not a single token")
    return token_ids[0]


class AnswerScorer:
    """Scores by the logits of "yes" and "no" after the prompt."""

    def __init__(
        self, model: GenerativeModel, embedder: EngineEmbedder, reranker: Reranker, head: NDArray[np.float32]
    ) -> None:
        """head: (1 or 2, hidden_size + 1), the language-model head for yes and then no; the last column is the bias."""
        self.name = model.name
        self._model = model
        self._embedder = embedder
        self._reranker = reranker
        self._direction = head[0] if reranker.no is None else head[0] - head[1]

    async def score(self, task: ScoringTask) -> Scores:
        """The probability of "yes", or with `use_activation: false` the difference of the logits.

        Raises: BadRequest, InternalServerError.
        """
        pair_format = self._reranker.format
        max_tokens = task.max_tokens(
            max_model_len=self._embedder.max_model_len,
            num_special_tokens=pair_format.num_special_tokens,
            can_cut=pair_format.can_cut,
        )
        if max_tokens is not None and task.truncation_side == "left":
            raise beginning_is_needed()
        firsts = task.firsts if len(task.firsts) > 1 else [task.firsts[0]] * len(task.seconds)
        pairs = list(zip(firsts, await cut_documents(task, self._embedder), strict=True))
        control_tokens = self._model.text.control_tokens

        def encode() -> list[tuple[int, ...]]:
            if control_tokens is not None:
                control_tokens.check_texts(dict(zip(task.names, (task.firsts, task.seconds), strict=True)))
            return [pair_format.encode(*pair, max_tokens) for pair in pairs]

        rows = await self._model.off_loop(encode)
        sequences = salted([TokenSequence(token_ids=row) for row in rows], task.cache_salt)
        check_sequences(
            sequences,
            max_model_len=self._embedder.max_model_len,
            vocab_size=self._embedder.vocab_size,
            param=task.names[1],
        )
        with engine_errors_answered():
            hidden = await self._embedder.hidden_states(sequences, priority=task.priority)
        return checked_scores(self._scores(hidden, task.use_activation), sequences)

    def _scores(self, hidden: NDArray[np.float32], use_activation: bool | None) -> NDArray[np.float32]:
        logits = hidden @ self._direction[:-1] + self._direction[-1]
        if use_activation is False or (use_activation is None and not self._reranker.is_activated):
            return np.asarray(logits, dtype=np.float32)
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)


def answer_tokens(reranker: Reranker) -> Sequence[int]:
    """The tokens whose logits are compared, yes before no."""
    return [reranker.yes] if reranker.no is None else [reranker.yes, reranker.no]
