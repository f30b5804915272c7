"""What tokens cost, from a table that the user provides. No table ships with Batchline, because prices change.

The table is YAML or JSON. Each name of a model, or pattern of names, has prices in dollars per million tokens:

    gpt-4o-mini: {input: 0.15, cached_input: 0.075, output: 0.60}
    "llama-*": {input: 0.10, output: 0.20, max_output_tokens: 8192}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from batchline.batch.request_traits import output_limit, whole_number
from batchline.errors import UsageError
from batchline.openai_api.endpoint_table import generates

MAX_OUTPUT_TOKENS = 131_072
"""The most output tokens of a request without a limit, if the table does not say so for its model."""

OVERHEAD_TOKENS = 1024
"""More prompt tokens than a chat template adds to what the JSON of the body has."""

MEDIUM_TOKENS = 16_384
"""More tokens than an image has whose URL is in the body."""

STORED_TOKENS = 131_072
"""The most tokens of a conversation or file that a body refers to."""

_MEDIA = (b'_url"',)
_STORED = (b'"previous_response_id"', b'"conversation"', b'"file_id"', b'"item_reference"')
_FIELDS = frozenset({"input", "cached_input", "output", "max_output_tokens"})
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice:
    """The prices of a model in dollars per million tokens. max_output_tokens: of a request without a limit."""

    input: float
    output: float = 0.0
    cached_input: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """The dollars of an answer. prompt_tokens: including the cached ones."""
        cached = min(cached_tokens, prompt_tokens)
        cached_price = self.input if self.cached_input is None else self.cached_input
        return ((prompt_tokens - cached) * self.input + cached * cached_price + output_tokens * self.output) / _MILLION

    def bound(self, url: str, body: Mapping[str, Any], written: bytes) -> float:
        """More dollars than an answer to the request can cost. written: the body's JSON.

        A token of a prompt takes at least one byte of the JSON, whatever the tokenizer. Templates, media whose URL is
        in the body, and stored conversations add to that. The output has at most its limit, for each of `n` choices.
        """
        prompt_tokens = len(written) + OVERHEAD_TOKENS
        prompt_tokens += MEDIUM_TOKENS * sum(map(written.count, _MEDIA))
        prompt_tokens += STORED_TOKENS * sum(map(written.count, _STORED))
        output_tokens = 0
        if generates(url):
            limit = output_limit(url, dict(body))
            output_tokens = (self.max_output_tokens if limit is None else limit) * _num_choices(body)
        return self.cost(prompt_tokens * _num_choices(body), 0, output_tokens)


def _num_choices(body: Mapping[str, Any]) -> int:
    numbers = [whole_number(body.get(name)) or 1 for name in ("n", "best_of")]
    prompts = body.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return max([1, *numbers]) * num_prompts


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of models by name or pattern. source: the table's file, for messages."""

    by_name: Mapping[str, ModelPrice]
    source: str

    def of(self, model: str) -> ModelPrice | None:
        """The price of a model: of its name, or else of the longest pattern that matches; None if it has none."""
        if model in self.by_name:
            return self.by_name[model]
        matching = [name for name in self.by_name if fnmatchcase(model, name)]
        return self.by_name[max(matching, key=len)] if matching else None

    def refuse_unknown(self, models: list[str]) -> None:
        """Raises: UsageError if a model has no price."""
        unknown = [repr(model[:100]) for model in models if self.of(model) is None]
        if unknown:
            raise UsageError(
                f"{self.source} has no price for {', '.join(unknown[:5])}: add one, or a pattern like '*'."
            )


def read_prices(path: Path) -> Prices:
    """The table in a YAML or JSON file. Raises: UsageError."""
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"Cannot read the prices in {path}: {exc}.") from exc
    except yaml.YAMLError as exc:
        raise UsageError(f"The prices in {path} are not valid YAML or JSON: {' '.join(str(exc).split())}.") from exc
    if not isinstance(table, dict) or not table:
        raise UsageError(f"{path} has no table of prices, such as `gpt-4o-mini: {{input: 0.15, output: 0.60}}`.")
    return Prices({str(name): _price(path, str(name), value) for name, value in table.items()}, str(path))


def _price(path: Path, name: str, value: object) -> ModelPrice:
    """Raises: UsageError."""
    where = f"{path}: the prices of {name!r}"
    if not isinstance(value, dict) or "input" not in value:
        raise UsageError(f"{where} must be a mapping with `input`, and `output` if it generates.")
    if unknown := sorted(str(field) for field in value if field not in _FIELDS):
        raise UsageError(f"{where} have an unknown field {unknown[0]!r}. Known: {', '.join(sorted(_FIELDS))}.")
    for field, number in value.items():
        is_number = type(number) in (int, float) and isfinite(number) and number >= 0
        if not is_number or (field == "max_output_tokens" and (type(number) is not int or number < 1)):
            raise UsageError(f"{where}: {field} must be a number of at least 0, not {number!r}.")
    return ModelPrice(**value)
