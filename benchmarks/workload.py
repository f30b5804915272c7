"""Workloads of the benchmarks: a random model of a given shape, its own tokenizer and chat template, a batch file.

Everything is made from seeds, so a workload is the same on every machine and needs no download. The tokenizer knows
32,000 made-up words, one token each: a text of n words is n tokens, which makes lengths exact.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL_NAME = "benchmark"
"""What the requests call the model."""

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <|{{ message['role'] }}|> {{ message['content'] }} <|end|>"
    "{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"
)

LLAMA_135M: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

QWEN3_500M: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


GREEDY: Mapping[str, Any] = {"temperature": 0}

MIXED_SAMPLING: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0, "logprobs": True, "top_logprobs": 5},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 11, "logprobs": True, "top_logprobs": 20},
    {"temperature": 1.0, "logit_bias": {"100": 2.0, "101": -100, "2000": 5.0, "30000": -1.5}},
)
"""Every kind of sampling, dealt out to the requests in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """Lengths in tokens. Totals, where given, are met exactly by spreading the difference over the requests.

    num_system_prompts: each request has one of so many, in shuffled order. identical: all requests are the same one.
    """

    num_requests: int = 256
    num_system_tokens: int = 204
    num_system_prompts: int = 1
    user_tokens: tuple[int, int] = (20, 400)
    output_tokens: tuple[int, int] = (16, 128)
    total_user_tokens: int | None = None
    total_output_tokens: int | None = None
    identical: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named model shape with a batch file's shape. dtype is the one the weights are stored in.

    sampling: dealt out to the requests in turn. texts: what the made-up texts are seeded with, so that two workloads
    with the same have the same prompts; None is the name.
    """

    name: str
    model: Mapping[str, Any]
    chat: ChatShape = field(default_factory=ChatShape)
    dtype: str = "bfloat16"
    sampling: tuple[Mapping[str, Any], ...] = (GREEDY,)
    texts: str | None = None


CHAT = Workload(
    name="chat",
    model=LLAMA_135M,
    chat=ChatShape(total_user_tokens=55_663, total_output_tokens=17_927),
)
"""109,423 prompt tokens, of which 208 a request are shared (system prompt and template), 17,927 output tokens."""

IDENTICAL = ChatShape(user_tokens=(300, 300), output_tokens=(64, 64), identical=True)

WORKLOADS: Mapping[str, Workload] = {
    "chat": CHAT,
    "no_shared_prefix": Workload(name="no_shared_prefix", model=LLAMA_135M, chat=ChatShape(num_system_tokens=0)),
    "long_prompts": Workload(
        name="long_prompts",
        model=LLAMA_135M,
        chat=ChatShape(num_requests=64, num_system_tokens=0, user_tokens=(2000, 2000), output_tokens=(8, 24)),
    ),
    "long_answers": Workload(
        name="long_answers",
        model=LLAMA_135M,
        chat=ChatShape(num_requests=64, num_system_tokens=0, user_tokens=(16, 48), output_tokens=(512, 512)),
    ),
    "shared_prefixes": Workload(
        name="shared_prefixes",
        model=LLAMA_135M,
        chat=ChatShape(
            num_requests=200,
            num_system_tokens=1600,
            num_system_prompts=20,
            user_tokens=(16, 48),
            output_tokens=(8, 24),
        ),
    ),
    "identical": Workload(name="identical", model=LLAMA_135M, chat=IDENTICAL),
    "identical_sampled": Workload(
        name="identical_sampled", model=LLAMA_135M, chat=IDENTICAL, sampling=({"temperature": 1.0},)
    ),
    "mixed_sampling": Workload(
        name="mixed_sampling",
        model=LLAMA_135M,
        chat=ChatShape(num_requests=128),
        sampling=MIXED_SAMPLING,
        texts="sampling",
    ),
    "mixed_sampling_greedy": Workload(
        name="mixed_sampling_greedy", model=LLAMA_135M, chat=ChatShape(num_requests=128), texts="sampling"
    ),
    "qwen3_500m": Workload(name="qwen3_500m", model=QWEN3_500M, chat=ChatShape(num_requests=64)),
}


@dataclass(frozen=True, slots=True)
class WorkloadFiles:
    """Where a workload lies on disk, and what it holds."""

    model: Path
    batch: Path


def make_workload(workload: Workload, folder: Path, num_requests: int | None = None) -> WorkloadFiles:
    """Write model, tokenizer and batch file under `folder`; the model once. num_requests: only the first so many."""
    home = folder / workload.name
    files = WorkloadFiles(home / "model", home / (f"first-{num_requests}.jsonl" if num_requests else "batch.jsonl"))
    if not (files.model / "config.json").exists():
        files.model.mkdir(parents=True, exist_ok=True)
        save_tokenizer(files.model, int(workload.model["vocab_size"]))
        _save_model(files.model, workload)
    files.batch.write_text("".join(json.dumps(line) + "\n" for line in chat_lines(workload)[:num_requests]))
    return files


def chat_lines(workload: Workload) -> list[dict[str, Any]]:
    """The batch lines: a system prompt and a user turn each, and an answer of exact length."""
    rng = random.Random(workload.texts or workload.name)
    shape = workload.chat
    num_words = int(workload.model["vocab_size"]) - len(SPECIAL_TOKENS)
    systems = [_words(rng, shape.num_system_tokens, num_words) for _ in range(shape.num_system_prompts)]
    users = _lengths(rng, shape.user_tokens, shape.num_requests, shape.total_user_tokens)
    outputs = _lengths(rng, shape.output_tokens, shape.num_requests, shape.total_output_tokens)
    texts = [_words(rng, num_user, num_words) for num_user in users]
    dealt = [systems[number % len(systems)] for number in range(shape.num_requests)]
    if len(systems) > 1:
        rng.shuffle(dealt)
    lines = []
    for number, num_output in enumerate(outputs):
        messages = [{"role": "user", "content": texts[0 if shape.identical else number]}]
        if dealt[number]:
            messages.insert(0, {"role": "system", "content": dealt[number]})
        sampling = workload.sampling[number % len(workload.sampling)]
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": num_output, "ignore_eos": True, **sampling}
        line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(line)
    return lines


def _lengths(rng: random.Random, bounds: tuple[int, int], count: int, total: int | None) -> list[int]:
    """`count` numbers within bounds, evenly distributed; with a total, nudged one by one until they add up to it."""
    low, high = bounds
    lengths = [rng.randint(low, high) for _ in range(count)]
    difference = 0 if total is None else total - sum(lengths)
    step = 1 if difference > 0 else -1
    while difference != 0:
        index = rng.randrange(count)
        if low <= lengths[index] + step <= high:
            lengths[index] += step
            difference -= step
    return lengths


def _words(rng: random.Random, count: int, num_words: int) -> str:
    return " ".join(f"w{rng.randrange(num_words)}" for _ in range(count))


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of made-up words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # heavy: only where a workload is made
    from transformers import PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(vocab_size - len(SPECIAL_TOKENS))]
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end, *roles = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end, additional_special_tokens=roles
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_model(folder: Path, workload: Workload) -> None:
    import torch  # heavy: only where a workload is made
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **workload.model}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype))
    model.save_pretrained(folder)
