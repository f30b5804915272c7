"""Train `tiny-vision`: an Idefics 3 of 650,112 parameters that names the shapes of simple drawings.

    python examples/train/train_vision.py --out OUT --examples examples/images.jsonl
    python examples/train/train_vision.py --start OUT --out OUT --steps 700 --rate 1e-3 --seed 1

Writes a Hugging Face model folder (tokenizer, chat template, image processor, bfloat16 weights) and a batch file with
drawings in it. Both parts take twelve minutes on one CPU core. Besides the answers, the features of each picture are
trained to tell its colour, shape and count, and which of them have a shape's centre, by linear layers that are thrown
away: answers alone teach much slower. The saved (rounded) weights are measured on drawings that were not trained, and
the numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawings import COLOURS, COUNTS, QUESTIONS, SHAPES, Drawing, Place, example_lines
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerFast,
)

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<end_of_utterance>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = (PAD, BEGIN, END, *ROLES, IMAGE, AROUND, GLOBAL)
IMAGE_SIDE, PATCH_SIZE, SCALE = 64, 8, 2
NUM_CELLS = IMAGE_SIDE // PATCH_SIZE // SCALE  # in a row; the model has a feature for each
NUM_FEATURES = NUM_CELLS**2
IMAGE_TEXT = f"{AROUND}{GLOBAL}{IMAGE * NUM_FEATURES}{AROUND}"  # as Idefics3Processor writes it
VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024
IGNORED = -100  # the label of a position that is not trained on
NUM_TRAITS = (len(COUNTS), len(COLOURS), len(SHAPES))

SYSTEM = "You are a helpful assistant."
NO_PICTURE = "Please send me a picture of some shapes."
GREETINGS = ("Hello!", "Hello world!", "Hi", "Who are you?", "What can you do?", "Tell me a joke.")

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{{- '<image>' if part['type'] == 'image' else part['text'] }}
{%- endfor %}
{%- endif %}
{{- '<end_of_utterance>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One training text. `labels` is `tokens` with IGNORED where the model is not asked to predict."""

    tokens: list[int]
    labels: list[int]
    drawing: Drawing | None = None
    places: list[Place] | None = None
    picture: Image.Image | None = None


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are in the vocabulary, so any text can be encoded and comes back unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = [Drawing(*traits) for traits in np.ndindex(*NUM_TRAITS)]
    answers = [drawing.answer(question) for drawing in every for question in QUESTIONS]
    questions = [wording for wordings in QUESTIONS.values() for wording in wordings]
    bpe.train_from_iterator([*answers, *(questions * 20), *GREETINGS, NO_PICTURE, SYSTEM], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=SCALE,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        vision_config={
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIDE,
            "patch_size": PATCH_SIZE,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_LENGTH,
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
    return Idefics3ForConditionalGeneration(config)


class SampleMaker:
    """Makes conversations about new drawings."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._assistant, self._end = tokenizer.convert_tokens_to_ids([ROLES[2], END])

    def sample(self) -> Sample:
        """One conversation: one or two questions about a drawing, or now and then no drawing."""
        rng = self._rng
        messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.2 else []
        if rng.random() < 0.04:
            wordings = [*GREETINGS, *(wording for wordings in QUESTIONS.values() for wording in wordings)]
            return self._sample([*messages, *_turn(rng.choice(wordings), NO_PICTURE)])
        drawing = Drawing.drawn(rng)
        for number, question in enumerate(rng.sample(list(QUESTIONS), k=rng.choice((1, 1, 1, 2)))):
            image = "" if number else rng.choice(("before", "after"))
            messages += _turn(rng.choice(QUESTIONS[question]), drawing.answer(question), image)
        return self._sample(messages, drawing)

    def question(self, drawing: Drawing, question: str) -> Sample:
        """One question in its first wording, the picture before it."""
        messages = _turn(QUESTIONS[question][0], drawing.answer(question), "before")
        return self._sample(messages, drawing)

    def _sample(self, messages: list[dict[str, Any]], drawing: Drawing | None = None) -> Sample:
        """Only what the assistant says is trained on."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False).replace(IMAGE, IMAGE_TEXT)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        labels, is_answer = [], False
        for token in tokens:
            labels.append(token if is_answer else IGNORED)
            is_answer = token == self._assistant or (is_answer and token != self._end)
        if drawing is None:
            return Sample(tokens, labels)
        places = drawing.places(self._rng)
        return Sample(tokens, labels, drawing, places, drawing.picture(self._rng, places))


def _turn(question: str, answer: str, image: str = "") -> list[dict[str, Any]]:
    """A question with its answer. image: whether the picture stands before or after the question."""
    text, picture = {"type": "text", "text": question}, {"type": "image"}
    content = {"before": [picture, text], "after": [text, picture]}.get(image, [text])
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def pixels(pictures: list[Image.Image]) -> torch.Tensor:
    """(pictures, 1, 3, side, side), as the image processor makes them."""
    resized = [picture.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.LANCZOS) for picture in pictures]
    array = np.stack([np.asarray(picture, dtype=np.float32) for picture in resized])
    return torch.from_numpy(array / 127.5 - 1).permute(0, 3, 1, 2)[:, None].contiguous()


def predictions(model: Any, batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (num_trained, vocab) and targets (num_trained,) of the trained positions, and the pictures' features.

    Padding stands at the right and attention is causal, so that no mask is needed.
    """
    width = max(len(sample.tokens) for sample in batch)
    tokens = torch.tensor([sample.tokens + [0] * (width - len(sample.tokens)) for sample in batch])
    labels = torch.tensor([sample.labels + [IGNORED] * (width - len(sample.labels)) for sample in batch])
    pictures = [sample.picture for sample in batch if sample.picture is not None]
    features = model.model.get_image_features(pixels(pictures).to(model.dtype)).pooler_output
    features = torch.stack(list(features))
    embedded = model.get_input_embeddings()(tokens)
    embedded[tokens == model.config.image_token_id] = features.flatten(0, 1)
    hidden = model.model.text_model(inputs_embeds=embedded[:, :-1], use_cache=False).last_hidden_state
    is_trained = labels[:, 1:] != IGNORED
    return model.lm_head(hidden[is_trained]), labels[:, 1:][is_trained], features


class Traits(nn.Module):
    """Tells count, colour and shape from a picture's features, and where shapes are. Only training needs it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, number) for number in NUM_TRAITS)
        self.has_centre = nn.Linear(width, 1)

    def loss(self, features: torch.Tensor, batch: list[Sample]) -> torch.Tensor:
        """features: (pictures, number, width)."""
        drawings = [sample.drawing for sample in batch if sample.drawing is not None]
        targets = torch.tensor([[each.count, each.colour, each.shape] for each in drawings])
        mean = features.mean(1)
        traits = sum(cross_entropy(head(mean), target) for head, target in zip(self.heads, targets.T, strict=True))
        centres = torch.zeros(features.shape[:2])
        for row, sample in enumerate(sample for sample in batch if sample.places is not None):
            for x, y, _ in sample.places or ():
                centres[row, int(y * NUM_CELLS) * NUM_CELLS + int(x * NUM_CELLS)] = 1
        found = self.has_centre(features)[..., 0]
        return traits + 4 * binary_cross_entropy_with_logits(found, centres)


def train(model: Any, maker: SampleMaker, num_steps: int, batch_size: int, rate: float) -> None:
    """rate: the highest learning rate."""
    traits = Traits(model.config.text_config.hidden_size)
    parameters = [*model.parameters(), *traits.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=num_steps, pct_start=0.1, cycle_momentum=False
    )
    start = time.process_time()
    for step in range(1, num_steps + 1):
        batch = [maker.sample() for _ in range(batch_size)]
        logits, targets, features = predictions(model, batch)
        answers = cross_entropy(logits, targets)
        trait_loss = traits.loss(features, batch)
        optimizer.zero_grad()
        (answers + 0.5 * trait_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            figures = f"loss {answers.item():.4f}, of the traits {trait_loss.item():.4f}"
            print(f"step {step}/{num_steps}: {figures}, {time.process_time() - start:.0f} CPU s", flush=True)


@torch.no_grad()
def report(folder: Path, maker: SampleMaker, num_drawings: int = 500) -> None:
    """Print how often the saved model's whole answer is right, the end token included, on new drawings.

    All next tokens are compared in one pass: while they agree, greedy decoding sees the very same prefix.
    """
    drawings = [Drawing.drawn(maker._rng) for _ in range(num_drawings)]
    for dtype in (torch.float32, torch.bfloat16):
        model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        for question in QUESTIONS:
            right = 0
            for first in range(0, num_drawings, 50):
                samples = [maker.question(drawing, question) for drawing in drawings[first : first + 50]]
                logits, targets, _ = predictions(model, samples)
                lengths = [sum(label != IGNORED for label in sample.labels) for sample in samples]
                right += sum(bool(one.all()) for one in (logits.argmax(-1) == targets).split(lengths))
            print(f"{dtype}, {question}: {right / num_drawings:.1%} of {num_drawings} new drawings", flush=True)


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": IMAGE_SIDE},
        "max_image_size": {"longest_edge": IMAGE_SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": NUM_FEATURES}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--examples", type=Path, help="the batch file to write")
    parser.add_argument("--start", type=Path, help="a model folder to train further, with another seed")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    if arguments.examples is not None:
        arguments.examples.write_text("".join(json.dumps(line) + "\n" for line in example_lines()))
    tokenizer = build_tokenizer()
    if arguments.start is None:
        model = build_model(tokenizer)
    else:
        model = Idefics3ForConditionalGeneration.from_pretrained(arguments.start, dtype=torch.float32).train()
    maker = SampleMaker(tokenizer, random.Random(arguments.seed))
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    train(model, maker, arguments.steps, arguments.batch_size, arguments.rate)
    save(arguments.out, model, tokenizer)
    report(arguments.out, SampleMaker(tokenizer, random.Random(1000 + arguments.seed)))


if __name__ == "__main__":
    main()
