"""Reasoning and calls of tools in chat answers, whole and streamed, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_models import engine_of, scripted_model

from batchline.endpoints.chat import chat_completion
from batchline.endpoints.chat_stream import chat_completion_chunks
from batchline.endpoints.model import GenerativeModel
from batchline.errors import BadRequest, ConstraintFailed
from batchline.text.reasoning import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from batchline.text.tool_parsers import HermesToolParser, MistralToolParser

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("get", "put")
]
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
REQUIRED = '[{"name": "put", "parameters": {"a": "]"}}, {"name": "get", "parameters": {}}]'
Json = dict[str, Any]


def model_saying(text: str, **parts: Any) -> GenerativeModel:
    parts = {"tool_parser": HermesToolParser, "reasoning_parser": Qwen3ReasoningParser, **parts}
    return scripted_model(text, max_model_len=2000, **parts)


async def choice_of(model: GenerativeModel, **body: Any) -> Json:
    answer = await chat_completion({"messages": MESSAGES, **body}, "r", model)
    choice: Json = answer["choices"][0]
    return choice | {"usage": answer["usage"]}


async def streamed(model: GenerativeModel, **body: Any) -> Json:
    """The choice that a client puts together from the chunks."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    request = {"messages": MESSAGES, **options, **body}
    message: Json = {"content": "", "reasoning": "", "tool_calls": []}
    choice: Json = {"message": message}
    async for chunk in chat_completion_chunks(request, "r", model):
        if not chunk["choices"]:
            choice["usage"] = chunk["usage"]
            continue
        (part,) = chunk["choices"]
        delta = part["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        choice["finish_reason"] = part["finish_reason"]
    return choice


def functions(choice: Json) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], call["arguments"]) for call in calls]


async def test_a_call_becomes_a_tool_call_of_the_message() -> None:
    choice = await choice_of(model_saying(f"Let me see.\n{CALL}"), tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "get", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"


async def test_a_message_of_calls_alone_has_no_content() -> None:
    choice = await choice_of(model_saying(CALL + CALL), tools=TOOLS)
    assert choice["message"]["content"] is None
    assert functions(choice) == [("get", '{"a": 1}')] * 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


async def test_ids_have_the_form_that_the_models_template_takes() -> None:
    model = model_saying('[TOOL_CALLS][{"name": "get", "arguments": {}}]', tool_parser=MistralToolParser)
    (call,) = (await choice_of(model, tools=TOOLS))["message"]["tool_calls"]
    assert len(call["id"]) == 9


async def test_text_of_calls_stays_text_where_there_are_no_tools_to_call() -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await choice_of(model_saying(CALL), **body)
        assert choice["message"]["content"] == CALL
        assert choice["message"]["tool_calls"] == []
        assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_stays_text_and_says_length() -> None:
    choice = await choice_of(model_saying(CALL), tools=TOOLS, max_tokens=30)
    assert choice["message"]["content"] == CALL[:30]
    assert choice["finish_reason"] == "length"


async def test_a_call_that_is_cut_within_its_arguments_stays_a_call() -> None:
    """It was shown already where the answer is streamed, and a whole answer says the same."""
    end = CALL.index("1}")
    choice = await choice_of(model_saying(CALL), tools=TOOLS, max_tokens=end)
    assert functions(choice) == [("get", '{"a": ')]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


async def test_a_call_streams_its_name_and_then_its_arguments() -> None:
    request = {"messages": MESSAGES, "tools": TOOLS, "stream": True}
    chunks = [chunk async for chunk in chat_completion_chunks(request, "r", model_saying(CALL))]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (deltas[0]["function"]["name"], deltas[0]["function"]["arguments"]) == ("get", "{")
    assert [set(delta) for delta in deltas[1:]] == [{"index", "function"}] * (len('{"a": 1}') - 1)
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"a": 1}'


ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "put"}}]},
}


async def test_a_call_of_a_tool_that_is_not_allowed_stays_text() -> None:
    choice = await choice_of(model_saying(CALL), tools=TOOLS, tool_choice=ALLOWED)
    assert (choice["message"]["content"], functions(choice)) == (CALL, [])
    choice = await choice_of(model_saying(CALL.replace("get", "put")), tools=TOOLS, tool_choice=ALLOWED)
    assert functions(choice) == [("put", '{"a": 1}')]


async def test_the_template_sees_the_allowed_tools_alone() -> None:
    model = model_saying("x", template="{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}>")
    await choice_of(model, tools=TOOLS, tool_choice=ALLOWED)
    assert bytes(engine_of(model).requests[0].prompt_token_ids) == b"put >"


