"""Turns an untrusted JSON body into a checked request, and accounts for every field.

There are four kinds of fields:

    declared             the schema declares it
    refused              known, but Batchline cannot honour it; the error names it
    without behaviour    accepted and dropped
    unknown              an error under `strict`; otherwise a warning names it once

`null` means the same as leaving a field out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from batchline.config import RequestLimits
from batchline.errors import BadRequest
from batchline.openai_api.common import WireModel
from batchline.openai_api.limits import check_limits

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

DEFAULT_LIMITS = RequestLimits()
MAX_SHOWN_INPUT = 80
MAX_SHOWN_ERRORS = 3
MAX_READ_ERRORS = 1000
"""More errors than this are only counted, because formatting an error takes longer than finding it."""

MAX_WARNINGS = 1000
"""How many warnings about request fields are logged. Clients can make up any number of names."""

_NO_OBJECT = {"dict_type", "model_type", "model_attributes_type"}

NO_BEHAVIOUR: Mapping[str, str] = {
    "user": "an end user's id, for a hosted service's abuse checks",
    "safety_identifier": "an end user's id, for a hosted service's abuse checks",
    "metadata": "labels that a hosted service stores with the answer",
    "store": "whether a hosted service stores the answer",
    "service_tier": "a hosted service's price class",
    "prompt_cache_key": "a hint for routing between a hosted service's machines",
    "prompt_cache_options": "how a hosted service divides its prompt cache",
    "session_id": "a hint for routing between a hosted service's machines",
    "guided_decoding_backend": "another server's choice of grammar engines",
    "custom_labels": "labels of another server's metrics",
    "prompt_cache_retention": "how long a hosted service keeps its prompt cache",
    "max_tool_calls": "how often a hosted service may run its own tools",
    "reasoning.summary": "how a hosted service sums up reasoning that it does not show; here responses hold all of it",
    "cache_control": "a hint for a hosted service's prompt cache; equal beginnings share the cache here by themselves",
    "diagnostics": "what a hosted service reports about its prompt cache",
    "inference_geo": "where a hosted service runs the model",
    "speed": "a hosted service's price class",
    "user_profile_id": "whom a hosted service charges for the request",
    "workspace_id": "whom a hosted service charges for the request",
    "stream_options.include_obfuscation": "padding of a hosted service's chunks against eavesdroppers",
    "thinking.budget_tokens": "a separate limit for thinking; here `max_tokens` limits thinking and text together",
    "image_url.detail": "a resolution hint for a hosted service's models (inside a message part)",
}
"""Fields that carry no behaviour here: accepted and dropped without a warning. Names with a dot are nested ones."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known parameter that Batchline cannot honour.

    neutral: values that request nothing and are accepted. advice: what to send instead.
    """

    feature: str
    neutral: tuple[Any, ...] = ()
    advice: str = ""


_MAX_TOKENS = Unsupported("this name", advice="set max_tokens")
_NUMBER_FORMAT = Unsupported(
    "a number format", ("float",), "use embed_dtype with encoding_format: base64, or embedding_types of /v2/embed"
)
_TOOLS = Unsupported("tool calling", ([], "none"))
_REASONING = Unsupported("reasoning output")
_MEDIA = Unsupported("media input", ({},))
_AUDIO = Unsupported("audio output")
_EMBEDS = Unsupported("a prompt of embeddings")
_TRANSFER = Unsupported("handing a request's cache to another server", ({},))
_ROUTING = Unsupported("a choice of the machine that answers")
_INTERNALS = Unsupported("reporting what happens inside of the model", (False, 0))
_SESSIONS = Unsupported("sessions", ({},))
_IMAGES = Unsupported("image output")

UNSUPPORTED: Mapping[str, Unsupported] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": Unsupported("tool calling", (True, False)),
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "reasoning_effort": _REASONING,
    "include_reasoning": _REASONING,
    "thinking_token_budget": Unsupported(
        "a separate limit for thinking", advice="max_tokens limits thinking and text together"
    ),
    "mm_processor_kwargs": _MEDIA,
    "modalities": Unsupported("audio output", (["text"],)),
    "audio": _AUDIO,
    "add_generation_prompt": Unsupported("a prompt for an answer", (False,)),
    "continue_final_message": Unsupported("a message to continue", (False,)),
    "chat_template": Unsupported("a chat template of the request here", advice="start with --chat-template"),
    "chat_template_kwargs": Unsupported("a choice of template variables here", ({},)),
    "prompt_embeds": _EMBEDS,
    "input_embeds": _EMBEDS,
    "prompt_token_ids": Unsupported("a prompt beside the prompt", advice="send token ids as prompt of a completion"),
    "input_ids": Unsupported("a prompt beside the messages", advice="send token ids as prompt of a completion"),
    "stop_regex": Unsupported("stopping at a regular expression", ([],), "use stop, or a regex for the whole text"),
    "no_stop_trim": Unsupported("this name", (False,), "set include_stop_str_in_output"),
    "separate_reasoning": Unsupported("reasoning as a part of the content", (True,)),
    "stream_reasoning": Unsupported("reasoning that is held back in streams", (True,), "set include_reasoning: false"),
    "stream_interval": Unsupported("a number of tokens for each chunk", (1,)),
    "watermarking": Unsupported("watermarking", (False,)),
    "padding": Unsupported("padding to a length", ("do_not_pad",)),
    "detokenize": Unsupported("an answer without text", (True,)),
    "return_prompt_text": Unsupported("returning the prompt's text", (False,), "set return_token_ids"),
    "return_token_offsets": Unsupported("returning the tokens' places in the text", (False,)),
    "return_prompt_token_ids": Unsupported("this name", (False,), "set return_token_ids"),
    "return_mm_kwargs": Unsupported("media input", (True, False)),
    "return_hidden_states": _INTERNALS,
    "return_routed_experts": _INTERNALS,
    "routed_experts_prompt_start": _INTERNALS,
    "routed_experts_start_len": _INTERNALS,
    "return_cached_tokens_details": _INTERNALS,
    "return_meta_info": _INTERNALS,
    "media_io_kwargs": _MEDIA,
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "use_audio_in_video": Unsupported("media input", (False,)),
    "images_config": _IMAGES,
    "image": _IMAGES,
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "bootstrap_host": _TRANSFER,
    "bootstrap_port": _TRANSFER,
    "bootstrap_room": _TRANSFER,
    "routed_dp_rank": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
    "lora_path": Unsupported("LoRA"),
    "extra_key": Unsupported("this name", advice="set cache_salt, which separates prefix caches"),
    "rid": Unsupported("this name", advice="set request_id"),
    "session_params": _SESSIONS,
    "max_new_tokens": _MAX_TOKENS,
    "n_predict": _MAX_TOKENS,
    "repeat_penalty": Unsupported("this name", (1,), "set repetition_penalty"),
    "texts": Unsupported("this name", advice="set documents to rerank, or input to embed"),
    "output_dtype": _NUMBER_FORMAT,
    "embedding_type": _NUMBER_FORMAT,
    "extra_body": Unsupported(
        "extra_body in a body", ({},), "it is an argument of the Python client; put its fields into the body"
    ),
    "vllm_xargs": Unsupported("passing arguments to engine plugins", ({},)),
    "custom_params": Unsupported("passing arguments to engine plugins", ({},)),
    "custom_logit_processor": Unsupported("a custom logits processor", ([], "")),
    "ngram_corpus_id": Unsupported("speculation from a corpus"),
    "moderation": Unsupported("moderation"),
    "context_management": Unsupported("compaction", ([], {}), "set truncation: auto"),
    "previous_input_messages": Unsupported("a conversation beside the input", ([],)),
    "previous_response": Unsupported("a conversation beside the input"),
    "enable_response_messages": Unsupported("returning the messages", (False,)),
    "background_options": Unsupported("a time to answer in the background by", ({},)),
    "access_programs": Unsupported("access programs", ({},)),
    "personality": Unsupported("a personality", advice="write it into instructions"),
    "suffix": Unsupported("fill-in-the-middle", ("",)),
    "prediction": Unsupported("predicted output"),
    "web_search_options": Unsupported("web search"),
    "logits_processors": Unsupported("a list of custom logits processors", ([],)),
    "stream": Unsupported("streaming", (False,)),
    "stream_options": Unsupported("streaming"),
}
"""Known parameters that are refused by name, unless the schema declares them."""

_warned: set[str] = set()


def parse_body(
    schema: type[T], body: Mapping[str, Any], *, strict: bool, limits: RequestLimits | None = DEFAULT_LIMITS
) -> T:
    """The body as a `schema`, with every field checked. Under `strict`, an unknown field is an error.

    limits: None allows any size. Raises: BadRequest naming the field and what is wrong.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, field in _other_names(schema).items():
        if name in given and given.setdefault(field, given[name]) != given.pop(name):
            raise BadRequest(f"{name}: it is another name of {field}; give one of them", param=name)
    if limits is not None:
        check_limits(schema, given, limits)
    for name, value in given.items():
        if name not in schema.model_fields:
            _account_for(name, value, strict=strict)
    request = _validated(schema, given)
    for path in _unknown_inside(request, given, ""):
        _account_for_unknown(path, strict=strict)
    return request


