"""Checks how much one request contains: counts the items of its fields, and compares them with `RequestLimits`.

A schema annotates each of its lists and strings with what to count (`Limited`). The body is counted before it is
validated, because validation takes longer, and finds a fault in each item of a long list of wrong ones. A body may have
any shape here: a value of another type counts as nothing, and validation refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from pydantic import BaseModel

from batchline.config import RequestLimits
from batchline.errors import BadRequest

MAX_FIELDS = 256
"""Limit on the fields of a body: more than twice as many as any endpoint knows."""


def num_items(value: Any) -> int:
    """The number of items of a list or an object."""
    return len(value) if isinstance(value, (list, dict)) else 0


def num_inputs(value: Any) -> int:
    """The number of inputs in a list, or of parts in an object alone, each of which may be an input."""
    return num_items(value.get("content")) if isinstance(value, dict) else num_items(value)


def num_prompts(value: Any) -> int:
    """The number of prompts in a string, strings, token ids (which are one prompt) or lists of them."""
    is_one = not isinstance(value, list) or (bool(value) and type(value[0]) is int)
    return 1 if is_one else len(value)


def longest_text(value: Any) -> int:
    """The characters of a text, or of the longest of several. Texts may also be objects with a `text`, or in parts."""
    return max(map(_num_characters, value if isinstance(value, list) else [value]), default=0)


def _num_characters(value: Any) -> int:
    if isinstance(value, dict):
        parts = value.get("content")
        return sum(map(_num_characters, parts)) if isinstance(parts, list) else _num_characters(value.get("text"))
    return len(value) if isinstance(value, str) else 0


def num_parts(messages: Any) -> int:
    """The number of content parts of all messages."""
    return sum(map(num_items, _members(messages, "content")))


def num_tool_calls(messages: Any) -> int:
    """The number of tool calls in all messages."""
    return sum(map(num_items, _members(messages, "tool_calls")))


def num_allowed_tools(choice: Any) -> int:
    """The number of tools that a `tool_choice` names, in the form of chat completions or of responses."""
    found = choice.get("allowed_tools", choice) if isinstance(choice, dict) else None
    return num_items(found.get("tools")) if isinstance(found, dict) else 0


@dataclass(frozen=True, slots=True)
class Limited:
    """Annotates a field: `count` of it is at most the limit of that name. noun: what is counted, for messages."""

    name: str
    count: Callable[[Any], int] = num_items
    noun: str = "items"


TEXT = Limited("text_length", longest_text, "characters in one string")
"""For a field that has one or several texts."""

MESSAGES: tuple[Limited, ...] = (
    Limited("messages"),
    Limited("message_parts", num_parts, "content parts in all"),
    Limited("message_tool_calls", num_tool_calls, "tool calls in all"),
)
"""For a field that has a conversation."""


TEXT_COUNTS = ("inputs", "documents")
"""The limits for fields whose texts are embedded, scored or ranked."""


def num_texts(schema: type[BaseModel], body: Mapping[str, Any]) -> int:
    """How many texts a body (which may be invalid) asks a model to read, in the field that has the most."""
    counted = (
        rule.count(body.get(field))
        for field, rules in limited_fields(schema).items()
        for rule in rules
        if rule.name in TEXT_COUNTS
    )
    return max(counted, default=0)


def check_limits(schema: type[BaseModel], body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Raises: BadRequest, which names the field of `body` that is too large, its size, and the limit."""
    if len(body) > MAX_FIELDS:
        raise BadRequest(f"The body has {len(body):,} fields, and at most {MAX_FIELDS} are allowed")
    for field, rules in limited_fields(schema).items():
        value = body.get(field)
        for rule in rules if value is not None else ():
            _check(field, rule.count(value), rule.name, rule.noun, limits)
    if "n" in schema.model_fields:
        field = "best_of" if _choices(body, "best_of") > _choices(body, "n") else "n"
        _check(field, num_sequences(body), "sequences", "sequences (prompts times choices)", limits)


def check_text(field: str, text: str, limits: RequestLimits) -> None:
    """Raises: BadRequest for a text that is too long to be tokenized. field: the field that it comes from."""
    _check(field, len(text), TEXT.name, TEXT.noun, limits)


def _check(field: str, count: int, name: str, noun: str, limits: RequestLimits) -> None:
    limit: int = getattr(limits, name)
    if count > limit:
        message = f"{field}: it has {count:,} {noun}, and at most {limit:,} are allowed"
        raise BadRequest(f"{message} (--request-limit {name}=N changes that)", param=field)


@cache
def limited_fields(schema: type[BaseModel]) -> Mapping[str, tuple[Limited, ...]]:
    """The rules of a schema's fields, by the field's name in JSON."""
    found: dict[str, tuple[Limited, ...]] = {}
    for name, field in schema.model_fields.items():
        rules = tuple(chain.from_iterable(_rules(annotation) for annotation in field.metadata))
        if rules:
            found[field.alias or name] = rules
    return found


def _rules(annotation: Any) -> tuple[Limited, ...]:
    """The rules in one annotation of a field."""
    if isinstance(annotation, Limited):
        return (annotation,)
    return annotation if annotation is MESSAGES else ()


def num_sequences(body: Mapping[str, Any]) -> int:
    """How many sequences a body (which may be invalid) asks the engine for: prompts times choices, at least one."""
    return max(1, num_prompts(body.get("prompt"))) * max(_choices(body, "n"), _choices(body, "best_of"))


def _choices(body: Mapping[str, Any], field: str) -> int:
    value = body.get(field)
    if isinstance(value, (int, float)) and math.isfinite(value):  # 4.0 is an integer here
        return max(1, int(value))
    return 1


def _members(messages: Any, key: str) -> Iterator[Any]:
    found = messages if isinstance(messages, list) else ()
    return (message.get(key) for message in found if isinstance(message, dict))


_SMALL = 4096
"""Values and hundreds of characters of a body that is checked faster than a thread wakes up."""


def is_small(value: Any) -> bool:
    """Whether a JSON value has at most so many values and hundreds of characters. Reads no more of it than that."""
    waiting, budget = [value], _SMALL
    while waiting and budget > 0:
        value = waiting.pop()
        budget -= 1
        if isinstance(value, str):
            budget -= len(value) // 100
        elif isinstance(value, (list, tuple, dict)):
            if len(value) > budget:
                return False
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return budget > 0
