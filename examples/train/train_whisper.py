"""Train `tiny-whisper`: a Whisper of a few hundred thousand parameters that writes down spoken digits.

    apt-get install espeak-ng
    python examples/train/train_whisper.py --out examples/models/tiny-whisper --examples examples

Writes a Hugging Face model folder (with Whisper's control tokens and timestamps, for windows of four seconds) and a few
recordings, in about seven minutes on one CPU core. Three more losses make the model learn much faster. At each
position, the encoder predicts which digit is heard and which token of the answer writes it, through linear layers that
are thrown away. Two attention heads of the decoder's first layer are trained to look at the sound of the next token. At
the end, the script prints the errors of the saved (rounded) weights on recordings that were not trained.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from spoken_digits import MARGIN_S, RATE, VOICES, WORDS, Samples, Speaker, Spoken, recorded, write_examples
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.whisper.modeling_whisper import sinusoids

WINDOW_S = 4
POSITIONS_PER_S = 50  # of the encoder; and of timestamps
NUM_POSITIONS = WINDOW_S * POSITIONS_PER_S
WIDTH = 64
MAX_LENGTH = 64
BATCH = 16
LEARNING_RATE = 3e-3
LOSSES = ("text", "times", "digits", "columns", "listening")
IGNORED = -100  # the label of a position that is not trained on
CONTROL_TOKENS = ("endoftext", "startoftranscript", "en", "translate", "transcribe")
CONTROL_TOKENS += ("startoflm", "startofprev", "nospeech", "notimestamps")

Place = tuple[float, float]
"""From one second to another."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A window. tokens: the decoder's input. labels: the token after each of them. places: where each label is heard.

    num_sounding: the samples after them are 0. marks: (3, positions of the encoder): the digit that is heard, from 1,
    and the column of its label with and without timestamps. 0 stands for none.
    """

    samples: Samples
    num_sounding: int
    tokens: list[int]
    labels: list[int]
    places: list[Place | None]
    marks: torch.Tensor


def build_tokenizer(folder: Path) -> Any:
    """Write Whisper's tokenizer, with a small vocabulary, into a folder. Returns it as transformers load it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([f" {word}" for word in WORDS] * 3, trainer)
    bpe.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in CONTROL_TOKENS])
    times = range(NUM_POSITIONS + 1)
    bpe.add_tokens([AddedToken(f"<|{time / POSITIONS_PER_S:.2f}|>", normalized=False) for time in times])
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    others = [f"<|{name}|>" for name in CONTROL_TOKENS[1:]]
    PreTrainedTokenizerFast(tokenizer_object=bpe, **ends, additional_special_tokens=others).save_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(tokenizer: Any) -> Any:
    ids = control_ids(tokenizer)
    end = ids["endoftext"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=NUM_POSITIONS,
        max_target_positions=MAX_LENGTH,
        decoder_start_token_id=ids["startoftranscript"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    )
    model = WhisperForConditionalGeneration(config)
    # A timestamp is told by where the decoder listens: its embedding starts as the encoder's mark of that position.
    marks = sinusoids(NUM_POSITIONS + 1, WIDTH)
    model.model.decoder.embed_tokens.weight.data[ids["notimestamps"] + 1 :] = 0.1 * marks
    control = [ids[name] for name in CONTROL_TOKENS[1:-1]]
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids["startoftranscript"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        max_length=MAX_LENGTH,
        suppress_tokens=control,
        begin_suppress_tokens=[tokenizer.convert_tokens_to_ids("Ġ")],
        no_timestamps_token_id=ids["notimestamps"],
        prev_sot_token_id=ids["startofprev"],
        is_multilingual=True,
        max_initial_timestamp_index=POSITIONS_PER_S,
        return_timestamps=False,
        alignment_heads=[[0, 0], [0, 1]],  # those that listen, see `_listening_loss`
        task="transcribe",
        lang_to_id={"<|en|>": ids["en"]},
        task_to_id={task: ids[task] for task in ("transcribe", "translate")},
    )
    return model


def control_ids(tokenizer: Any) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in CONTROL_TOKENS}


