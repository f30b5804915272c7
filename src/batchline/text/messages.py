"""Converts the chat messages of a request to the form that chat templates expect.

A template gets `content` as one string or as a list of `{"type": "text", "text": ...}` parts, and tool calls with their
arguments decoded. `developer` becomes `system` if the template does not know it. Other keys of a message or a part are
passed on unchanged. The caller's messages are never modified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchline.errors import BadRequest
from batchline.text.content_format import TemplateContentFormat

TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part types that hold text, and the key of the text."""

MEDIA_PARTS = ("image_url", "input_image", "audio_url", "input_audio", "video_url")
"""Known part types that only models with media inputs accept."""

TEMPLATE_MEDIA = ("image", "audio", "video")
"""Part types that stand for media in templates. Requests may not use them."""


def normalise_messages(
    messages: Sequence[Mapping[str, Any]],
    content_format: TemplateContentFormat,
    *,
    knows_developer: bool,
    has_media: bool = False,
) -> list[dict[str, Any]]:
    """Messages for a template. has_media: whether parts may stand for media.

    Raises: BadRequest, with the path of the invalid value.
    """
    return [
        _normalise(message, f"messages[{index}]", content_format, knows_developer, has_media)
        for index, message in enumerate(messages)
    ]


def _normalise(
    message: Mapping[str, Any],
    path: str,
    content_format: TemplateContentFormat,
    knows_developer: bool,
    has_media: bool,
) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{path}.role: Input should be a non-empty string", param=f"{path}.role")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if role == "developer" and not knows_developer else role
    parts = _parts(message.get("content"), f"{path}.content", has_media)
    if content_format == "string":
        _refuse_media(parts, f"{path}.content")
    normal["content"] = _joined(parts) if content_format == "string" else parts
    _use_tool_calls(normal)
    if "tool_calls" in normal:
        normal["tool_calls"] = _tool_calls(normal["tool_calls"], f"{path}.tool_calls")
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal["reasoning"])  # the field that templates read
    return normal


_FUNCTION_CALL_ID = "function0"
"""The id of a call in the older form, which has no ids: nine letters and digits, as the strictest templates require."""


def _use_tool_calls(message: dict[str, Any]) -> None:
    """Turn a `function_call` into a tool call, and a function's result into a tool's, in place, as templates expect."""
    if "function_call" in message and "tool_calls" not in message:
        call = {"id": _FUNCTION_CALL_ID, "type": "function", "function": message.pop("function_call")}
        message["tool_calls"] = [call]
    if message["role"] == "function":
        message["role"] = "tool"
        message.setdefault("tool_call_id", _FUNCTION_CALL_ID)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message's content, its text parts joined by newlines. Raises: BadRequest."""
    return _joined(_parts(message.get("content"), "content", has_media=True))


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _refuse_media(parts: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raises: BadRequest. A template that gets each message as one string has no place for them."""
    for index, part in enumerate(parts):
        if part["type"] != "text":
            message = f"this model's chat template takes text only, so there is no place for the {part['type']}"
            raise BadRequest(f"{path}[{index}]: {message}", param=f"{path}[{index}]")


def _parts(content: Any, path: str, has_media: bool) -> list[dict[str, Any]]:
    """The parts of a message's content: one for a string, an empty list if there is no content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{path}: Input should be a string or a list of parts", param=path)
    return [_part(part, f"{path}[{index}]", has_media) for index, part in enumerate(content)]


def _part(part: Any, path: str, has_media: bool) -> dict[str, Any]:
    """A text part with its other keys, such as `cache_control`, or a part that stands for media."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{path}: Input should be an object with a type", param=path)
    if has_media and kind in TEMPLATE_MEDIA:
        return {"type": kind}
    if kind in MEDIA_PARTS:
        raise BadRequest(f"{path}: {unsupported_part(kind, ())}", param=path)
    if kind not in TEXT_PARTS:
        known = ", ".join([*TEXT_PARTS, *MEDIA_PARTS])
        raise BadRequest(f"{path}.type: unknown part type {kind[:80]!r}; known are {known}", param=f"{path}.type")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        key = f"{path}.{TEXT_PARTS[kind]}"
        raise BadRequest(f"{key}: Input should be a string", param=key)
    others = {key: value for key, value in part.items() if key != TEXT_PARTS[kind]}
    return {**others, "type": "text", "text": text}


def unsupported_part(kind: str, media: Sequence[str]) -> str:
    """Why a model refuses a part. media: the types of parts with media that it takes."""
    taken = ", ".join([*TEXT_PARTS, *media])
    return f"parts of type {kind} are not supported by this model, which takes {taken}"


def _tool_calls(tool_calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise BadRequest(f"{path}: Input should be a list", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(tool_calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """The call with `function.arguments` as an object, as templates expect it.

    Text that is not a JSON object stays text: a history may contain a call that the token limit cut off.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{path}.function: Input should be an object", param=f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decoded_arguments(arguments)
    if arguments is not None and not isinstance(arguments, (dict, str)):
        where = f"{path}.function.arguments"
        raise BadRequest(f"{where}: Input should be a JSON object", param=where)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def decoded_arguments(arguments: str) -> dict[str, Any] | str:
    """A call's arguments as an object; the text itself if it is not a JSON object."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        return decoded
    return arguments if arguments.strip() else {}


def wrap_text_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Wrap arguments that stayed text into objects, in place. Returns whether there were any."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    texts = [call["function"] for call in calls if isinstance(call["function"]["arguments"], str)]
    for function in texts:
        function["arguments"] = {"arguments": function["arguments"]}
    return bool(texts)