def _other_names(schema: type[BaseModel]) -> Mapping[str, str]:
    return schema.other_names if issubclass(schema, WireModel) else {}


def _validated(schema: type[T], given: dict[str, Any]) -> T:
    """Raises: BadRequest."""
    try:
        return schema.model_validate(given)
    except ValidationError as exc:
        whole_numbers = _whole_numbers(given, exc)
        if not whole_numbers:
            raise _bad_request(exc, given) from exc
        given |= whole_numbers
    try:
        return schema.model_validate(given)
    except ValidationError as exc:
        raise _bad_request(exc, given) from exc


def _account_for(name: str, value: Any, *, strict: bool) -> None:
    """Refuse, drop or warn about a field that the schema does not declare."""
    if name in NO_BEHAVIOUR:
        return
    unsupported = UNSUPPORTED.get(name)
    if unsupported is not None:
        if value not in unsupported.neutral:
            advice = f"; {unsupported.advice}" if unsupported.advice else ""
            raise BadRequest(f"{name}: {unsupported.feature} is not supported{advice}", param=name)
        return
    _account_for_unknown(name, strict=strict)


def _account_for_unknown(path: str, *, strict: bool) -> None:
    if strict:
        raise BadRequest(f"{_shown(path)}: unknown field", param=path)
    warn_once(_unknown_field(path))


