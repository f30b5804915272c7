"""The request fields that say what an answer's text must be, in every spelling that clients use.

`response_format` is OpenAI's; `structured_outputs` and, before it, `guided_*` are vLLM's. Schemas, expressions and
grammars are not checked here; `endpoints/constraints.py` refuses what cannot be enforced.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from batchline.openai_api.common import WireModel
from batchline.openai_api.structural_tags import JsonSchema, NonEmptyText, StructuralTag

Choices = Annotated[list[str], Field(min_length=1)]


class NamedSchema(WireModel):
    """OpenAI's envelope of a schema. strict: here every schema is enforced."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonSchema = Field(alias="schema")


class TextFormat(WireModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(WireModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(StructuralTag):
    """Structural tags, their fields standing beside the type."""

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(WireModel):
    """vLLM's field: one of the constraints, and how JSON is spaced.

    structural_tag: an object, or its JSON text. disable_fallback: vLLM's way to rule out another grammar engine.
    disable_additional_properties: refused if true.
    """

    model_config = ConfigDict(extra="forbid")

    json_: JsonSchema | str | None = Field(None, alias="json")
    regex: NonEmptyText | None = None
    choice: Choices | None = None
    grammar: NonEmptyText | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: bool = False


class ConstrainedBody(WireModel):
    """The fields, as part of a request's body. regex, json_schema and ebnf are SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: NonEmptyText | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmptyText | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: NonEmptyText | None = None
    json_schema: JsonSchema | str | None = None
    ebnf: NonEmptyText | None = None
