"""Structural tags: text in which some parts have a given form, in both spellings that clients use.

The older spelling names structures and the triggers that begin them; the newer one is a tree of formats, as defined by
XGrammar. Only the shape is checked here; `endpoints/constraints.py` refuses what cannot be enforced.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from batchline.openai_api.common import WireModel

JsonSchema = dict[str, Any] | bool
NonEmptyText = Annotated[str, Field(min_length=1)]


class Structure(WireModel):
    """Text from `begin` to `end` with JSON of the schema between."""

    begin: NonEmptyText
    schema_: JsonSchema = Field(alias="schema")
    end: str


class FormatNode(WireModel):
    """Base of the formats: unknown fields are refused, because they would have no effect."""

    model_config = ConfigDict(extra="forbid")


class ConstString(FormatNode):
    """One text."""

    type: Literal["const_string"]
    value: NonEmptyText


class SchemaFormat(FormatNode):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(FormatNode):
    """Text that a regular expression matches."""

    type: Literal["regex"]
    pattern: NonEmptyText


class GrammarFormat(FormatNode):
    """Text of a grammar."""

    type: Literal["grammar"]
    grammar: NonEmptyText


class AnyText(FormatNode):
    """Any text; in a tag, up to the tag's end."""

    type: Literal["any_text"]


class Sequence(FormatNode):
    """One format after the other."""

    type: Literal["sequence"]
    elements: Annotated[list[Format], Field(min_length=1)]


class Either(FormatNode):
    """One of the formats."""

    type: Literal["or"]
    elements: Annotated[list[Format], Field(min_length=1)]


class Tag(FormatNode):
    """A format between two texts."""

    type: Literal["tag"] = "tag"
    begin: str
    content: Format
    end: str


class TriggeredTags(FormatNode):
    """Any text in which each trigger begins one of the tags."""

    type: Literal["triggered_tags"]
    triggers: Annotated[list[NonEmptyText], Field(min_length=1)]
    tags: Annotated[list[Tag], Field(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(FormatNode):
    """Tags, with only the separator between them."""

    type: Literal["tags_with_separator"]
    tags: Annotated[list[Tag], Field(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | SchemaFormat
    | RegexFormat
    | GrammarFormat
    | AnyText
    | Sequence
    | Either
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class StructuralTag(WireModel):
    """Either a format, or structures and their triggers: any text in which each trigger begins one of them."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: Annotated[list[Structure], Field(min_length=1)] | None = None
    triggers: Annotated[list[NonEmptyText], Field(min_length=1)] | None = None


for _node in (Sequence, Either, Tag, TriggeredTags, TagsWithSeparator, StructuralTag):
    _node.model_rebuild()
