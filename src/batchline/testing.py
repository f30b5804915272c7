"""Fakes for tests of code that uses Batchline: real parts with the model left out.

`FakeBackend` answers at once, without a model, and always in the same way. For a failure or a delay, a test passes a
function to it. Nothing in Batchline itself uses this module.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from batchline.backends.base import Answer, BackendStats, EndpointRequest, ServedModel, find_model, unknown_path
from batchline.engine.request import FinishReason, GenerationOutput, GenerationRequest, TokenLogprobs
from batchline.errors import BackendUnavailable, BadRequest, RequestError
from batchline.openai_api.endpoint_table import CHAT, COMPLETIONS, EMBEDDINGS

FAKE_ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)


class FakeBackend:
    """Answers chat and completion requests by echoing their last text, and embedding requests with its length.

    model: the name of its only model. before_answer: awaited with every request before the answer; the request fails
    with any exception that it raises. between_chunks: the same after each chunk of a stream.
    wants_raw_bodies: whether it takes and returns bodies as JSON bytes, as a backend does that forwards them.
    requests: all requests so far, in order.
    """

    def __init__(
        self,
        model: str = "fake",
        *,
        before_answer: Callable[[EndpointRequest], Awaitable[None]] | None = None,
        between_chunks: Callable[[EndpointRequest], Awaitable[None]] | None = None,
        wants_raw_bodies: bool = False,
    ) -> None:
        self.wants_raw_bodies = wants_raw_bodies
        self.requests: list[EndpointRequest] = []
        self.is_dead = False
        self._between_chunks = between_chunks
        self.is_started = False
        self.is_closed = False
        self._model = model
        self._served = ServedModel(name=model, endpoints=FAKE_ENDPOINTS)
        self._before_answer = before_answer
        self._prompt_tokens = 0
        self._output_tokens = 0

    async def start(self) -> None:
        """Open the backend; also works after it was closed."""
        self.is_started = True
        self.is_closed = False

    async def models(self) -> Sequence[ServedModel]:
        """The one model."""
        return (self._served,)

    async def stream(self, request: EndpointRequest) -> AsyncIterator[Mapping[str, Any]]:
        """The echo in chunks of one word. Raises: NotFound, BadRequest, BackendUnavailable."""
        await self._begin(request)
        body = self._body(request)
        if request.url == EMBEDDINGS:
            raise BadRequest(f"stream: {EMBEDDINGS} cannot stream its answers", param="stream")
        for chunk in _chunks(body, is_chat=request.url == CHAT):
            yield chunk
            if self._between_chunks is not None:
                await self._between_chunks(request)

    def identity(self) -> Mapping[str, str]:
        """The name of its model."""
        return {"backend": f"fake, serving {self._model}"}

    def concurrency(self) -> int:
        """As many as the embedded engine with default options."""
        return 512

    def is_alive(self) -> bool:
        """True until it is closed, or until a test sets `is_dead`."""
        return not (self.is_dead or self.is_closed)

    async def check(self, request: EndpointRequest) -> None:
        """Leaves everything to `answer`."""

    async def answer(self, request: EndpointRequest) -> Answer:
        """The echo, or the error of an unknown model or path. Raises: BackendUnavailable once it is closed."""
        await self._begin(request)
        status_code = 200
        try:
            body = self._body(request)
        except RequestError as error:
            status_code, body = error.status_code, error.body()
        written = orjson.dumps(body) if self.wants_raw_bodies else body
        return Answer(status_code=status_code, body=written, request_id=request.request_id)

    def stats(self) -> BackendStats:
        """Words in and words out, counted as tokens."""
        return BackendStats(prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens)

    async def close(self) -> None:
        """Stop."""
        self.is_closed = True

    async def _begin(self, request: EndpointRequest) -> None:
        if self.is_closed:
            raise BackendUnavailable("The fake backend is closed.")
        self.requests.append(request)
        if self._before_answer is not None:
            await self._before_answer(request)

    def _body(self, request: EndpointRequest) -> dict[str, Any]:
        if request.url not in FAKE_ENDPOINTS:
            raise unknown_path(request.url, [self._served])
        model = find_model({self._model: self._served}, request.body.get("model")).name
        text = _last_text(request.body)
        num_tokens = len(text.split())
        self._prompt_tokens += num_tokens
        if request.url == EMBEDDINGS:
            data = [{"index": 0, "object": "embedding", "embedding": [float(len(text))]}]
            return {"object": "list", "data": data, "model": model, "usage": _usage(num_tokens, 0)}
        self._output_tokens += num_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if request.url == COMPLETIONS:
            return self._generated(request, "cmpl", "text_completion", choice | {"text": text}, num_tokens)
        choice["message"] = {"role": "assistant", "content": text}
        return self._generated(request, "chatcmpl", "chat.completion", choice, num_tokens)

    def _generated(
        self, request: EndpointRequest, prefix: str, kind: str, choice: dict[str, Any], num_tokens: int
    ) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{request.request_id}",
            "object": kind,
            "model": self._model,
            "choices": [choice],
            "usage": _usage(num_tokens, num_tokens),
        }


def _last_text(body: Any) -> str:
    messages = body.get("messages")
    content = messages[-1].get("content") if isinstance(messages, list) and messages else None
    return str(content if content is not None else body.get("prompt", body.get("input", "")))


def _chunks(body: dict[str, Any], *, is_chat: bool) -> Iterator[dict[str, Any]]:
    """A whole answer in chunks of one word, the last of which has the finish_reason."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    head = {key: body[key] for key in ("id", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    words = re.findall(r"\S+\s*|^\s+", text)
    for index, word in enumerate([*words, ""]):
        finish_reason = "stop" if index == len(words) else None
        piece = {"delta": {"role": "assistant", "content": word}} if is_chat else {"text": word}
        yield head | {"choices": [{"index": 0, "finish_reason": finish_reason, **piece}]}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ByteTokenizer:
    """A tokenizer whose tokens are bytes: 256 begins a text, 257 ends one, both special. A `Tokenizer`."""

    BOS = 256
    EOS = 257
    vocab_size = 258
    special_tokens: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, chat_templates: str | None = None) -> None:
        self.chat_templates = chat_templates

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The text's bytes, behind a `<s>` if special tokens are wanted. Raises: BadRequest for a lone surrogate."""
        try:
            token_ids = tuple(text.encode())
        except UnicodeEncodeError as exc:
            raise BadRequest("The prompt is not valid Unicode: it holds a lone surrogate") from exc
        return (self.BOS, *token_ids) if add_special_tokens else token_ids

    def num_tokens_at_least(self, text: str) -> int:
        """The number of characters: each byte is a token, and a character has at least one byte."""
        return len(text)

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The byte itself, or the name of a special token."""
        added = self.added_token(token_id)
        if added is not None:
            return added.encode()
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        """Whether it is `<s>` or `</s>`."""
        return token_id in (self.BOS, self.EOS)

    def added_token(self, token_id: int) -> str | None:
        """The name of a special token."""
        return {self.BOS: "<s>", self.EOS: "</s>"}.get(token_id)


class ScriptedEngine:
    """An engine whose outputs a test scripts, to test the code around an engine. A `GenerationEngine`.

    script: the token ids of the output, or a function that returns them for a request. The output ends at end tokens,
    stop tokens and `max_tokens`; nothing is sampled. Each token has log-probability -0.25 (or what `logprob` returns
    for it) and is the most likely one; the next token ids follow at -1, -2 and so on.
    requests: all requests so far. aborted: ids of requests whose outputs were not read to the end. ended: by id, the
    number of output tokens of requests that `end` ended.
    """

    def __init__(
        self,
        script: Sequence[int] | Callable[[GenerationRequest], Sequence[int]],
        *,
        max_model_len: int = 512,
        logprob: Callable[[int], float] = lambda token_id: -0.25,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = ByteTokenizer.vocab_size
        self.eos_token_ids = frozenset({ByteTokenizer.EOS})
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.ended: dict[str, int] = {}
        self._script = script
        self._logprob = logprob

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """The script, token by token if the request streams, else at once."""
        self.requests.append(request)
        self.aborted.append(request.request_id)
        script = self._script(request) if callable(self._script) else self._script
        outputs = self._outputs(request, script)
        for output in outputs if request.stream else [_joined(outputs)]:
            if output.finish_reason is not None:
                self.aborted.remove(request.request_id)
            yield output
            await asyncio.sleep(0)

    def end(self, request_id: str, num_output_tokens: int) -> None:
        """Record the end."""
        self.ended[request_id] = num_output_tokens

    def _outputs(self, request: GenerationRequest, script: Sequence[int]) -> list[GenerationOutput]:
        """One output per token, up to the end."""
        sampling = request.sampling
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            scored = [self._scored(token_id, sampling.prompt_logprobs) for token_id in request.prompt_token_ids[1:]]
            prompt_logprobs = (None, *scored)
        if sampling.max_tokens == 0:
            return [self._output(request, (), "length", prompt_logprobs=prompt_logprobs)]
        outputs: list[GenerationOutput] = []
        for index, token_id in enumerate(script[: sampling.max_tokens]):
            is_eos = token_id in sampling.eos_token_ids
            is_stop = not is_eos and token_id in sampling.stop_token_ids
            is_last = index + 1 == sampling.max_tokens
            finish: FinishReason | None = "stop" if is_eos or is_stop else "length" if is_last else None
            outputs.append(
                self._output(
                    request,
                    (token_id,),
                    finish,
                    prompt_logprobs=prompt_logprobs if index == 0 else None,
                    stop_reason=token_id if is_stop else None,
                )
            )
            if finish is not None:
                break
        return outputs

    def _output(
        self,
        request: GenerationRequest,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        *,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
        stop_reason: int | None = None,
    ) -> GenerationOutput:
        wanted = request.sampling.logprobs
        return GenerationOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=None if wanted is None else tuple(self._scored(token_id, wanted) for token_id in token_ids),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=3,
        )

    def _scored(self, token_id: int, num_top: int) -> TokenLogprobs:
        logprob = self._logprob(token_id)
        others = [((token_id + step) % self.vocab_size, float(-step)) for step in range(1, self.vocab_size)]
        top = [(token_id, logprob), *others]
        return TokenLogprobs(token_id, logprob, 1, tuple(top if num_top == -1 else top[:num_top]))


def _joined(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    last = outputs[-1]
    scored = [entry for output in outputs for entry in output.logprobs or ()]
    return replace(
        last,
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=None if last.logprobs is None else tuple(scored),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
