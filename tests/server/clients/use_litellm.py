"""LiteLLM as its users call a server that speaks OpenAI's API: `openai/MODEL` with `api_base`."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from calls import KEY, MESSAGES, Servers, main

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def to_tiny(servers: Servers) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": servers.tiny, "api_key": KEY}


def to_tools(servers: Servers) -> dict[str, Any]:
    return {"model": "openai/scripted", "api_base": servers.tools, "api_key": "any", "tools": TOOLS}


def completion(servers: Servers) -> Any:
    answer = litellm.completion(messages=MESSAGES, temperature=0, **to_tiny(servers))
    return {"text": answer.choices[0].message.content, "usage": answer.usage.total_tokens, "id": answer.id}


def streamed(servers: Servers) -> Any:
    chunks = litellm.completion(
        messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}, **to_tiny(servers)
    )
    whole = litellm.stream_chunk_builder(list(chunks))
    return {"text": whole.choices[0].message.content, "usage": whole.usage.total_tokens}


def asynchronous(servers: Servers) -> Any:
    async def ask() -> str:
        answer = await litellm.acompletion(messages=MESSAGES, temperature=0, **to_tiny(servers))
        return str(answer.choices[0].message.content)

    return asyncio.run(ask())


def text_completion(servers: Servers) -> Any:
    to = to_tiny(servers) | {"model": "text-completion-openai/tiny"}
    return litellm.text_completion(prompt="The capital of France is", temperature=0, max_tokens=4, **to).choices[0].text


def embedding(servers: Servers) -> Any:
    answer = litellm.embedding(input=["one", "two"], **to_tiny(servers))
    return [len(item["embedding"]) for item in answer.data]


def schema(servers: Servers) -> Any:
    wanted = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted, "strict": True}}
    answer = litellm.completion(messages=MESSAGES, response_format=form, max_tokens=60, **to_tiny(servers))
    return answer.choices[0].message.content


def beyond_openai(servers: Servers) -> Any:
    answer = litellm.completion(messages=MESSAGES, extra_body={"guided_choice": ["yes"]}, **to_tiny(servers))
    return answer.choices[0].message.content


def tools_loop(servers: Servers) -> Any:
    asked = litellm.completion(messages=[QUESTION], **to_tools(servers)).choices[0]
    (call,) = asked.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    answer = litellm.completion(messages=[QUESTION, asked.message, result], **to_tools(servers)).choices[0]
    called = [call.function.name, call.function.arguments]
    return [asked.finish_reason, *called, answer.finish_reason, answer.message.content]


def streamed_call(servers: Servers) -> Any:
    chunks = list(litellm.completion(messages=[QUESTION], stream=True, **to_tools(servers)))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    with_arguments = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    return [call.function.name, call.function.arguments, len(with_arguments)]


def refused(servers: Servers) -> Any:
    try:
        litellm.completion(messages=MESSAGES, temperature=9, **to_tiny(servers))
    except litellm.BadRequestError as exc:
        return [exc.status_code, str(exc)]
    return None


if __name__ == "__main__":
    main(
        *(completion, streamed, asynchronous, text_completion, embedding, schema, beyond_openai),
        *(tools_loop, streamed_call, refused),
    )
