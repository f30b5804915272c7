"""Finds the part of a JSON Schema that the grammar engine refuses.

The engine says what is wrong, but not where. So this module tries the subschemas separately, and reports the deepest
one that is refused for the same reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from batchline.text.grammars.grammar import Grammar
from batchline.text.grammars.grammar import refusal as engine_refusal
from batchline.text.grammars.json_schema import OPTIONS, path_below, subschemas
from batchline.text.grammars.patterns import one_line

MAX_TRIES = 200
"""How many subschemas are tried at most."""

_DEFINITIONS = ("$defs", "definitions", "$schema", OPTIONS)

Refusal = Callable[[Mapping[str, Any]], str | None]
"""Why the engine refuses a schema; None if it does not."""


def schema_error(schema: Mapping[str, Any]) -> str | None:
    """What the engine refuses in a schema, and where; None if it accepts the schema."""

    def reason_of(part: Mapping[str, Any]) -> str | None:
        return engine_refusal(Grammar({"json_schema": part}).serialised())

    reason = reason_of(schema)
    if reason is None:
        return None
    advice = "use anyOf, or branches that differ in type or in a constant"
    explained = re.sub(r"[.;]? *Enable 'coerce_one_of'.*", f"; {advice}", one_line(reason))
    return f"at {place_of_error(schema, reason, reason_of)}: {explained}"


def place_of_error(schema: Mapping[str, Any], reason: str, refusal: Refusal) -> str:
    """The path of the deepest subschema that is refused for `reason`."""
    shared = {keyword: schema[keyword] for keyword in _DEFINITIONS if keyword in schema}
    part, path = schema, "the root"
    tries = MAX_TRIES
    while True:
        for keyword, key, below in subschemas(part):
            tries -= 1
            if tries < 0:
                return path
            if isinstance(below, dict) and _alone(below, shared, refusal) == reason:
                part, path = below, path_below(path, keyword, key)
                break
        else:
            return path


def _alone(schema: Mapping[str, Any], shared: Mapping[str, Any], refusal: Refusal) -> str | None:
    """Why a subschema is refused, together with the root's definitions."""
    return refusal({**shared, **schema})
