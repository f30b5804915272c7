"""Tokenizers: text to token ids, and the bytes that each token id stands for.

Detokenizing concatenates bytes. A token's bytes are those that it adds to the text after another token. So text is
available token by token, log-probabilities have the exact bytes, and an incomplete UTF-8 character needs no special
case. The bytes of byte tokens come from the vocabulary, those of all others from the tokenizer's own decoder, in
context. This requires a decoder that works token by token; loading checks that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from batchline.errors import BadRequest, ModelLoadError, UnsupportedModel, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
LONG_TEXT = 2048
"""A text of this many characters holds the interpreter's lock for about a millisecond while it is tokenized."""

_NUM_PROBED = 200
"""How many tokens, spread over the vocabulary, are decoded to check whether a decoder works token by token."""


class VocabularyTokenizer(Protocol):
    """Text to token ids, and the bytes of each. Immutable, safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text. Raises: BadRequest for text that is not valid Unicode."""

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes that the token adds to a text, in UTF-8. A tokenizer may strip the first token's leading space.

        Empty for an id that the tokenizer does not know: a model's vocabulary is often larger.
        """

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""

    def added_token(self, token_id: int) -> str | None:
        """The text of a token that was added beside the vocabulary, else None."""


class Tokenizer(VocabularyTokenizer, Protocol):
    """A model's tokenizer, with its special tokens and chat templates."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and so on, as chat templates name them."""

    @property
    def chat_templates(self) -> str | Mapping[str, str] | None:
        """The model's own chat template, or several by name."""

    def num_tokens_at_least(self, text: str) -> int:
        """A lower bound of the text's number of tokens, found without tokenizing; 0 if it is not known."""


