"""Counting the tokens of a batch file's prompts with a model's tokenizer and chat template, without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchline.batch.request_traits import output_limit, prompt_content
from batchline.errors import RequestError
from batchline.openai_api.endpoint_table import generates
from batchline.text.chat_template import ChatPrompt, compile_template, own_template
from batchline.text.control_tokens import ControlTokens
from batchline.text.messages import message_text
from batchline.text.tokenizer import load_tokenizer


@dataclass(slots=True)
class TokenCounts:
    """Sums over the good lines. output_limit: the most that requests with a limit may produce.

    unlimited: generating requests without a limit. uncounted: requests whose prompt the template or tokenizer refuses.
    with_control_tokens: requests whose messages hold control tokens; control_token_example: where the first one does.
    """

    prompt: int = 0
    longest_prompt: int = 0
    output_limit: int = 0
    unlimited: int = 0
    uncounted: int = 0
    with_control_tokens: int = 0
    control_token_example: str | None = None


class TokenCounter:
    """A `check.LineObserver` that adds up tokens. Raises on making: ModelLoadError, UsageError."""

    def __init__(self, tokenizer: str) -> None:
        self.counts = TokenCounts()
        self._tokenizer = load_tokenizer(tokenizer)
        source = own_template(self._tokenizer.chat_templates)
        self._template = compile_template(source, "auto", self._tokenizer.special_tokens) if source else None
        self._control_tokens = ControlTokens(self._tokenizer, [source] if source else [])

    def __call__(self, position: int, url: str, body: dict[str, Any]) -> None:
        """Count one line; a `check.LineObserver`."""
        counts = self.counts
        try:
            num_tokens = self.prompt_tokens(body)
            self._note_control_tokens(position, body)
        except (RequestError, TypeError, AttributeError, KeyError):
            # Bodies are not validated here: whatever cannot be read as a prompt is counted as such.
            counts.uncounted += 1
            return
        counts.prompt += num_tokens
        counts.longest_prompt = max(counts.longest_prompt, num_tokens)
        if generates(url):
            limit = output_limit(url, body)
            counts.output_limit += limit or 0
            counts.unlimited += limit is None

    def _note_control_tokens(self, position: int, body: dict[str, Any]) -> None:
        """Count a request whose messages, tools or documents hold control tokens."""
        if body.get("messages") is None:
            return
        variables = body.get("chat_template_kwargs")
        found = self._control_tokens.find(_chat_prompt(body, variables))
        if found is not None:
            self.counts.with_control_tokens += 1
            if self.counts.control_token_example is None:
                self.counts.control_token_example = f"request {position + 1}: {found.path} holds {found.token!r}"

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        """Tokens of a body's prompt, or of all its prompts. Raises: RequestError, and whatever a wrong type raises."""
        content = prompt_content(body)
        if content is body.get("messages") and content is not None:
            return self._chat_tokens(content, body)
        if isinstance(content, str):
            return self.text_tokens(content)
        return sum(self.text_tokens(item) if isinstance(item, str) else _num_ids(item) for item in content)

    def text_tokens(self, text: str) -> int:
        """Tokens of a plain prompt, the special ones that the tokenizer adds included."""
        return len(self._tokenizer.encode(text, add_special_tokens=True))

    def _chat_tokens(self, messages: Any, body: dict[str, Any]) -> int:
        if self._template is None:
            return sum(self.text_tokens(message_text(message)) for message in messages)
        text = self._template.render(_chat_prompt(body))
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def _chat_prompt(body: dict[str, Any], variables: Any = None) -> ChatPrompt:
    return ChatPrompt(
        messages=body["messages"], tools=body.get("tools"), documents=body.get("documents"), variables=variables
    )


def _num_ids(item: Any) -> int:
    """Tokens of one element of a list of token ids, or of a list of such lists."""
    return 1 if isinstance(item, int) else len(item)
