"""Prompts as token ids that fit the model's context, and how many tokens may follow them."""

from __future__ import annotations

from dataclasses import dataclass

from batchline.endpoints.model import GenerativeModel
from batchline.errors import BadRequest, PromptTooLong
from batchline.openai_api.common import Prompt, TruncationSide
from batchline.openai_api.generation import GenerationBody
from batchline.openai_api.limits import check_text
from batchline.text.control_tokens import RenderedChat

FAR_TOO_LONG = 4
"""Times the context length from which a prompt's tokens are no longer counted exactly before it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt ready for the engine.

    text: as it was given; None for token ids and for a truncated prompt. max_tokens: of the answer; has_default_length:
    whether the request left it open.
    kept_special_ids: special tokens that the answer's text shows, since something reads them there.
    """

    token_ids: tuple[int, ...]
    text: str | None
    max_tokens: int
    has_default_length: bool = False
    kept_special_ids: frozenset[int] = frozenset()


def encode_prompt(
    prompt: Prompt | RenderedChat,
    body: GenerationBody,
    model: GenerativeModel,
    *,
    add_special_tokens: bool,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
) -> EncodedPrompt:
    """Tokenize, truncate as asked, and check the length.

    max_tokens: as the request says. Where it says nothing the default counts as far as the context leaves room for it;
    without one the answer may have all that is left.

    Raises: BadRequest, with OpenAI's words for a prompt that is too long.
    """
    rendered = RenderedChat(prompt) if isinstance(prompt, str) else prompt
    text = rendered.text if isinstance(rendered, RenderedChat) else None
    if isinstance(rendered, RenderedChat):
        check_text("prompt", rendered.text, model.config.limits)
        if body.truncate_prompt_tokens is None:
            _refuse_far_too_long(rendered.text, model)
        token_ids = rendered.token_ids(model.tokenizer, add_special_tokens=add_special_tokens)
        if model.tokenizer.vocab_size > model.engine.vocab_size:
            check_known(token_ids, model, "prompt")
    else:
        token_ids = check_vocabulary(rendered, model.engine.vocab_size, "prompt")
    limit = model.engine.max_model_len
    reserved = num_reserved(max_tokens, default_max_tokens, limit)
    kept = truncate(token_ids, body.truncate_prompt_tokens, limit, reserved, body.truncation_side)
    return EncodedPrompt(
        token_ids=kept,
        text=text if len(kept) == len(token_ids) else None,
        max_tokens=resolve_max_tokens(len(kept), max_tokens, default_max_tokens, limit),
        has_default_length=max_tokens is None,
    )


def check_vocabulary(token_ids: tuple[int, ...], vocab_size: int, field: str) -> tuple[int, ...]:
    """The same token ids, all of them below `vocab_size`. Raises: BadRequest naming the field."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"{field}: token id {token_id} is out of the vocabulary of {vocab_size} tokens", param=field
            )
    return token_ids


def check_known(token_ids: tuple[int, ...], model: GenerativeModel, field: str) -> None:
    """Raises: BadRequest for a token of the tokenizer that the model has no embedding for."""
    for token_id in token_ids:
        if token_id >= model.engine.vocab_size:
            token = model.tokenizer.added_token(token_id)
            raise BadRequest(
                f"{field}: the token {token_id if token is None else repr(token)} is known to the tokenizer of "
                f"{model.name}, but not to the model, which has embeddings for {model.engine.vocab_size} tokens",
                param=field,
            )


def _refuse_far_too_long(text: str, model: GenerativeModel) -> None:
    """Refuse what cannot fit however it is tokenized: tokenizing megabytes would hold up everybody's text work."""
    num_tokens, limit = model.tokenizer.num_tokens_at_least(text), model.engine.max_model_len
    if num_tokens > FAR_TOO_LONG * limit:
        raise _too_long(limit, f"at least {num_tokens}")


def _too_long(limit: int, num_tokens: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {limit} tokens, but the prompt has {num_tokens} tokens. "
        "Shorten the prompt or set truncate_prompt_tokens."
    )


def truncate(
    token_ids: tuple[int, ...], keep: int | None, limit: int, num_reserved: int, side: TruncationSide = "left"
) -> tuple[int, ...]:
    """So many tokens as `keep` says; -1 keeps as many as fit the context beside the tokens reserved for the answer.

    limit: the context length. side: where tokens are taken away. Raises: BadRequest.
    """
    if keep is None:
        return token_ids
    if keep > limit:
        raise BadRequest(
            f"truncate_prompt_tokens: {keep} is more than this model's maximum context length of {limit} tokens",
            param="truncate_prompt_tokens",
        )
    num_kept = keep if keep > 0 else max(1, limit - num_reserved)
    return token_ids[-num_kept:] if side == "left" else token_ids[:num_kept]


def num_reserved(max_tokens: int | None, default: int | None, limit: int) -> int:
    """Tokens that truncation leaves for the answer. A default may ask for more than the context: it gets half of it."""
    if max_tokens is not None:
        return max_tokens
    return 1 if default is None else min(default, limit // 2)


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, default: int | None, limit: int) -> int:
    """How many tokens may follow a prompt. limit: the context length. Raises: BadRequest where it does not fit."""
    if num_prompt_tokens == 0:
        raise BadRequest("The prompt is empty: it has no tokens", param="prompt")
    num_needed = 1 if max_tokens is None else min(1, max_tokens)
    if num_prompt_tokens + num_needed > limit:
        raise _too_long(limit, str(num_prompt_tokens))
    if max_tokens is None:
        num_left = limit - num_prompt_tokens
        return num_left if default is None else min(num_left, default)
    if num_prompt_tokens + max_tokens > limit:
        raise PromptTooLong(
            f"This model's maximum context length is {limit} tokens, but the prompt has {num_prompt_tokens} tokens "
            f"and max_tokens is {max_tokens}. Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    return max_tokens
