"""The request fields that constrain an answer's text, in every spelling that clients use.

`response_format` is OpenAI's; `structured_outputs` and, before it, `guided_*` are vLLM's. Schemas, expressions and
grammars are not checked here; `endpoints/constraints.py` refuses what cannot be enforced.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from batchline.openai_api.common import WireModel
from batchline.openai_api.structural_tags import JsonSchema, NonEmptyText, StructuralTag

Choices = Annotated[list[str], Field(min_length=1)]
SchemaOrText = JsonSchema | str


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
    """Any JSON object, or JSON of a schema. schema: Together's, Fireworks' and llama.cpp's name; value: TGI's name."""

    type: Literal["json_object"]
    schema_: SchemaOrText | None = Field(None, alias="schema")
    value: SchemaOrText | None = None


class JsonSchemaFormat(WireModel):
    """JSON of a schema, in OpenAI's envelope or without one, as on other servers."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: SchemaOrText | None = Field(None, alias="schema")
    json_schema: NamedSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _has_schema(cls, value: NamedSchema | None, info: ValidationInfo) -> NamedSchema | None:
        if value is None and info.data.get("schema_", "invalid") is None:
            raise PydanticCustomError("missing", "Field required")
        return value


class JsonValueFormat(WireModel):
    """TGI's form for JSON of a schema."""

    type: Literal["json"]
    value: SchemaOrText


class RegexValueFormat(WireModel):
    """TGI's form for a regular expression."""

    type: Literal["regex"]
    value: NonEmptyText


class StructuralTagFormat(StructuralTag):
    """Structural tags, with their fields beside the type."""

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | JsonValueFormat | RegexValueFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(WireModel):
    """vLLM's field: one of the constraints, and options for white space in JSON.

    structural_tag: an object, or its JSON text. disable_fallback: vLLM's way to rule out another grammar engine.
    disable_additional_properties: refused if true.
    """

    model_config = ConfigDict(extra="forbid")

    json_: SchemaOrText | None = Field(None, alias="json")
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
    """The fields, as part of a request's body. regex, json_schema and ebnf are SGLang's names.

    grammar: llama.cpp's name; its clients send an empty text for no grammar.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: NonEmptyText | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmptyText | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: NonEmptyText | None = None
    json_schema: SchemaOrText | None = None
    ebnf: NonEmptyText | None = None
    grammar: str | None = None