async def test_a_demanded_call_is_of_an_allowed_tool() -> None:
    required = {"type": "allowed_tools", "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "required"}}
    model = model_saying('[{"name": "put", "parameters": {}}]')
    choice = await choice_of(model, tools=TOOLS, tool_choice=required)
    assert functions(choice) == [("put", "{}")]
    constraint = engine_of(model).requests[0].constraint
    assert constraint is not None
    matcher = constraint.matcher()
    with pytest.raises(ConstraintFailed):
        list(map(matcher.accept, b'[{"name": "get'))


async def test_a_schema_of_an_allowed_tool_that_cannot_be_enforced_is_named_by_its_place() -> None:
    bad = {"type": "function", "function": {"name": "put", "parameters": {"properties": {"a": {"not": {}}}}}}
    required = {"type": "allowed_tools", "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "required"}}
    with pytest.raises(BadRequest, match=r"tools\[1\].function.parameters: at properties.a"):
        await choice_of(model_saying("{}"), tools=[TOOLS[0], bad], tool_choice=required)


async def test_without_a_known_format_the_option_is_named() -> None:
    with pytest.raises(BadRequest, match="--tool-call-parser") as caught:
        await choice_of(model_saying("x", tool_parser=None), tools=TOOLS)
    assert caught.value.param == "tool_choice"


async def test_the_template_sees_the_tools() -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}>"
    model = model_saying("x", template=template)
    await choice_of(model, tools=TOOLS)
    assert bytes(engine_of(model).requests[0].prompt_token_ids) == b"get put >"


async def test_messages_of_a_tools_loop_reach_the_template() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.arguments.a + 1 }};"
        "{% endfor %}{{ m.tool_call_id or '' }}{{ m.content }}|{% endfor %}"
    )
    model = model_saying("x", template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    await choice_of(model, messages=messages, tools=TOOLS)
    assert bytes(engine_of(model).requests[0].prompt_token_ids) == b"Hi|c1=2;|c142|"


async def test_a_named_function_is_called_with_the_text_as_its_arguments() -> None:
    named = {"type": "function", "function": {"name": "put"}}
    choice = await choice_of(model_saying('{"a": [1, 2]}'), tools=TOOLS, tool_choice=named)
    assert functions(choice) == [("put", '{"a": [1, 2]}')]
    assert choice["finish_reason"] == "stop"


async def test_required_calls_are_a_list() -> None:
    choice = await choice_of(model_saying(REQUIRED), tools=TOOLS, tool_choice="required")
    assert functions(choice) == [("put", '{"a": "]"}'), ("get", "{}")]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


async def test_demanded_calls_that_are_cut_are_told_as_far_as_they_came() -> None:
    text = '[{"name": "put", "parameters": {"a": "long'
    choice = await choice_of(model_saying(text), tools=TOOLS, tool_choice="required", max_tokens=len(text))
    assert functions(choice) == [("put", '{"a": "long')]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("end", range(1, len(REQUIRED)))
async def test_a_demanded_call_that_is_cut_is_never_content(end: int) -> None:
    """Neither whole nor streamed: a call is one from where its name is known."""
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": end}
    whole, parts = await choice_of(model_saying(REQUIRED), **body), await streamed(model_saying(REQUIRED), **body)
    assert functions(whole) == functions(parts)
    assert len(functions(whole)) == sum(end >= REQUIRED.index(name) + len(name) for name in ('"put"', '"get"'))
    assert not whole["message"]["content"]
    assert not parts["message"]["content"]
    assert whole["finish_reason"] == parts["finish_reason"] == "length"


async def test_reasoning_is_told_apart_under_both_of_its_names() -> None:
    choice = await choice_of(model_saying("<think>\nHm.\n</think>\n\nYes."))
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Yes."
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}
    assert choice["usage"]["completion_tokens"] == len("<think>\nHm.\n</think>\n\nYes.") + 1


async def test_reasoning_can_be_left_out_and_still_counts() -> None:
    choice = await choice_of(model_saying("<think>Hm.</think>Yes."), include_reasoning=False)
    assert choice["message"]["reasoning"] is None
    assert choice["message"]["content"] == "Yes."
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": 18}


async def test_a_prompt_may_begin_or_end_the_reasoning() -> None:
    opened = model_saying("Hm.</think>Yes.", template="<think>\n")
    assert (await choice_of(opened))["message"]["reasoning"] == "Hm."
    over = model_saying("Yes.", template="<think></think>", reasoning_parser=DeepSeekR1ReasoningParser)
    assert (await choice_of(over))["message"]["content"] == "Yes."