def special_token_ids(tokenizer: VocabularyTokenizer, text: str) -> tuple[int, ...]:
    """The special tokens that `text` consists of; empty if any of it is not a special token."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = "".join(tokenizer.added_token(token_id) or "" for token_id in token_ids)
    return token_ids if spelled == text and all(map(tokenizer.is_special, token_ids)) else ()


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, as `transformers` configures it."""

    def __init__(
        self,
        backend: BackendTokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: str | Mapping[str, str] | None = None,
    ) -> None:
        """Takes ownership of the backend, and turns off its truncation and padding."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_templates = chat_templates
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoders = _decoder_types(backend)
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_tokens = "ByteFallback" in decoders
        self._cache: dict[tuple[int, bool], bytes] = {}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest_token = max((len(token.encode()) for token in vocabulary), default=1)
        self._context = _context_token(vocabulary)
        self._context_text = backend.decode([self._context], skip_special_tokens=False)

    @classmethod
    def from_serialised(cls, text: str) -> HuggingFaceTokenizer:
        """A tokenizer from the text of a `tokenizer.json`, for encoding."""
        from tokenizers import Tokenizer as BackendTokenizer  # heavy, and mostly not needed

        return cls(BackendTokenizer.from_str(text), {})

    def serialised(self) -> str:
        """The text of its `tokenizer.json`."""
        return str(self._backend.to_str())

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Texts by id of the tokens added beside the vocabulary, including special tokens."""
        return self._added

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._vocab_size

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and so on, as chat templates name them."""
        return self._special_tokens

    @property
    def chat_templates(self) -> str | Mapping[str, str] | None:
        """The model's own chat template, or several by name."""
        return self._chat_templates

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; a long one releases the GIL. Raises: BadRequest for text that is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise BadRequest("The prompt is not valid Unicode: it holds a lone surrogate") from exc
        if len(text) < LONG_TEXT:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # only the library's batch methods release the lock
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def num_tokens_at_least(self, text: str) -> int:
        """The bound for a text that consists of the longest token. It avoids tokenizing megabytes only to refuse them.

        Only known for vocabularies that have every byte; in others, an unknown token may stand for text of any length.
        """
        if self._backend.normalizer is not None or not (self._is_byte_level or self._has_byte_tokens):
            return 0
        return len(text) // self._longest_token

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes that the token adds to a text, in UTF-8; the first token may lose its leading space."""
        found = self._cache.get((token_id, is_first))
        if found is None:
            found = self._cache[token_id, is_first] = self._find_bytes(token_id, is_first)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        return token_id in self._special_ids

    def added_token(self, token_id: int) -> str | None:
        """The text of a token that was added beside the vocabulary, else None."""
        return self._added.get(token_id)

    def _find_bytes(self, token_id: int, is_first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        byte = _BYTE_TOKEN.match(token) if self._has_byte_tokens else None
        if byte is not None and int(byte[1], 16) >= 0x80:
            return bytes.fromhex(byte[1])
        if is_first:
            return self._decode([token_id])
        return self._decode([self._context, token_id]).removeprefix(self._context_text.encode())

    def _decode(self, token_ids: list[int]) -> bytes:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text.encode()

    def decodes_token_by_token(self) -> bool:
        """Whether decoding a sequence equals decoding its tokens one by one, for a sample of tokens in both orders."""
        sample = self._sample_ids()
        sequence = [*sample, *reversed(sample)]
        pieces = [self.token_bytes(token_id, is_first=index == 0) for index, token_id in enumerate(sequence)]
        return b"".join(pieces).decode(errors="replace").encode() == self._decode(sequence)

    def _sample_ids(self) -> list[int]:
        """Known tokens, spread over the vocabulary, without those for single bytes, which may not be valid text."""
        step = max(1, self._vocab_size // _NUM_PROBED)
        tokens = ((token_id, self._backend.id_to_token(token_id)) for token_id in range(0, self._vocab_size, step))
        return [token_id for token_id, token in tokens if token is not None and not _BYTE_TOKEN.match(token)]


def _context_token(vocabulary: Mapping[str, int]) -> int:
    """A token to put before others when they are decoded: a letter or a word, which no decoder strips."""
    words = [token_id for token, token_id in vocabulary.items() if token.isascii() and token.isalpha()]
    return min(words or vocabulary.values(), default=0)


def _decoder_types(backend: BackendTokenizer) -> frozenset[str]:
    """The decoder's type, and the types inside it if it is a sequence."""
    if backend.decoder is None:
        return frozenset()
    decoder: Any = json.loads(backend.decoder.__getstate__())  # the only way to read it without the whole file
    members = decoder.get("decoders", [])
    return frozenset([decoder["type"], *(member["type"] for member in members)])


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins for bytes in byte-level vocabularies, as GPT-2 introduced them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with any other character (an added token) stands for itself."""
    try:
        return bytes(_BYTE_LEVEL_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def load_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
    """The tokenizer of a local folder or hub id. Raises: ModelLoadError, UnsupportedModel."""
    from transformers import AutoTokenizer  # heavy: only a model that is loaded needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as exc:
        folder = Path(model)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
            raise ModelLoadError(
                model,
                "the folder has no tokenizer (no tokenizer.json). Answers are text, so one is needed even if all "
                "prompts are token ids: copy the tokenizer's files into the folder, or name another with --tokenizer",
            ) from exc
        raise ModelLoadError(model, f"its tokenizer cannot be loaded: {first_line(exc)}") from exc
    return from_transformers(model, tokenizer)


def from_transformers(model: str, tokenizer: Any) -> HuggingFaceTokenizer:
    """A tokenizer made from one of `transformers`, which must not be used afterwards. Raises: UnsupportedModel."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(model, "its tokenizer is not one of the `tokenizers` library (no tokenizer.json)")
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ours = HuggingFaceTokenizer(backend, special_tokens, tokenizer.chat_template)
    if not ours.decodes_token_by_token():
        decoder = type(backend.decoder).__name__
        raise UnsupportedModel(model, f"its tokenizer's decoder {decoder} does not decode token by token")
    return ours
