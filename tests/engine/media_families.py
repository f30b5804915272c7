"""Tiny random models that take images, one of each family that the engine promises to run, and the oracle for them.

Each folder is whole: config, weights, a byte-level tokenizer with the family's special tokens, and the processor's
files. Images of several sizes give several numbers of tokens where the family has that.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import COMMON
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedTokenizerFast,
)

from batchline.config import ModelConfig
from batchline.endpoints.media_prompts import media_spans
from batchline.engine.request import GenerationRequest, SamplingParams
from batchline.media.items import MediaItem
from batchline.media.processor import MediaProcessor, PixtralProcessor, load_media_processor
from batchline.text.control_tokens import RenderedChat

NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
"""Tokens that processors ask the tokenizer for by attribute."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %} {% endfor %}assistant: "
)
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]


@dataclass(frozen=True)
class Family:
    """text_type, text: the decoder's config. vision: the encoder's. special: tokens of the family, the image's first.
    top: the rest of the config. image_processor, processor: their files. model_type: if not the family's name.
    mark: the special token that chat templates write for an image."""

    text_type: str
    special: list[str]
    vision: dict[str, Any]
    text: dict[str, Any]
    top: dict[str, Any]
    image_processor: dict[str, Any]
    processor: dict[str, Any]
    model_type: str | None = None
    mark: int = 0


CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}

