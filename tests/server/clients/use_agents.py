"""OpenAI's Agents SDK, by chat completions and by responses: tools, streams, objects, hand-offs."""

from __future__ import annotations

from typing import Any, Literal

import agents
from agents import Agent, ModelSettings, Runner, function_tool, handoff
from calls import KEY, Servers, main
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

agents.set_tracing_disabled(True)  # otherwise traces go to OpenAI

QUESTION = "What is the weather in Paris?"
WAYS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


class Order(BaseModel, extra="forbid"):
    """An order in a shop."""

    fruit: Literal["apple", "pear"]
    amount: int = Field(ge=1, le=9)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


def greeter(servers: Servers, way: str, **options: Any) -> Agent[Any]:
    model = WAYS[way]("tiny", AsyncOpenAI(base_url=servers.tiny, api_key=KEY, max_retries=0))
    settings = ModelSettings(temperature=0, max_tokens=200, include_usage=True)
    instructions = "You are a helpful assistant."
    return Agent("greeter", instructions=instructions, model=model, model_settings=settings, **options)


def forecaster(servers: Servers, way: str, **options: Any) -> Agent[Any]:
    model = WAYS[way]("scripted", AsyncOpenAI(base_url=servers.tools, api_key="any", max_retries=0))
    return Agent("forecaster", model=model, tools=[get_weather], **options)


async def run(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = await Runner.run(greeter(servers, way), "Hello world!")
        outcomes[way] = [result.final_output, result.context_wrapper.usage.total_tokens]
    return outcomes


async def streamed(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = Runner.run_streamed(greeter(servers, way), "Hello world!")
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        outcomes[way] = [result.final_output, kinds.count("response.output_text.delta") > 2, kinds[-1]]
    return outcomes


async def structured(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = await Runner.run(greeter(servers, way, output_type=Order), "Hello world!")
        outcomes[way] = result.final_output.model_dump()
    return outcomes


async def tools_loop(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = await Runner.run(forecaster(servers, way), QUESTION)
        outcomes[way] = [[item.type for item in result.new_items], result.final_output]
    return outcomes


async def streamed_tools_loop(servers: Servers) -> Any:
    outcomes = {}
    for way in WAYS:
        result = Runner.run_streamed(forecaster(servers, way), QUESTION)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        outcomes[way] = [names, result.final_output]
    return outcomes


async def continued(servers: Servers) -> Any:
    """The second turn is sent as all items of the first one, as the SDK writes them, and a question."""
    outcomes = {}
    for way in WAYS:
        agent = greeter(servers, way)
        first = await Runner.run(agent, "Hello world!")
        second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Say pong."}])
        outcomes[way] = [len(second.to_input_list()), second.context_wrapper.usage.input_tokens]
    return outcomes


async def handed_over(servers: Servers) -> Any:
    """A hand-off is a tool, here one that is demanded of the model; the next agent answers with another model."""
    outcomes = {}
    for way in WAYS:
        settings = ModelSettings(tool_choice="required", max_tokens=100, temperature=0, parallel_tool_calls=False)
        clerk = greeter(servers, way).clone(handoffs=[handoff(forecaster(servers, way))], model_settings=settings)
        result = await Runner.run(clerk, QUESTION)
        outcomes[way] = [result.last_agent.name, result.final_output]
    return outcomes


if __name__ == "__main__":
    main(run, streamed, structured, tools_loop, streamed_tools_loop, continued, handed_over)
