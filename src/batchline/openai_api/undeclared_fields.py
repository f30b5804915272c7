"""Request fields that other services know and that a schema here does not declare: those without behaviour, which are
accepted and dropped, and those that Batchline cannot honour, which are refused by name. `parsing.py` applies both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    "reasoning.summary": "how a hosted service sums up hidden reasoning; here responses contain all of it",
    "cache_control": "a hint for a hosted service's prompt cache; equal beginnings share the cache here automatically",
    "diagnostics": "what a hosted service reports about its prompt cache",
    "inference_geo": "where a hosted service runs the model",
    "speed": "a hosted service's price class",
    "user_profile_id": "whom a hosted service charges for the request",
    "workspace_id": "whom a hosted service charges for the request",
    "stream_options.include_obfuscation": "padding of a hosted service's chunks against eavesdroppers",
    "thinking.budget_tokens": "a separate limit for thinking; here `max_tokens` limits thinking and text together",
    "stream_include_usage": "whether a stream of a transcription contains the usage; here its last event always does",
}
"""Fields that carry no behaviour here: accepted and dropped without a warning. Names with a dot are nested ones."""


OTHER_WORDS: Mapping[str, str] = {
    "enable_thinking": "chat_template_kwargs",
    "think": "reasoning_effort",
    "thinking": "reasoning_effort",
    "format": "response_format",
    "num_predict": "max_tokens",
}
"""What unknown fields of other programs (Ollama, DashScope and others) are called here."""


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
_MEDIA = Unsupported("a choice of how media are read", ({},))
_AUDIO = Unsupported("audio output")
_EMBEDS = Unsupported("a prompt of embeddings", ([],))
_TRANSFER = Unsupported("handing a request's cache to another server", ({},))
_ROUTING = Unsupported("a choice of the machine that answers")
_INTERNALS = Unsupported("reporting what happens inside of the model", (False, 0))
_SESSIONS = Unsupported("sessions", ({},))
_IMAGES = Unsupported("image output")
_SEVERAL = Unsupported("several answers", (1,))
_NO_LIMIT = Unsupported("a limit of this name", advice="completions have max_tokens, responses max_output_tokens")
_SPEAKERS = Unsupported("telling speakers apart", ([],))

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
    "return_mm_kwargs": Unsupported("an answer with media", (True, False)),
    "return_hidden_states": _INTERNALS,
    "return_routed_experts": _INTERNALS,
    "routed_experts_prompt_start": _INTERNALS,
    "routed_experts_start_len": _INTERNALS,
    "return_cached_tokens_details": _INTERNALS,
    "return_meta_info": _INTERNALS,
    "media_io_kwargs": _MEDIA,
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "use_audio_in_video": Unsupported("the sound of videos", (False,)),
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
    "n": _SEVERAL,
    "best_of": _SEVERAL,
    "use_beam_search": Unsupported("beam search", (False,)),
    "length_penalty": Unsupported("beam search", (1,)),
    "max_completion_tokens": _NO_LIMIT,
    "chunking_strategy": Unsupported("a way to cut the recording", ("auto",), "leave it out: cuts are between texts"),
    "include": Unsupported("returning log-probabilities or other additions", ([],)),
    "known_speaker_names": _SPEAKERS,
    "known_speaker_references": _SPEAKERS,
    "hotwords": Unsupported("a list of words to expect", ("",), "write them into prompt"),
    "to_language": Unsupported("a choice of the language to translate into", ("en",)),
    "stream_continuous_usage_stats": Unsupported("usage in every event", (False,)),
    "stream": Unsupported("streaming", (False,)),
    "stream_options": Unsupported("streaming"),
}
"""Known parameters that are refused by name, unless the schema declares them."""