async def test_reasoning_that_is_cut_leaves_no_content() -> None:
    choice = await choice_of(model_saying("<think>Hm, hm."), max_tokens=10)
    assert choice["message"]["reasoning"] == "Hm,"
    assert choice["message"]["content"] is None
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": 10}


async def test_a_continued_message_is_past_its_reasoning() -> None:
    model = model_saying("more", reasoning_parser=DeepSeekR1ReasoningParser)
    messages = [*MESSAGES, {"role": "assistant", "content": "Some "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await choice_of(model, **body))["message"]["content"] == "more"


async def test_calls_are_read_behind_the_reasoning_only() -> None:
    choice = await choice_of(model_saying(f"<think>{CALL}</think>{CALL}"), tools=TOOLS)
    assert choice["message"]["reasoning"] == CALL
    assert functions(choice) == [("get", '{"a": 1}')]


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", "none"),
    ],
)
async def test_the_template_hears_of_the_reasoning_effort(template: str, effort: str, prompt: str) -> None:
    model = model_saying("x", template=template)
    await choice_of(model, reasoning_effort=effort)
    assert bytes(engine_of(model).requests[0].prompt_token_ids).decode() == prompt


async def test_an_effort_that_the_template_does_not_take_is_refused() -> None:
    for template, effort in (("x", "low"), ("{{ enable_thinking }}", "high")):
        with pytest.raises(BadRequest, match=f"reasoning_effort: .* takes no '{effort}'"):
            await choice_of(model_saying("x", template=template), reasoning_effort=effort)


async def test_content_can_be_constrained_while_tools_may_be_called() -> None:
    model = model_saying("1")
    await choice_of(model, tools=TOOLS, response_format={"type": "json_object"})
    assert engine_of(model).requests[0].constraint is not None
    bare = model_saying("1", tool_parser=Markerless)
    with pytest.raises(BadRequest, match="writes calls of tools without a marker"):
        await choice_of(bare, tools=TOOLS, response_format={"type": "json_object"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
async def test_a_demanded_call_takes_no_other_constraint_but_a_format_of_the_content(choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": choice}
    await choice_of(model_saying("{}"), **body, response_format={"type": "json_object"})
    with pytest.raises(BadRequest, match="guided_regex: the answer must be a call"):
        await choice_of(model_saying("{}"), **body, guided_regex="a")
    with pytest.raises(BadRequest, match="use_beam_search"):
        await choice_of(model_saying("{}"), **body, use_beam_search=True)


async def test_a_tools_schema_that_cannot_be_enforced_is_named() -> None:
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}},
    ]
    with pytest.raises(BadRequest, match=r"tools\[2\].function.parameters.*properties.a: Unimplemented"):
        await choice_of(model_saying("{}"), tools=tools, tool_choice="required")
    named = {"type": "function", "function": {"name": "bad"}}
    with pytest.raises(BadRequest, match=r"tools\[2\].function.parameters: at properties.a: Unimplemented"):
        await choice_of(model_saying("{}"), tools=tools, tool_choice=named)
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    with pytest.raises(BadRequest, match='its type should be "object"'):
        await choice_of(model_saying("{}"), tools=wrong, tool_choice="required")


class Markerless(HermesToolParser):
    openings = ()


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "Hm. ",
    "\n",
    "{",
    "é",
    json.dumps({"name": "put"}),
]


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
    stop=st.sampled_from([[], ["Hm"], ["\n\n"]]),
    max_tokens=st.integers(1, 200),
    mode=st.sampled_from(["auto", "none", "required", "named"]),
)
async def test_chunks_put_together_are_the_whole_message(
    text: str, stop: list[str], max_tokens: int, mode: str
) -> None:
    model = model_saying(text)
    choice = {"type": "function", "function": {"name": "get"}} if mode == "named" else mode
    body = {"tools": TOOLS, "tool_choice": choice, "stop": stop, "max_tokens": max_tokens}
    whole, pieces = await choice_of(model, **body), await streamed(model, **body)
    assert pieces["message"]["content"] == (whole["message"]["content"] or "")
    assert pieces["message"]["reasoning"] == (whole["message"]["reasoning"] or "")
    assert functions(pieces) == functions(whole)
    assert pieces["finish_reason"] == whole["finish_reason"]
    assert pieces["usage"] == whole["usage"]
