"""Anthropic's own client, as its users call another server: `base_url` without `/v1`."""

from __future__ import annotations

from typing import Any

import anthropic
from calls import KEY, Servers, main

GREEDY = {"temperature": 0}
"""Sampling fields that the client has no arguments for any more; servers of other models take them."""

HELLO: Any = {"max_tokens": 60, "messages": [{"role": "user", "content": "Hello world!"}], "extra_body": GREEDY}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def to_tiny(servers: Servers, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=servers.tiny.removesuffix("/v1"), api_key=key, max_retries=0)


def to_tools(servers: Servers) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=servers.tools.removesuffix("/v1"), api_key="any", max_retries=0)


def message(servers: Servers) -> Any:
    answer = to_tiny(servers).messages.create(model="tiny", **HELLO)
    usage = answer.usage
    num_input = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return {"text": answer.content[0].text, "stop": answer.stop_reason, "input": num_input, "id": answer.id}


def bearer(servers: Servers) -> Any:
    client = anthropic.Anthropic(base_url=servers.tiny.removesuffix("/v1"), auth_token=KEY, api_key=None)
    return client.messages.create(model="tiny", **HELLO).content[0].text


def streamed(servers: Servers) -> Any:
    with to_tiny(servers).messages.stream(model="tiny", system="You are a helpful assistant.", **HELLO) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    return {"pieces": "".join(pieces), "final": final.content[0].text, "output": final.usage.output_tokens}


def counted(servers: Servers) -> Any:
    return to_tiny(servers).messages.count_tokens(model="tiny", messages=HELLO["messages"]).input_tokens


def tools_loop(servers: Servers) -> Any:
    client = to_tools(servers)
    asked = client.messages.create(model="scripted", max_tokens=500, messages=[QUESTION], tools=TOOLS)
    call = asked.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    history: Any = [QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="scripted", max_tokens=500, messages=history, tools=TOOLS)
    return [asked.stop_reason, call.name, call.input, answer.stop_reason, answer.content[0].text]


def streamed_call(servers: Servers) -> Any:
    client = to_tools(servers)
    with client.messages.stream(model="scripted", max_tokens=500, messages=[QUESTION], tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        text, call = stream.get_final_message().content
    return [text.text, call.name, call.input, kinds.count("input_json") > 5]


def refused(servers: Servers) -> Any:
    return [error_of(to_tiny(servers), {"temperature": 9}), error_of(to_tiny(servers, "wrong"), GREEDY)]


def error_of(client: anthropic.Anthropic, fields: dict[str, Any]) -> Any:
    try:
        client.messages.create(model="tiny", **(HELLO | {"extra_body": fields}))
    except anthropic.APIStatusError as exc:
        return [type(exc).__name__, exc.status_code, exc.body["error"]["type"], exc.message]
    return None


if __name__ == "__main__":
    main(message, bearer, streamed, counted, tools_loop, streamed_call, refused)