def _unknown_inside(model: BaseModel, given: Mapping[str, Any], path: str) -> Iterator[str]:
    """The paths of unknown fields in the objects inside a checked object, if their schemas ignore such fields."""
    names = _names_by_key(type(model))
    for key, value in given.items():
        if key not in names or not isinstance(value, (dict, list)):
            continue
        inner = getattr(model, names[key])
        if isinstance(inner, BaseModel):
            yield from _unknown_of(inner, value, path + key)
        elif isinstance(inner, (list, tuple)) and inner and isinstance(inner[0], BaseModel):
            for index, (item, item_given) in enumerate(zip(inner, value, strict=False)):
                yield from _unknown_of(item, item_given, f"{path}{key}[{index}]")


def _unknown_of(model: BaseModel, given: Any, path: str) -> Iterator[str]:
    if not isinstance(given, Mapping):
        return
    if model.model_config.get("extra") == "ignore":
        known = _names_by_key(type(model))
        unknown = (name for name, value in given.items() if name not in known and value is not None)
        yield from (f"{path}.{name}" for name in unknown if name not in NO_BEHAVIOUR)
    yield from _unknown_inside(model, given, f"{path}.")


@cache
def _names_by_key(schema: type[BaseModel]) -> Mapping[str, str]:
    """The names of a schema's fields by their keys in JSON."""
    return {field.alias or name: name for name, field in schema.model_fields.items()}


def _unknown_field(name: str) -> str:
    return f"Unknown request field {_shown(name)} is ignored"


def known_fields(schema: type[BaseModel]) -> frozenset[str]:
    """The fields that a body may have without a warning."""
    return frozenset({*schema.model_fields, *_other_names(schema), *NO_BEHAVIOUR, *UNSUPPORTED})


