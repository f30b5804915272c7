"""A tiny random Whisper whose windows are 3 seconds long, and recordings for it."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

RATE = 16_000
WINDOW_S = 3
LANGUAGES = ("en", "de", "fr", "ja")
MAX_LENGTH = 48


def make_whisper(
    folder: Path, *, is_multilingual: bool = True, seed: int = 0, sharpness: float = 1.0, end: float = 2.0
) -> Path:
    """Write a checkpoint. sharpness: how sure it is of its tokens. end: above 1, some texts end early."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["endoftext", "startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev"]
    names += ["nospeech", "notimestamps"]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(WINDOW_S * 50 + 1)])
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in names}
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_mel_bins=20,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=WINDOW_S * 50,
        max_target_positions=MAX_LENGTH,
        decoder_start_token_id=ids["startoftranscript"],
        bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"],
        pad_token_id=ids["endoftext"],
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed_positions" not in name:
            torch.nn.init.normal_(weight, std=0.25)
    model.model.decoder.embed_tokens.weight.data[ids["endoftext"]] *= end
    model.model.decoder.layer_norm.weight.data *= sharpness
    model.generation_config = _generation(ids, is_multilingual)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=20, chunk_length=WINDOW_S).save_pretrained(folder)
    return folder


def _generation(ids: dict[str, int], is_multilingual: bool) -> GenerationConfig:
    control = [
        ids[name] for name in ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nospeech")
    ]
    special: dict[str, Any] = {
        "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": ids["startofprev"],
        "is_multilingual": is_multilingual,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
    }
    if is_multilingual:
        special["lang_to_id"] = {f"<|{code}|>": ids[code] for code in LANGUAGES}
        special["task_to_id"] = {task: ids[task] for task in ("transcribe", "translate")}
    languages = [ids[code] for code in LANGUAGES]
    return GenerationConfig(
        decoder_start_token_id=ids["startoftranscript"],
        bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"],
        pad_token_id=ids["endoftext"],
        max_length=MAX_LENGTH,
        suppress_tokens=[*control, *languages],
        begin_suppress_tokens=[220, ids["endoftext"]],
        **special,
    )


def sound(seconds: float, seed: int, rate: int = RATE) -> NDArray[np.float32]:
    """Tones that change, with noise: another recording for each seed."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    pitch = random.uniform(100, 2000, 8)[np.minimum((times * 4).astype(int) % 8, 7)]
    samples = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / rate) + 0.05 * random.standard_normal(len(times))
    return samples.astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int = RATE) -> bytes:
    """The samples as a file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


class Oracle:
    """transformers' own `generate`."""

    def __init__(self, folder: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self.vocabulary = json.loads((folder / "tokenizer.json").read_text())

    def features(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """Of one recording: padded to a window if it is shorter."""
        is_long = len(samples) > RATE * WINDOW_S
        options: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
        return self.extractor(samples, sampling_rate=RATE, return_tensors="pt", **options).input_features

    def scored(self, samples: NDArray[np.float32], **options: Any) -> list[tuple[int, float]]:
        """The greedy tokens of one window, without the prompt and the end, each with its log-probability."""
        options |= {"return_dict_in_generate": True, "output_scores": True, "force_unique_generate_call": True}
        found = self.model.generate(self.features(samples), **options)
        tokens = found.sequences[0, -len(found.scores) :].tolist()
        scores = [torch.log_softmax(scores[0].float(), dim=-1) for scores in found.scores]
        pairs = [(token, float(row[token])) for token, row in zip(tokens, scores, strict=True)]
        return [pair for pair in pairs if pair[0] != self.model.generation_config.eos_token_id]

    def tokens(self, samples: NDArray[np.float32], **options: Any) -> list[int]:
        """The greedy tokens, without the prompt and the end."""
        if not options.get("return_timestamps"):  # else it seeks by timestamps that a random model writes as text
            options["force_unique_generate_call"] = True
        generated = self.model.generate(self.features(samples), **options)[0].tolist()
        prompt_end = self.model.generation_config.no_timestamps_token_id
        if prompt_end in generated:
            generated = generated[generated.index(prompt_end) + 1 :]
        end = self.model.generation_config.eos_token_id
        while generated and generated[-1] == end:
            generated.pop()
        return generated
