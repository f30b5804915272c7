"""A request's constraint on its output's text, as given: not yet a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One constraint. Hashable: equal constraints share a compiled grammar.

    field: the request's field that it comes from, for error messages. source: JSON text of a schema, of a list of
    choices, of structural tags, or of an object of tools' parameter schemas by name; else a regular expression or a
    grammar. whitespace_pattern: regular expression of the white space between JSON tokens, None for a bounded amount of
    any. is_compact: whether there is no white space at all.
    tool_indices: the index in the field of each tool in the source, if the source does not have all of them.
    is_single: whether only one tool call is allowed.
    """

    kind: ConstraintKind
    field: str
    source: str
    whitespace_pattern: str | None = None
    is_compact: bool = False
    tool_indices: tuple[int, ...] = ()
    is_single: bool = False

    def field_of(self, schema: int) -> str:
        """The path of the constraint's schema with this number; tool calls have one for each function."""
        if self.kind != "tool_calls":
            return self.field
        index = self.tool_indices[schema] if self.tool_indices else schema
        return f"{self.field}[{index}].function.parameters"
