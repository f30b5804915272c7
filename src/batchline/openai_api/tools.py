"""The tools of a chat request: which may be called, which must be called, and the calls in answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from batchline.openai_api.common import WireModel

JsonObject = dict[str, Any]


class FunctionDefinition(WireModel):
    """A function that the model may call. parameters: JSON Schema of its arguments object; None is any object.

    strict: whether a hosted service enforces the schema; here it is enforced whenever a call is.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(WireModel):
    """One tool."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(WireModel):
    """A function by name."""

    name: str


class NamedToolChoice(WireModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(WireModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1)]

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        return frozenset(tool.function.name for tool in self.tools)


class AllowedToolsChoice(WireModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _tool_choice(value: Any) -> str | NamedToolChoice | AllowedToolsChoice:
    if value in ("none", "auto", "required"):
        return str(value)
    if value == "any":  # Mistral's name
        return "required"
    is_allowed = isinstance(value, dict) and value.get("type") == "allowed_tools"
    try:
        return (AllowedToolsChoice if is_allowed else NamedToolChoice).model_validate(value)
    except ValidationError as exc:
        raise PydanticCustomError(
            "tool_choice",
            'Input should be "none", "auto", "required" or {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
        ) from exc


ToolChoice = Annotated[str | NamedToolChoice | AllowedToolsChoice, PlainValidator(_tool_choice)]
"""How tools are used: freely, not at all, at least once, one named function, or only some of them."""


def _function_call(value: Any) -> str | ChosenFunction:
    if value in ("none", "auto"):
        return str(value)
    try:
        return ChosenFunction.model_validate(value)
    except ValidationError as exc:
        raise PydanticCustomError("function_call", 'Input should be "none", "auto" or {"name": ...}') from exc


FunctionCall = Annotated[str | ChosenFunction, PlainValidator(_function_call)]
"""The older form of a choice."""


def tool_call_object(*, call_id: str, name: str, arguments: str) -> JsonObject:
    """A call in a whole answer. arguments: JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_call_delta(*, index: int, call_id: str | None, name: str | None, arguments: str) -> JsonObject:
    """The part of a chunk for the call at `index`. The first one has the id and the name."""
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, **tool_call_object(call_id=call_id or "", name=name, arguments=arguments)}
