"""lm-evaluation-harness with its classes for servers: log-likelihoods by completions, generation by either API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from calls import KEY, Servers, main
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

TINY_CHAT = Path(__file__).parents[3] / "examples/models/tiny-chat"
PAIRS = [
    ("The capital of France is", " Paris."),
    ("The capital of France is", " London."),
    ("Hello", " world! How are you?"),
    ("", "Hello! It's nice to meet you."),
    ("Question: What is 2+2?\nAnswer:", " 2 + 2 = 4"),
]
PROMPTS = ["The capital of France is", "The capital of Italy is"]


class Noting(LocalCompletionsAPI):
    """Notes the token ids that it asks for: what comes first, and what is scored behind it."""

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
        self.noted = [[context, continuation] for _, context, continuation in requests]
        return super()._loglikelihood_tokens(requests, **options)


def completions(servers: Servers, backend: str = "huggingface", **options: Any) -> Any:
    to_tiny = {"model": "tiny", "base_url": f"{servers.tiny}/completions", "max_retries": 1, "auth_token": KEY}
    return Noting(**to_tiny, tokenizer_backend=backend, tokenizer=str(TINY_CHAT), **options)


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def scored(servers: Servers) -> Any:
    """One request at a time, several prompts in a request, several requests at once, and tokenized by the server."""
    ways = {
        "single": completions(servers, add_bos_token=True),
        "batched": completions(servers, add_bos_token=True, batch_size=3),
        "concurrent": completions(servers, add_bos_token=True, num_concurrent=4),
        "remote": completions(servers, "remote"),
    }
    outcomes = {}
    for name, model in ways.items():
        scores = model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
        outcomes[name] = [model.noted, scores]
    return outcomes


def rolling(servers: Servers) -> Any:
    """A text in windows of 32 tokens."""
    model = completions(servers, add_bos_token=True, max_length=32)
    text = " ".join(continuation for _, continuation in PAIRS) * 3
    (total,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    return [model.noted, total]


def generated(servers: Servers) -> Any:
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [(prompt, options) for prompt in PROMPTS]
    return completions(servers, batch_size=2).generate_until(instances("generate_until", asked), disable_tqdm=True)


def chatted(servers: Servers) -> Any:
    model = LocalChatCompletion(model="tiny", base_url=f"{servers.tiny}/chat/completions", max_retries=1)
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    prompt = model.apply_chat_template([*messages, {"role": "user", "content": "Hello world!"}])
    options = {"until": [], "max_gen_toks": 40, "do_sample": False}
    return model.generate_until(instances("generate_until", [(prompt, options)]), disable_tqdm=True)


if __name__ == "__main__":
    os.environ["OPENAI_API_KEY"] = KEY
    main(scored, rolling, generated, chatted)
