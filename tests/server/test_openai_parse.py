"""The official client's `parse`: pydantic models in, objects of them out, in chat and in responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "user", "content": "Two pears, please."}]


class Line(BaseModel):
    fruit: Literal["apple", "pear"]
    amount: int = Field(ge=1, le=9)


class Order(BaseModel):
    lines: list[Line] = Field(min_length=1, max_length=2)
    note: Literal["fast"] | None


class Buy(BaseModel):
    """Buys one thing."""

    fruit: Literal["apple", "pear"]


def test_an_answer_is_an_object_of_the_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Order, max_tokens=600, temperature=0
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Order)
    assert 1 <= len(parsed.lines) <= 2


async def test_many_at_once_of_the_async_client(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Line, max_tokens=400, n=4, seed=2
    )
    assert [type(choice.message.parsed) for choice in answer.choices] == [Line] * 4


def test_a_streamed_answer_is_an_object_at_its_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Line, max_tokens=400, temperature=0
    ) as stream:
        (done,) = [event.parsed for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert isinstance(done, Line)
    assert final.choices[0].message.parsed == done


def test_a_demanded_call_has_parsed_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Buy)],
        tool_choice={"type": "function", "function": {"name": "Buy"}},
        max_tokens=400,
        seed=1,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Buy)


def test_a_response_is_an_object_of_the_class(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="tiny", input="Two pears.", text_format=Line, max_output_tokens=400, temperature=0
    )
    assert isinstance(answer.output_parsed, Line)


def test_an_answer_that_is_cut_is_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Order, max_tokens=3)
