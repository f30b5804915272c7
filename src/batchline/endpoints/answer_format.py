"""How one chat request's answer is to be written and read: reasoning, content, calls of tools.

The format is settled before the model runs, from the request, the model's parsers and the prompt's end. It says what
the text must be (a constraint, where one is asked for or a call is demanded), and how what comes is taken apart.
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
    """constraint: what the text must be, in its surroundings; not compiled yet.

    kept_special_ids: special tokens that are markup to the parsers.
    reasoning, tools: parsers, None where there is nothing of the kind to read. make_call_id: for a call without an id.
    shows_reasoning: whether the message tells it. call_reason: the finish_reason of an answer with calls; `stop` where
    the request itself chose the call. is_single_call: a second call ends the message before it begins.
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
    """The parser for what follows the prompt. A message that is continued is past its reasoning."""
    parser = model.text.reasoning_parser
    return None if parser is None or request.continue_final_message else parser(prompt)


def _preamble(reasoning: ReasoningParser | None) -> Preamble | None:
    if reasoning is None or reasoning.is_over:
        return None
    return Preamble(reasoning.starts, reasoning.ends, reasoning.is_open)


def _tool_parser(request: ChatCompletionRequest, model: GenerativeModel) -> ToolCallParser | None:
    """Raises: BadRequest where the model's format of calls is not known but needed."""
    if request.tool_mode == "none":
        return None
    if isinstance(request.tool_choice, NamedToolChoice):
        return ArgumentsParser(request.tool_choice.function.name)
    if request.tool_mode == "required":
        return CallListParser()
    parser = model.text.tool_parser
    if parser is None:
        raise BadRequest(
            "tool_choice: it is not known how this model writes calls of tools, so it cannot be auto; name the format "
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
    """What the request asks for, or what the calls it demands must be.

    A response_format is about the content, of which an answer that must be a call has none.
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
    places = tuple(tools) if len(tools) < len(request.tool_list) else ()
    schemas = {tool.function.name: _parameters(tool, index) for index, tool in tools.items()}
    is_single = not request.parallel_tool_calls
    return Constraint(kind="tool_calls", field="tools", source=json.dumps(schemas), places=places, is_single=is_single)


def _parameters(tool: Tool, index: int) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object. Raises: BadRequest."""
    schema = {"type": "object", **(tool.function.parameters or {})}
    if schema["type"] != "object":
        field = f"tools[{index}].function.parameters"
        raise BadRequest(f'{field}: its type should be "object"', param=field)
    return schema


def _escapes(tools: ToolCallParser, constraint: Constraint) -> tuple[str, ...]:
    """Markers by which the model calls a tool instead of giving the content that the constraint is about."""
    if not tools.openings:
        raise BadRequest(
            f"{constraint.field}: this model writes calls of tools without a marker, so its content cannot be "
            "constrained while it may call; set tool_choice to none or required",
            param=constraint.field,
        )
    return tools.openings
