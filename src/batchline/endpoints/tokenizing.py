"""`/tokenize` and `/detokenize`: text or a conversation to token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from batchline.endpoints.chat import render_chat
from batchline.endpoints.model import GenerativeModel
from batchline.endpoints.prompts import check_vocabulary
from batchline.openai_api.chat import ChatCompletionRequest
from batchline.openai_api.parsing import parse_body
from batchline.openai_api.tokenize import CONVERSATION_FIELDS, DetokenizeRequest, TokenizeRequest, tokenize_object
from batchline.text.detokenizer import detokenize


async def tokenized(body: Mapping[str, Any], model: GenerativeModel) -> dict[str, Any]:
    """The answer to a tokenize request. Raises: BadRequest."""
    request = parse_body(TokenizeRequest, body, strict=model.config.strict)
    request.check()
    token_ids = await model.off_loop(partial(_encode, request, model))
    token_strs = None
    if request.return_token_strs:
        token_strs = [model.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
    return tokenize_object(tokens=token_ids, max_model_len=model.engine.max_model_len, token_strs=token_strs)


async def detokenized(body: Mapping[str, Any], model: GenerativeModel) -> dict[str, Any]:
    """The answer to a detokenize request: special tokens are shown. Raises: BadRequest."""
    request = parse_body(DetokenizeRequest, body, strict=model.config.strict)
    tokens = check_vocabulary(tuple(request.tokens), model.engine.vocab_size, "tokens")
    text = await model.off_loop(partial(detokenize, model.tokenizer, tokens, skip_special_tokens=False))
    return {"prompt": text}


def _encode(request: TokenizeRequest, model: GenerativeModel) -> tuple[int, ...]:
    """Render where it is a conversation, and tokenize; runs off the event loop."""
    if request.prompt is not None:
        add_special_tokens = request.add_special_tokens is not False
        return model.tokenizer.encode(request.prompt, add_special_tokens=add_special_tokens)
    given = {name: getattr(request, name) for name in CONVERSATION_FIELDS}
    chat = parse_body(ChatCompletionRequest, given | {"tool_choice": "none"}, strict=True)
    chat.check()
    return model.tokenizer.encode(render_chat(chat, model), add_special_tokens=bool(request.add_special_tokens))
