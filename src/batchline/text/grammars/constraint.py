"""What a request asks of its output's text, as given: not yet a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One constraint. Hashable: equal constraints share a compiled grammar.

    field: the request's field that it comes from, for messages. source: JSON text of a schema, of a list of choices,
    of structural tags, or of an object of tools' parameter schemas by name; else a regular expression or a grammar.
    whitespace_pattern: regular expression of the white space between JSON tokens, None for a bounded amount of any.
    is_compact: no white space there at all.
    places: where in the field each of the tools stands, where the source has not all of them.
    is_single: one tool call and no more.
    """

    kind: ConstraintKind
    field: str
    source: str
    whitespace_pattern: str | None = None
    is_compact: bool = False
    places: tuple[int, ...] = ()
    is_single: bool = False

    def field_of(self, schema: int) -> str:
        """The field that holds the constraint's schema of that number; a tool call has one for each function."""
        if self.kind != "tool_calls":
            return self.field
        place = self.places[schema] if self.places else schema
        return f"{self.field}[{place}].function.parameters"
