"""A loaded generative model as endpoints see it: an engine behind an interface, tokenizer, templates, parsers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from batchline.config import TextConfig
from batchline.endpoints.media_input import MediaInput
from batchline.engine.request import GenerationOutput, GenerationRequest
from batchline.text.chat_template import ChatPrompt, ChatTemplate
from batchline.text.control_tokens import ControlTokens, RenderedChat, Renderer
from batchline.text.grammars import GrammarCompiler
from batchline.text.isolation import run_on
from batchline.text.reasoning import ReasoningParser
from batchline.text.tokenizer import Tokenizer
from batchline.text.tool_parsers import ToolCallParser

T = TypeVar("T")


class GenerationEngine(Protocol):
    """Runs sequences of token ids."""

    @property
    def max_model_len(self) -> int:
        """Context length in tokens, prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """How many token ids the model has; every id of a request is below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence unless a request says `ignore_eos`."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Deltas if the request streams, else one whole output. Closing the iterator aborts the sequence."""

    def end(self, request_id: str, num_output_tokens: int) -> None:
        """End a running sequence as finished after this many output tokens. request_id: the id in its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Defaults of a model's `generation_config.json`. They override the built-in defaults, and requests override them.

    None means that the file has no value. `do_sample` is ignored: a request without a temperature samples, as with a
    hosted API.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """The parts that turn requests into tokens and back for one model. chat_template: None if the model has none.

    control_tokens: handles control tokens in messages; None for a tokenizer without any.
    tool_parser, reasoning_parser: for the model's formats of calls and reasoning; None if a format is not known.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None
    defaults: GenerationDefaults
    control_tokens: ControlTokens | None = None
    tool_parser: type[ToolCallParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeModel:
    """One served model. name: the model's name in answers. executor: a few threads for rendering and tokenizing.

    max_request_sequences: how many sequences of one request may be in the engine at once. The others wait here, so that
    they are not ahead of later requests in the engine's queue.
    media: what it takes besides text; None if nothing.
    grammars: compiles constraints for this model's tokens.
    """

    name: str
    engine: GenerationEngine
    text: TextParts
    config: TextConfig
    executor: Executor
    max_request_sequences: int = 128
    media: MediaInput | None = None
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        compiler = GrammarCompiler(self.text.tokenizer, self.engine.vocab_size)
        object.__setattr__(self, "grammars", compiler)  # the way that frozen dataclasses leave open

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text.tokenizer

    def render(self, template: Renderer, prompt: ChatPrompt) -> RenderedChat:
        """The rendered prompt, with control tokens in messages treated as configured. Raises: BadRequest."""
        control_tokens = self.text.control_tokens
        if control_tokens is None:
            return RenderedChat(template.render(prompt))
        return control_tokens.render(template, prompt)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run text work on a thread, so that a long prompt does not block the event loop.

        Cancelling the call drops work that has not begun.
        """
        return await run_on(self.executor, work)


NOT_HONOURED = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty", "top_h"), 0.0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("force_words_ids", "constraints", "dola_layers", "watermarking_config", "max_time")),
}
"""Fields of `generation_config.json` that change the results of `generate` but have no effect here, with the value that
has no effect there either."""


def fields_not_honoured(config: Mapping[str, Any]) -> list[str]:
    """The fields of a generation config that would change answers, but that Batchline does not apply."""
    return [name for name, neutral in NOT_HONOURED.items() if config.get(name) not in (neutral, None, [], {})]


def generation_defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    """The defaults in a generation config's own values."""
    return GenerationDefaults(
        temperature=config.get("temperature"),
        top_p=config.get("top_p"),
        top_k=config.get("top_k"),
        min_p=config.get("min_p"),
        repetition_penalty=config.get("repetition_penalty"),
        max_tokens=config.get("max_new_tokens"),
    )