class SampleMaker:
    """Makes recordings of phrases and the tokens that the model is to write for them."""

    def __init__(self, tokenizer: Any, speakers: list[Speaker], rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._ids = control_ids(tokenizer)
        self._speakers = speakers
        self._rng = rng

    def sample(self, max_phrases: int) -> Sample:
        """A window with up to so many phrases, or a full one whose last phrase may be cut off."""
        rng = self._rng
        speaker = rng.choice(self._speakers)
        number = rng.randint(1, max_phrases) if rng.random() > 0.03 else 0
        samples, spoken = recorded([speaker.phrase() for _ in range(number)], rng, WINDOW_S)
        timed, plain = self._timed(spoken), self._plain(spoken)
        has_timestamps = any(one.is_cut for one in spoken) or rng.random() < 0.5
        prompt = ["startoftranscript", "en", "transcribe"] + ["notimestamps"] * (not has_timestamps)
        first = "en" if spoken else "nospeech"
        written = timed if has_timestamps else plain
        labels = [self._ids[first]] + [IGNORED] * (len(prompt) - 2) + [token for token, _ in written]
        tokens = [self._ids[name] for name in prompt] + labels[len(prompt) - 1 : -1]
        places = [None] * (len(prompt) - 1) + [place for _, place in written]
        marks = torch.zeros(3, NUM_POSITIONS, dtype=torch.long)
        for one in spoken:
            for digit, place in zip(one.phrase.digits, one.word_times(), strict=True):
                marks[0, positions(place)] = 1 + digit
        for row, begin, columns in ((1, 2, timed), (2, 3, plain)):
            for column, (_, place) in enumerate(columns, begin):
                if place is not None:
                    marks[row, positions(place)] = column
        end = spoken[-1].end if spoken else 0.0
        num_sounding = int(RATE * rng.uniform(end, WINDOW_S)) if end < WINDOW_S and rng.random() < 0.7 else len(samples)
        samples[num_sounding:] = 0
        return Sample(samples, num_sounding, tokens, labels, places, marks)

    def _plain(self, spoken: list[Spoken]) -> list[tuple[int, Place | None]]:
        """The words and the end token, and where they are heard."""
        written: list[tuple[int, Place | None]] = []
        for one in spoken:
            written += zip(self._words(one), one.word_times(), strict=True)
        end = spoken[-1].end - MARGIN_S if spoken else 0.0
        return [*written, (self._ids["endoftext"], (end, end + 0.4))]

    def _timed(self, spoken: list[Spoken]) -> list[tuple[int, Place | None]]:
        """The same with timestamps. A phrase that is cut off has only its first one, as in Whisper."""
        if not spoken:
            return [(self._timestamp(0.0), None), (self._ids["endoftext"], None)]
        written: list[tuple[int, Place | None]] = []
        for one in spoken:
            start = (one.start, one.start + MARGIN_S)
            written.append((self._timestamp(one.start), start))
            if not one.is_cut:
                written += zip(self._words(one), one.word_times(), strict=True)
                written.append((self._timestamp(one.end), (one.end - MARGIN_S, one.end)))
        end = spoken[-1].start + MARGIN_S if spoken[-1].is_cut else spoken[-1].end
        return [*written, (self._ids["endoftext"], (end, end + 0.3))]

    def _words(self, one: Spoken) -> list[int]:
        words: list[int] = self._tokenizer.encode(one.phrase.text, add_special_tokens=False)
        return words

    def _timestamp(self, seconds: float) -> int:
        return self._ids["notimestamps"] + 1 + min(NUM_POSITIONS, round(seconds * POSITIONS_PER_S))


def positions(place: Place) -> slice:
    """The encoder's positions in a part of the window; at least one, if it begins in the window."""
    start, end = (round(second * POSITIONS_PER_S) for second in place)
    return slice(start, max(start + 1, end))


class Listener:
    """Computes the losses. Only training needs it."""

    def __init__(self, model: Any, rng: random.Random) -> None:
        self._model = model
        self._rng = rng
        self._extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, size) for size in (1 + len(WORDS), MAX_LENGTH, MAX_LENGTH))
        self._attention = model.model.decoder.layers[0].encoder_attn
        self._projected: dict[str, torch.Tensor] = {}
        for name in ("q_proj", "k_proj"):
            projection = getattr(self._attention, name)
            projection.register_forward_hook(lambda _, __, output, name=name: self._projected.update({name: output}))

    def losses(self, batch: list[Sample], blur: float) -> list[torch.Tensor]:
        """Of text and control tokens, of timestamps, of digits and columns that the encoder tells, and of listening.

        blur: the standard deviation of timestamps, so that neighbours are nearly right.
        """
        states = self._model.model.encoder(self._features(batch)).last_hidden_state
        width = max(len(sample.tokens) for sample in batch)
        tokens = torch.tensor([sample.tokens + [0] * (width - len(sample.tokens)) for sample in batch])
        labels = torch.tensor([sample.labels + [IGNORED] * (width - len(sample.labels)) for sample in batch])
        hidden = self._model.model.decoder(input_ids=tokens, encoder_hidden_states=states, use_cache=False)
        is_trained = labels != IGNORED
        labels = labels[is_trained]
        logprobs = log_softmax(self._model.proj_out(hidden.last_hidden_state[is_trained]), dim=-1)
        first = self._model.generation_config.no_timestamps_token_id + 1
        is_time = labels >= first
        text_loss = -logprobs[~is_time].gather(1, labels[~is_time, None]).mean()
        distances = torch.arange(first, logprobs.shape[1])[None] - labels[is_time, None]
        shares = torch.softmax(-((distances / blur) ** 2) / 2, dim=-1)
        time_loss = -(shares * logprobs[is_time, first:]).sum() / max(1, int(is_time.sum()))
        marks = torch.stack([sample.marks for sample in batch])
        digits, *columns = (
            cross_entropy(head(states).flatten(0, 1), marks[:, row].flatten()) for row, head in enumerate(self.heads)
        )
        return [text_loss, time_loss, digits, sum(columns) / 2, self._listening_loss(batch)]

    def _features(self, batch: list[Sample]) -> torch.Tensor:
        """After its end, a recording is silent, or its features are 0 as in the last window of a long one."""
        found = self._extractor([sample.samples for sample in batch], sampling_rate=RATE, return_tensors="pt")
        features: torch.Tensor = found.input_features
        for row, sample in zip(features, batch, strict=True):
            if self._rng.random() < 0.4:
                row[:, sample.num_sounding // self._extractor.hop_length :] = 0
        return features

    def _listening_loss(self, batch: list[Sample]) -> torch.Tensor:
        """How much of the attention of two heads is elsewhere than where the next token is heard."""
        size = self._attention.head_dim
        queries, keys = (
            self._projected[name][..., : 2 * size].unflatten(-1, (2, size)) for name in ("q_proj", "k_proj")
        )
        scores = log_softmax(torch.einsum("bthd,bshd->bths", queries, keys) * size**-0.5, dim=-1)
        wanted = torch.zeros(len(batch), scores.shape[1], NUM_POSITIONS, dtype=torch.bool)
        for row, sample in enumerate(batch):
            for column, place in enumerate(sample.places):
                if place is not None:
                    wanted[row, column, positions(place)] = True
        is_heard = wanted.any(-1)
        hits = scores[is_heard].masked_fill(~wanted[is_heard][:, None], -torch.inf)
        return -hits.logsumexp(-1).mean()


def train(model: Any, maker: SampleMaker, num_steps: int) -> None:
    """The first steps hear single phrases."""
    listener = Listener(model, random.Random(0))
    parameters = [*(p for p in model.parameters() if p.requires_grad), *listener.heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=0.1, cycle_momentum=False
    )
    start = time.process_time()
    for step in range(1, num_steps + 1):
        done = step / num_steps
        max_phrases = 1 if done < 0.15 else 2 if done < 0.4 else 3
        batch = [maker.sample(max_phrases) for _ in range(BATCH)]
        losses = listener.losses(batch, blur=1.0 if done < 0.5 else 0.5)
        optimizer.zero_grad()
        text, times, digits, columns, listening = losses
        (text + 0.3 * times + digits + columns + 0.5 * listening).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            figures = ", ".join(f"{name} {loss.item():.4f}" for name, loss in zip(LOSSES, losses, strict=True))
            print(f"step {step}: {figures}, {time.process_time() - start:.0f} CPU s", flush=True)


@torch.no_grad()
def report(folder: Path, rng: random.Random, num_recordings: int = 100) -> None:
    """Print the saved model's errors on new recordings of each voice, greedily decoded by transformers."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    for voice in VOICES:
        speaker = Speaker(voice, 4, rng)
        recordings = [recorded([speaker.phrase(), speaker.phrase()], rng, WINDOW_S) for _ in range(num_recordings)]
        recordings = [each for each in recordings if not each[1][-1].is_cut]
        features = extractor([samples for samples, _ in recordings], sampling_rate=RATE, return_tensors="pt")
        expected = ["".join(one.phrase.text for one in said).split() for _, said in recordings]
        for timestamps in (False, True):
            tokens = model.generate(features.input_features, return_timestamps=timestamps)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            errors = sum(word_errors(text.split(), right) for text, right in zip(texts, expected, strict=True))
            print(f"{voice}, timestamps {timestamps}: {errors} wrong of {sum(map(len, expected))} words", flush=True)


def word_errors(found: list[str], right: list[str]) -> int:
    """The least number of words to insert, delete or replace."""
    row = list(range(len(right) + 1))
    for i, word in enumerate(found, 1):
        before, row = row, [i]
        for j, other in enumerate(right, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--examples", type=Path, help="the folder for recordings and the batch file with them")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--takes", type=int, default=12, help="of each digit by each voice")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    if arguments.examples is not None:
        write_examples(arguments.examples)
    tokenizer = build_tokenizer(arguments.out)
    model = build_model(tokenizer)
    speakers = [Speaker(voice, arguments.takes, rng) for voice in VOICES]
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, SampleMaker(tokenizer, speakers, rng), arguments.steps)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    WhisperFeatureExtractor(chunk_length=WINDOW_S).save_pretrained(arguments.out)
    report(arguments.out, random.Random(arguments.seed + 1))


if __name__ == "__main__":
    main()