FAMILIES: dict[str, Family] = {
    "llava": Family(
        text_type="llama",
        special=["<image>"],
        vision=CLIP,
        text={},
        top={"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": Family(
        text_type="qwen2",
        special=["<image>", "<video>"],
        vision={**CLIP, "model_type": "siglip_vision_model"},
        text={},
        top={
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
            "vision_aspect_ratio": "anyres_max_9",
            "video_token_index": 4,
        },
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
    ),
}

QWEN_SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
QWEN_TOP = {"video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 4096},
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
IDEFICS_SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
IDEFICS_SPECIAL += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

FAMILIES |= {
    "qwen2_vl": Family(
        text_type="qwen2_vl_text",
        special=QWEN_SPECIAL,
        vision={**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        text={"rope_parameters": MROPE},
        top=QWEN_TOP,
        image_processor=QWEN_IMAGES,
        processor={"processor_class": "Qwen2VLProcessor"},
    ),
    "qwen2_5_vl": Family(
        text_type="qwen2_5_vl_text",
        special=QWEN_SPECIAL,
        vision={**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [1]},
        text={"rope_parameters": MROPE},
        top=QWEN_TOP,
        image_processor=QWEN_IMAGES,
        processor={"processor_class": "Qwen2_5_VLProcessor"},
    ),
    "qwen3_vl": Family(
        text_type="qwen3_vl_text",
        special=QWEN_SPECIAL,
        vision={**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        text={"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16},
        top=QWEN_TOP,
        image_processor=QWEN_IMAGES,
        processor={"processor_class": "Qwen3VLProcessor"},
    ),
    "idefics3": Family(
        text_type="llama",
        special=IDEFICS_SPECIAL,
        vision={**CLIP, "model_type": "idefics3_vision"},
        text={},
        top={"scale_factor": 2},
        image_processor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "smolvlm": Family(
        text_type="llama",
        special=IDEFICS_SPECIAL,
        vision={**CLIP, "model_type": "smolvlm_vision"},
        text={},
        top={"scale_factor": 2},
        image_processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        },
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    ),
    "internvl": Family(
        text_type="qwen2",
        special=["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        vision={
            **CLIP,
            "model_type": "internvl_vision",
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
        text={},
        top={"downsample_ratio": 0.5, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
}
FAMILIES |= {
    "gemma3": Family(
        text_type="gemma3_text",
        special=["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        vision={**CLIP, "model_type": "siglip_vision_model"},
        text={"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32},
        top={"mm_tokens_per_image": 16, "boi_token_index": 4, "eoi_token_index": 5},
        image_processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
        mark=1,
    ),
}
for name, text_type, window in (("paligemma", "gemma", {}), ("paligemma2", "gemma2", {"sliding_window": 256})):
    FAMILIES[name] = Family(
        text_type=text_type,
        special=["<image>"],
        vision={**CLIP, "model_type": "siglip_vision_model", "projection_dim": 64},
        text={"head_dim": 16, "query_pre_attn_scalar": 16, **window},
        top={"projection_dim": 64},
        image_processor={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_seq_length": 16,
        },
        processor={"processor_class": "PaliGemmaProcessor"},
        model_type="paligemma",
    )
PIXTRAL: dict[str, Any] = {
    "text_type": "mistral",
    "special": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "vision": {**CLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
    "text": {"head_dim": 16, "sliding_window": None},
    "image_processor": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 64},
        "patch_size": {"height": 8, "width": 8},
    },
}
FAMILIES |= {
    "pixtral": Family(
        **PIXTRAL,
        top={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        processor={"processor_class": "PixtralProcessor", "patch_size": 8},
        model_type="llava",
    ),
    "mistral3": Family(
        **PIXTRAL,
        top={"vision_feature_layer": -1, "spatial_merge_size": 2},
        processor={"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
    ),
}


def make_tokenizer(special: Sequence[str], folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, saved in the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *special]
    vocabulary = {token: index for index, token in enumerate([*names, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={name: token for name, token in NAMED_TOKENS.items() if token in special},
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_media_model(family: str, folder: Path, **text: Any) -> Path:
    """Save a random model of a family. Weights are large enough that outputs depend clearly on the images."""
    spec = FAMILIES[family]
    tokenizer = make_tokenizer(spec.special, folder)
    torch.manual_seed(0)
    noise = {"initializer_range": 0.15}
    config = AutoConfig.for_model(
        spec.model_type or family,
        text_config={**COMMON, "model_type": spec.text_type, **noise, **spec.text, **text},
        vision_config={**spec.vision, **noise},
        image_token_id=tokenizer.convert_tokens_to_ids(spec.special[0]),
        **spec.top,
        **noise,
    )
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a projector that starts at zero would hide the images
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("IMAGE", spec.special[spec.mark]))
    (folder / "preprocessor_config.json").write_text(json.dumps(spec.image_processor))
    (folder / "processor_config.json").write_text(json.dumps(spec.processor))
    return folder


def picture(seed: int, width: int = 40, height: int = 40) -> MediaItem:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return _item(Image.fromarray(pixels))


def plain(colour: str) -> MediaItem:
    """A picture of one colour."""
    return _item(Image.new("RGB", (40, 40), colour))


def _item(image: Image.Image) -> MediaItem:
    return MediaItem("image", hashlib.sha256(b"%d %d " % image.size + image.tobytes()).digest(), image)


def load_processor(folder: Path) -> MediaProcessor:
    return load_media_processor(ModelConfig(model=str(folder)), {})


@dataclass(frozen=True)
class Prompt:
    """text: with a placeholder for each image."""

    text: str
    images: tuple[MediaItem, ...] = ()


def generation_request(
    index: int, prompt: Prompt, processor: MediaProcessor, max_tokens: int, **settings: Any
) -> GenerationRequest:
    """The prompt as endpoints make it."""
    tokenizer = processor._processor.tokenizer
    prepared = [processor.prepare(item, is_alone=len(prompt.images) == 1) for item in prompt.images]
    text = prompt.text
    if prompt.images:  # some processors add to the text, as chat templates do for endpoints
        images = [item.content for item in prompt.images]
        _, (text, *_), *_ = processor._processor.prepare_inputs_layout(images=[images], text=[text])
    rendered = RenderedChat(text).with_media(processor.placeholder, [item.text for item in prepared])
    token_ids = tuple(tokenizer(rendered.text)["input_ids"])
    return GenerationRequest(
        request_id=str(index),
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        media=media_spans(token_ids, prepared, processor.feature_token_id),
        **settings,
    )


def oracle_inputs(prompt: Prompt, processor: Any) -> Any:
    """What the model's own processor makes of the prompt."""
    images = [item.content for item in prompt.images]
    if type(processor).__name__ == "PaliGemmaProcessor":
        if not images:
            return {"input_ids": torch.tensor([processor.tokenizer(prompt.text)["input_ids"]])}
        inputs = processor(images=[images], text=prompt.text, return_tensors="np")
        return {name: torch.from_numpy(array) for name, array in inputs.items() if name != "labels"}
    if not isinstance(processor, PixtralProcessor):  # of one conversation, as `apply_chat_template` gives them
        return processor(**({"images": [images]} if images else {}), text=prompt.text, return_tensors="pt")
    text, arrays = prompt.text, {}
    if images:
        arrays = processor.image_processor(images, return_tensors="pt", **processor.images_kwargs)
        for height, width in arrays["image_sizes"].tolist():
            size = processor.images_kwargs["patch_size"]
            rows = "<break>".join(["<feature>" * (width // size)] * (height // size))
            text = text.replace("[IMG]", f"{rows}[IMG_END]", 1)
    text = text.replace("<feature>", "[IMG]").replace("<break>", "[IMG_BREAK]")
    return {**processor.tokenizer(text, return_tensors="pt"), **arrays}


def greedy_oracle(folder: Path, prompts: Sequence[Prompt], processor: MediaProcessor, max_tokens: int) -> list[Any]:
    """(prompt tokens, greedy output tokens) of each prompt, alone through the model's own processor and generate."""
    # eager: with its default attention, PaliGemma's text prompts without images lose their causal mask
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    results = []
    for prompt in prompts:
        inputs = oracle_inputs(prompt, processor._processor)
        length = inputs["input_ids"].shape[1]
        out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        results.append((inputs["input_ids"][0].tolist(), out[0, length:].tolist()))
    return results


def make_prompts(placeholder: str, sizes: Sequence[tuple[int, int]], count: int) -> list[Prompt]:
    """Texts with none to three images at any place, some of which share a beginning, some a picture."""
    rng = random.Random(3)
    words = [
        "the",
        "red",
        "cat",
        "saw",
        "two",
        "blue",
        "boats",
        "near",
        "an",
        "old",
        "stone",
        "house",
        "while",
        "it",
        "rained",
        "on",
        "green",
        "hills",
    ]

    def text(length: int) -> str:
        return " ".join(rng.choice(words) for _ in range(length)) + " "

    beginnings = ["", text(4), text(8)]
    prompts = []
    for index in range(count):
        images = tuple(picture(seed, *sizes[seed % len(sizes)]) for seed in rng.choices(range(5), k=index % 4))
        parts = [f"{placeholder}{text(rng.randrange(1, 5))}" for _ in images]
        prompts.append(Prompt(rng.choice(beginnings) + "".join(parts) + text(rng.randrange(1, 8)), images))
    return prompts
