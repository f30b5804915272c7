"""LiteLLM as its users call a server that speaks OpenAI's API: `openai/MODEL` with `api_base`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import litellm
import openai
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
    answer = litellm.completion(
        messages=MESSAGES, response_format=form, temperature=0, max_tokens=60, **to_tiny(servers)
    )
    return answer.choices[0].message.content


def beyond_openai(servers: Servers) -> Any:
    answer = litellm.completion(
        messages=MESSAGES, temperature=0, extra_body={"guided_choice": ["yes"]}, **to_tiny(servers)
    )
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


BATCH_LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "fake", "messages": MESSAGES},
}


def to_batches(servers: Servers) -> dict[str, Any]:
    return {"custom_llm_provider": "openai", "api_base": servers.batches, "api_key": KEY}


def batch(servers: Servers) -> Any:
    """A batch from its file to its results, and another one that is cancelled."""
    to = to_batches(servers)
    content = ("in.jsonl", json.dumps(BATCH_LINE).encode())
    file = litellm.create_file(file=content, purpose="batch", **to)
    new = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": file.id}
    made = litellm.create_batch(metadata={"night": "7"}, **new, **to)
    while (over := litellm.retrieve_batch(batch_id=made.id, **to)).status != "completed":
        time.sleep(0.05)
    lines = litellm.file_content(file_id=over.output_file_id, **to).text.splitlines()
    listed = [one.id for one in litellm.list_batches(limit=1, **to)]
    missing = litellm.create_batch(**new | {"input_file_id": "file-none"}, **to)
    try:
        litellm.cancel_batch(batch_id=made.id, **to)
    except openai.ConflictError as exc:  # the client passes it on as it is
        refusal = str(exc)
    else:
        refusal = ""
    return {
        "file": [file.filename, file.purpose, file.bytes == len(content[1])],
        "metadata": over.metadata,
        "counts": over.request_counts.model_dump(),
        "answer": json.loads(lines[0])["response"]["body"]["choices"][0]["message"]["content"],
        "listed": listed[0] == made.id,
        "missing_file": missing.status,
        "refusal": refusal,
        "deleted": litellm.file_delete(file_id=file.id, **to).deleted,
        "has_output": over.output_file_id in [one.id for one in litellm.file_list(**to).data],
    }


def asynchronous_batch(servers: Servers) -> Any:
    async def run() -> Any:
        to = to_batches(servers)
        held = {**BATCH_LINE, "body": {"model": "fake", "messages": [{"role": "user", "content": "wait"}]}}
        content = json.dumps(held).encode()  # without a name: the client calls it `upload`
        expiry = {"anchor": "created_at", "seconds": 3600}
        file = await litellm.acreate_file(file=content, purpose="batch", expires_after=expiry, **to)
        new = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": file.id}
        made = await litellm.acreate_batch(**new, output_expires_after=expiry, **to)
        cancelling = await litellm.acancel_batch(batch_id=made.id, **to)
        over = cancelling
        while over.status != "cancelled":
            over = await litellm.aretrieve_batch(batch_id=made.id, **to)
        listed = await litellm.alist_batches(after=None, limit=None, **to)
        return {
            "file": [file.filename, file.expires_at - file.created_at],
            "cancelling": cancelling.status,
            "listed": made.id in [one.id for one in listed.data],
        }

    return asyncio.run(run())


if __name__ == "__main__":
    main(
        *(completion, streamed, asynchronous, text_completion, embedding, schema, beyond_openai),
        *(tools_loop, streamed_call, refused, batch, asynchronous_batch),
    )
