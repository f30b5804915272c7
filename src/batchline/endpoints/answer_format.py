"""How the answer to one chat request is constrained and parsed: reasoning, content, tool calls.

The format is decided before the model runs, from the request, the model's parsers and the end of the prompt. It says
what the text must match (a constraint, if the request has one or demands a call), and how the text is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchline.endpoints.constraints import requested_constraint
from batchline.endpoints.model import GenerativeModel
from batchline.errors import BadRequest
from batchline.openai_api.chat import ChatCompletionRequest
from batchline.openai_api.tools import AllowedToolsChoice, NamedToolChoice, Tool
from batchline.text.grammars import Constraint, Preamble, Surroundings
from batchline.text.reasoning import ReasoningParser
from batchline.text.tokenizer import special_token_ids
from batchline.text.tool_parsers import ToolCallParser, ToolDefinition
from batchline.text.tool_parsers.enforced import ArgumentsParser, CallListParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """constraint: what the text must match, with its surroundings; not compiled yet.

    kept_special_ids: special tokens that are markers for the parsers.
    reasoning, tools: parsers; None if there is nothing to parse. make_call_id: makes the id of a call without one.
    shows_reasoning: whether the message has it. call_reason: the finish_reason of an answer with calls; `stop` if the
    request itself chose the call. is_single_call: whether the message ends before a second call.
    """

    constraint: Constraint | None
    surroundings: Surroundings
    kept_special_ids: frozenset[int]
    reasoning: ReasoningParser | None
    tools: ToolCallParser | None
    shows_reasoning: bool
    call_reason: str
    is_single_call: bool
    make_call_id: Callable[[], str]


def answer_format(request: ChatCompletionRequest, model: GenerativeModel, prompt: str) -> AnswerFormat:
    """The format of the answer to a rendered prompt. Raises: BadRequest."""
    reasoning = _reasoning(request, model, prompt)
    tools = _tool_parser(request, model)
    constraint = _constraint(request)
    escapes: tuple[str, ...] = ()
    if constraint is not None and request.tool_mode == "auto" and tools is not None:
        escapes = _escapes(tools, constraint)
    parsers = [parser for parser in (reasoning, tools) if parser is not None]
    markup = [text for parser in parsers for text in parser.special_tokens]
    return AnswerFormat(
        constraint=constraint,
        surroundings=Surroundings(_preamble(reasoning), escapes),
        kept_special_ids=frozenset(i for text in markup for i in special_token_ids(model.tokenizer, text)),
        reasoning=reasoning,
        tools=tools,
        shows_reasoning=request.include_reasoning,
        call_reason=_call_reason(request),
        is_single_call=not request.parallel_tool_calls,
        make_call_id=(model.text.tool_parser or ToolCallParser).make_call_id,
    )


def _call_reason(request: ChatCompletionRequest) -> str:
    if request.tool_mode == "named":
        return "stop"
    return "tool_calls" if request.functions is None else "function_call"


def _reasoning(request: ChatCompletionRequest, model: GenerativeModel, prompt: str) -> ReasoningParser | None:
    """The parser for the text after the prompt; None for a continued message, whose reasoning has ended."""
    parser = model.text.reasoning_parser
    return None if parser is None or request.continue_final_message else parser(prompt)


def _preamble(reasoning: ReasoningParser | None) -> Preamble | None:
    if reasoning is None or reasoning.is_over:
        return None
    return Preamble(reasoning.starts, reasoning.ends, reasoning.is_open)


def _tool_parser(request: ChatCompletionRequest, model: GenerativeModel) -> ToolCallParser | None:
    """Raises: BadRequest if the model's format of calls is needed but not known."""
    if request.tool_mode == "none":
        return None
    if isinstance(request.tool_choice, NamedToolChoice):
        return ArgumentsParser(request.tool_choice.function.name)
    if request.tool_mode == "required":
        return CallListParser()
    parser = model.text.tool_parser
    if parser is None:
        raise BadRequest(
            "tool_choice: it cannot be auto, because this model's format of tool calls is not known; name the format "
            "with --tool-call-parser, or set tool_choice to required, none or a function",
            param="tool_choice",
        )
    tools = [tool.function for tool in request.callable_tools.values()]
    return parser(
        [ToolDefinition(function.name, function.parameters or {}) for function in tools],
        eager=True,
        only_these=isinstance(request.tool_choice, AllowedToolsChoice),
    )


def _constraint(request: ChatCompletionRequest) -> Constraint | None:
    """The request's constraint, or that of the calls that it demands.

    A response_format applies to the content, and an answer that must be a call has no content.
    """
    wanted = requested_constraint(request)
    if request.tool_mode not in ("required", "named"):
        return wanted
    if wanted is not None and not wanted.field.startswith("response_format"):
        raise BadRequest(f"{wanted.field}: the answer must be a call of a tool", param=wanted.field)
    if request.use_beam_search:
        raise BadRequest("tool_choice: a demanded call cannot be combined with use_beam_search", param="tool_choice")
    choice, tools = request.tool_choice, request.callable_tools
    if isinstance(choice, NamedToolChoice):
        index, tool = next((i, t) for i, t in tools.items() if t.function.name == choice.function.name)
        schema = json.dumps(_parameters(tool, index))
        return Constraint(kind="json_schema", field=f"tools[{index}].function.parameters", source=schema)
    tool_indices = tuple(tools) if len(tools) < len(request.tool_list) else ()
    schemas = {tool.function.name: _parameters(tool, index) for index, tool in tools.items()}
    is_single = not request.parallel_tool_calls
    return Constraint(
        kind="tool_calls",
        field="tools",
        source=json.dumps(schemas),
        tool_indices=tool_indices,
        is_single=is_single,
    )


def _parameters(tool: Tool, index: int) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object. Raises: BadRequest."""
    schema = {"type": "object", **(tool.function.parameters or {})}
    if schema["type"] != "object":
        field = f"tools[{index}].function.parameters"
        raise BadRequest(f'{field}: its type should be "object"', param=field)
    return schema


def _escapes(tools: ToolCallParser, constraint: Constraint) -> tuple[str, ...]:
    """Markers that begin a call instead of the constrained content."""
    if not tools.openings:
        raise BadRequest(
            f"{constraint.field}: this model writes tool calls without a marker, so its content cannot be "
            "constrained while it may call tools; set tool_choice to none or required",
            param=constraint.field,
        )
    return tools.openings
