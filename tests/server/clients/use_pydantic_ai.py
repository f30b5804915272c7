"""Pydantic AI with its models for OpenAI's APIs: text, streams, tools, and objects in each of its modes."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any, Literal

from calls import KEY, Servers, main
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

INSTRUCTIONS = "You are a helpful assistant."
QUESTION = "What is the weather in Paris?"
SETTINGS = {"temperature": 0, "max_tokens": 300}
WAYS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Order(BaseModel, extra="forbid"):
    """An order in a shop."""

    fruit: Literal["apple", "pear"]
    amount: int = Field(ge=1, le=9)


class AnyObject(BaseModel, extra="allow"):
    """Whatever a model that was only asked for JSON gives."""


def greeter(servers: Servers, way: str, **options: Any) -> Agent[Any, Any]:
    model = WAYS[way]("tiny", provider=OpenAIProvider(base_url=servers.tiny, api_key=KEY))
    return Agent(model, **{"system_prompt": INSTRUCTIONS, "model_settings": SETTINGS, "retries": 0, **options})


def forecaster(servers: Servers, way: str) -> Agent[Any, Any]:
    agent = Agent(WAYS[way]("scripted", provider=OpenAIProvider(base_url=servers.tools, api_key="any")))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"21 degrees in {city}"

    return agent


async def run(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = await greeter(servers, way).run("Hello world!")
        outcomes[way] = [result.output, result.usage.total_tokens, result.response.finish_reason]
    return outcomes


async def streamed(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        async with greeter(servers, way).run_stream("Hello world!") as result:
            deltas = [delta async for delta in result.stream_text(delta=True, debounce_by=None)]
        outcomes[way] = ["".join(deltas), len(deltas) > 2, result.usage.total_tokens]
    return outcomes


async def structured(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        for mode, output in {"by_tool": ToolOutput(Order), "by_schema": NativeOutput(Order)}.items():
            result = await greeter(servers, way, output_type=output).run("Hello world!")
            outcomes[f"{way} {mode}"] = result.output.model_dump()
    return outcomes


async def by_prompt(servers: Servers) -> Any:
    """JSON mode, with the schema in the prompt, which only a model that understands it follows."""
    result = await greeter(servers, "chat", output_type=PromptedOutput(AnyObject)).run("Hello world!")
    return type(result.output.model_dump()).__name__


async def tools_loop(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = await forecaster(servers, way).run(QUESTION)
        outcomes[way] = [[part.part_kind for m in result.all_messages() for part in m.parts], result.output]
    return outcomes


async def streamed_tools_loop(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        kinds: list[str] = []

        async def note(context: Any, events: AsyncIterable[Any], kinds: list[str] = kinds) -> None:
            kinds += [event.event_kind async for event in events]

        result = await forecaster(servers, way).run(QUESTION, event_stream_handler=note)
        outcomes[way] = [kinds.count("part_delta") > 5, result.output]
    return outcomes


async def continued(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        agent = greeter(servers, way)
        first = await agent.run("Hello world!")
        second = await agent.run("Say pong.", message_history=first.all_messages())
        outcomes[way] = second.usage.input_tokens
    return outcomes


if __name__ == "__main__":
    main(run, streamed, structured, by_prompt, tools_loop, streamed_tools_loop, continued)