def described_field(schema: type[BaseModel], name: str) -> str:
    """`'temprature' (did you mean 'temperature'?)`, or only the name if no field of the schema is similar."""
    names = [field.alias or declared for declared, field in schema.model_fields.items()]
    close = get_close_matches(name[:MAX_SHOWN_INPUT], names, n=1)
    return f"{_shown(name)} (did you mean {close[0]!r}?)" if close else _shown(name)


def warned_elsewhere(name: str) -> None:
    """Note that the caller warns of an unknown field, so that it is not logged as well."""
    if len(_warned) < MAX_WARNINGS:
        _warned.add(_unknown_field(name))


def warn_once(message: str) -> None:
    """Log a warning about request fields the first time it occurs, up to a number of warnings."""
    if len(_warned) == MAX_WARNINGS or message in _warned:
        return
    _warned.add(message)
    logger.warning("%s", message)
    if len(_warned) == MAX_WARNINGS:
        logger.warning("Further request fields are ignored without a warning")


def _whole_numbers(body: Mapping[str, Any], error: ValidationError) -> dict[str, int]:
    """Fields with 4.0 where an integer belongs, and 4 for each. Tables with gaps store integer columns as floats."""
    wrong = error.errors(include_url=False) if error.error_count() <= MAX_READ_ERRORS else []
    names = [str(detail["loc"][0]) for detail in wrong if detail["type"] == "int_type"]
    found = {name: body.get(name) for name in names}
    return {name: int(value) for name, value in found.items() if isinstance(value, float) and value.is_integer()}


def _bad_request(error: ValidationError, body: Mapping[str, Any]) -> BadRequest:
    """Pydantic's errors as one error: the first few fields in words, and the first one as `param`."""
    if error.error_count() > MAX_READ_ERRORS:
        return BadRequest(f"The body is wrong in {error.error_count():,} places")
    by_path: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_path(detail, body), []).append(detail)
    sentences = [_sentence(path, details) for path, details in islice(by_path.items(), MAX_SHOWN_ERRORS)]
    if len(by_path) > MAX_SHOWN_ERRORS:
        sentences.append(f"and {len(by_path) - MAX_SHOWN_ERRORS} more errors")
    return BadRequest("; ".join(sentences), param=next(iter(by_path)) or None)


def _sentence(path: str, details: Sequence[ErrorDetails]) -> str:
    """`field: what is wrong (got value)`, or without a value if there is none to show.

    The errors of a field that may have several types are joined: `Input should be this or that`.
    """
    first, *others = dict.fromkeys(map(_fault, details))
    what = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    is_missing = details[0]["type"] == "missing"
    given = details[0].get("ctx", {}).get("tag", details[0]["input"])  # the object's `type` is the fault
    got = "" if is_missing or not path else f" (got {_shown(given)})"
    return f"{path}: {what}{got}" if path else what


def _fault(detail: ErrorDetails) -> str:
    """What is wrong, in JSON's terms."""
    cause = detail.get("ctx", {}).get("error")
    if detail["type"] == "value_error" and cause is not None:
        return str(cause)
    if detail["type"] == "extra_forbidden":
        return "unknown field"
    if detail["type"] == "union_tag_not_found":
        return "Its type is required"
    if detail["type"] == "union_tag_invalid":
        return f"Its type should be one of {detail['ctx']['expected_tags']}"
    return "Input should be a JSON object" if detail["type"] in _NO_OBJECT else detail["msg"]


def _path(detail: ErrorDetails, body: Mapping[str, Any]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`.

    For a field of several types, pydantic's location also contains the name of the type that was tried. Such a part is
    not a key of the given value, and otherwise only the name of a missing field is not.
    """
    path = ""
    value: Any = body
    missing_at = len(detail["loc"]) - 1 if detail["type"] == "missing" else None
    for position, part in enumerate(detail["loc"]):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) else None
        elif (isinstance(value, Mapping) and part in value) or position == missing_at:
            path += f".{part}" if path else part
            value = value.get(part) if isinstance(value, Mapping) else None
    return path


def _shown(value: Any) -> str:
    """A short form of an untrusted value: only the type of a container; long or invalid text is cut and escaped."""
    if isinstance(value, (list, tuple, dict)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT else text[: MAX_SHOWN_INPUT - 3] + "..."
