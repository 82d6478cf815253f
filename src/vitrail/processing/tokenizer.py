"""Tokenizer: load any tokenizer.json, or train a small byte-level BPE.

A typed wrapper around the `tokenizers` library. It adds errors that name the file, literal encoding of special tokens
in untrusted text, offsets suitable for loss masks, and an exact streaming decoder.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from vitrail.errors import TextError
from vitrail.processing.tokenizer_check import check_tokenizer
from vitrail.processing.tokenizer_files import (
    TEMPLATE_FOLDER,
    ChatTemplates,
    describe_invalid_tokenizer,
    find_model_tokens,
    format_json,
    read_bytes,
    read_json,
    read_tokenizer_files,
)

CharSpan = tuple[int, int]  # characters [start, end) of a text
_T = TypeVar("_T")

MAX_VOCAB_SIZE = 2**20  # maximum vocab_size for training; the trainer allocates memory for all tokens at once
_BYTE_ALPHABET_SIZE = 256  # size of the byte alphabet of a byte-level vocabulary
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token in SentencePiece vocabularies
_ANCHOR = 0x100000  # first code point of the last private-use plane
_PRINTABLE_MAP = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class _Twin(NamedTuple):
    """Copy of a tokenizer that encodes special tokens as plain text and uses private stand-ins for them."""

    rust: tokenizers.Tokenizer
    anchors: dict[str, str]  # special token → stand-in of the same length, which keeps offsets valid
    origin: dict[int, int]  # id of the stand-in → id of the special token


class Tokenizer:
    """Convert text to token ids and back.

    named_special_tokens  special tokens of the roles bos, eos, unk and pad
    stop_ids              ids that end a generation
    chat_template         Jinja source of the tokenizer's chat template (see `ChatTemplate.from_tokenizer`)
    chat_template_file    file that the template was read from
    named_chat_templates  further chat templates of the model folder by name
    special_tokens        special token → id
    vocab_size            rows that an embedding table needs
    """

    def __init__(
        self,
        rust: tokenizers.Tokenizer,
        named_special_tokens: Mapping[str, str] | None = None,
        chat_template: str | ChatTemplates | None = None,
        stop_ids: Iterable[int] = (),
    ):
        # A stored length limit would truncate or pad texts silently.
        rust.no_truncation()
        rust.no_padding()
        _keep_spaces_in_offsets(rust.post_processor)
        self._rust = rust
        self.named_special_tokens = dict(named_special_tokens or {})
        self.set_chat_templates(chat_template)
        self._update_vocabulary()
        self.add_special_tokens([t for t in self.named_special_tokens.values() if rust.token_to_id(t) is None])
        self.stop_ids = tuple(dict.fromkeys([*([] if self.eos_token_id is None else [self.eos_token_id]), *stop_ids]))

    def set_chat_templates(self, templates: str | ChatTemplates | None) -> None:
        """Set the chat template, or all those of a model folder."""
        found = templates if isinstance(templates, ChatTemplates) else ChatTemplates(templates)
        self.chat_template, self.chat_template_file, self.named_chat_templates = found

    # ── loading, training and saving ──────────────────────────────────────────────────────────────────────────────

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a tokenizer.json, or a folder that contains one.

        The files beside it define the special tokens, the chat template and the stop ids.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        data = read_bytes(file, "give a tokenizer.json, or a folder that contains one")
        check_tokenizer(file, data)
        try:
            rust = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more precise
            raise describe_invalid_tokenizer(file, data, str(error)) from None
        if file.name != "tokenizer.json":
            return cls(rust)
        found = read_tokenizer_files(file.parent)
        tokens = find_model_tokens(file.parent)
        if tokens.text:
            rust = _add_text_tokens(rust, tokens.text, tokens.added)
        loaded = cls(rust, found.named_special_tokens, found.chat_templates, found.stop_ids)
        loaded.add_special_tokens([token for token in tokens.special if rust.token_to_id(token) is not None])
        return loaded

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        special_tokens: Sequence[str] = ("<|endoftext|>",),
        bos: str | None = None,
        eos: str | None = "<|endoftext|>",
        pad: str | None = None,
        progress: bool = False,
    ) -> Self:
        """Train a byte-level BPE. Every string round-trips, and training is deterministic.

        Special tokens have the first ids. Encoding with `add_special_tokens=True` prepends `bos`. A small corpus can
        yield fewer than the requested tokens; the attribute `vocab_size` is the actual size.
        """
        named = {role: token for role, token in (("bos", bos), ("eos", eos), ("pad", pad)) if token is not None}
        tokens = list(dict.fromkeys([*special_tokens, *named.values()]))
        _check_tokens(tokens)
        least = _BYTE_ALPHABET_SIZE + len(tokens)
        if vocab_size < least:
            raise TextError(
                f"vocab_size {vocab_size} is too small: {_BYTE_ALPHABET_SIZE} bytes and "
                f"{len(tokens)} special tokens need {least}",
                f"give at least {least}; a few thousand are enough for captions",
            )
        if vocab_size > MAX_VOCAB_SIZE:
            raise TextError(f"vocab_size {vocab_size:,} is too large", f"give at most {MAX_VOCAB_SIZE:,}")
        rust = tokenizers.Tokenizer(models.BPE())
        # One digit per token keeps numbers regular. The byte-level step splits words as in GPT-2.
        rust.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        rust.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=tokens,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=progress,
        )
        rust.train_from_iterator((_check_unicode(text) for text in texts), trainer)
        if bos is not None:
            rust.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, rust.token_to_id(bos))]
            )
        return cls(rust, named)

    def save(self, folder: str | Path) -> None:
        """Save tokenizer.json and the files beside it, for `load` and transformers' PreTrainedTokenizerFast."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": token for role, token in self.named_special_tokens.items()},
        }
        files = {"tokenizer.json": self._rust.to_str(pretty=True), "tokenizer_config.json": format_json(config)}
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template
        files |= {f"{TEMPLATE_FOLDER}/{name}.jinja": source for name, source in self.named_chat_templates.items()}
        if self.stop_ids != (self.eos_token_id,) and self.stop_ids:
            # The file may hold other generation settings of the model: change only eos_token_id.
            generation = read_json(folder / "generation_config.json") | {"eos_token_id": list(self.stop_ids)}
            files["generation_config.json"] = format_json(generation)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise TextError(f"the tokenizer cannot be saved to {folder}: {error}", "give a writable folder") from None

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._rust.to_str()

    # ── vocabulary ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad")

    def token_to_id(self, token: str) -> int:
        """Return the id of a token in the vocabulary's spelling."""
        found = self._rust.token_to_id(token)
        if found is None:
            known = ", ".join(list(self.special_tokens)[:8]) or "none"
            raise TextError(
                f"the tokenizer has no token {token!r}",
                f"call add_special_tokens([{token!r}]); current special tokens: {known}",
            )
        return found

    def id_to_token(self, id: int) -> str:
        """Return the token of an id in the vocabulary's spelling."""
        found = self._rust.id_to_token(id) if 0 <= id < self.vocab_size else None
        if found is None:
            raise TextError(
                f"id {id} is not in the vocabulary (ids 0 to {self.vocab_size - 1})",
                "decode with the tokenizer that encoded the ids; remove image codes and padding labels",
            )
        return found

    def to_readable(self, id: int) -> str:
        """Return a printable form of a token: spaces as ·, newlines as ⏎, unprintable characters as bytes."""
        token = self.id_to_token(id)
        if byte := _BYTE_PIECE.fullmatch(token):
            return f"⟨{byte[1]}⟩"
        if token not in self._added:
            if isinstance(self._rust.decoder, decoders.ByteLevel) and all(char in BYTE_OF_CHAR for char in token):
                data = bytes(BYTE_OF_CHAR[char] for char in token)
                token = data.decode(errors="replace")
                if "�" in token:
                    return _format_bytes(data)
            token = token.replace("▁", " ")
        return "".join(c if c.isprintable() else _format_bytes(c.encode()) for c in token.translate(_PRINTABLE_MAP))

    def add_special_tokens(self, tokens: Sequence[str]) -> list[int]:
        """Add special tokens (`<image>`, `<|vision_start|>` …) and return their ids. Existing tokens keep their ids."""
        _check_tokens(tokens)
        if new := [token for token in tokens if token not in self.special_tokens]:
            self._rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])
            self._update_vocabulary()
        return [self.token_to_id(token) for token in tokens]

    # ── encoding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(
        self, text: str, *, add_special_tokens: bool = False, literal: bool | Sequence[CharSpan] = False
    ) -> list[int]:
        """Encode a text to ids.

        add_special_tokens  add the tokens that the tokenizer puts around a text (bos, eos)
        literal             for untrusted text: encode special tokens such as `<|im_end|>` as plain text. With
                            character spans, only the special tokens that touch a span are plain text.
        """
        return self.encode_spans(text, add_special_tokens=add_special_tokens, literal=literal)[0]

    def encode_spans(
        self, text: str, *, add_special_tokens: bool = False, literal: bool | Sequence[CharSpan] = False
    ) -> tuple[list[int], list[CharSpan]]:
        """Encode a text to ids and their character spans. The tokens of a split character share its span."""
        hidden = build_span_mask(text, [(0, len(text))] if literal is True else literal or [])
        if not any(hidden) or not (
            self._has_normalized_specials
            or any(any(hidden[slice(*m.span())]) for m in self._find_special_matches(text))
        ):
            found = _encode(self._rust.encode, text, add_special_tokens=add_special_tokens)
            return found.ids, found.offsets
        twin = self._get_twin()
        found = _encode(
            twin.rust.encode, self._replace_special_tokens(text, hidden), add_special_tokens=add_special_tokens
        )
        text_ids = {i for i, added in zip(found.ids, found.special_tokens_mask, strict=True) if not added}
        unknown = {self.unk_token_id, self.special_tokens.get(getattr(self._rust.model, "unk_token", None) or "")}
        if leaked := text_ids & set(self.special_tokens.values()) - unknown:
            raise TextError(
                f"the tokenizer cannot encode {self.id_to_token(leaked.pop())!r} as plain text: its model has it "
                f"as a word",
                "remove it from the text",
            )
        return [twin.origin.get(i, i) for i in found.ids], found.offsets

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Encode many texts in parallel, on all cores."""
        found = _encode(self._rust.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def find_special_tokens(self, text: str) -> list[int]:
        """Return the positions where a special token starts, including tokens cut off by the end of the text."""
        complete = {found.start() for found in self._find_special_matches(text)}
        longest = max(map(len, self.special_tokens), default=0)
        ends = range(max(0, len(text) - longest + 1), len(text))
        partial = {at for at in ends if any(token.startswith(text[at:]) for token in self.special_tokens)}
        return sorted(complete | partial)

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = False) -> str:
        numbers = [index(i) for i in ids]
        for i in numbers:
            self.id_to_token(i)  # raise an error for unknown ids, which the library drops silently
        return _call(self._rust.decode, numbers, skip_special_tokens=skip_special_tokens)

    def create_decoder(self, *, skip_special_tokens: bool = False) -> "StreamingDecoder":
        """Return a streaming decoder, which takes ids one by one."""
        return StreamingDecoder(self, skip_special_tokens)

    def decode_stream(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = False) -> Iterator[str]:
        """Yield text as the ids arrive, in whole characters. The concatenation equals `decode(ids)`."""
        decoder = self.create_decoder(skip_special_tokens=skip_special_tokens)
        for id in ids:
            if text := decoder.push(id):
                yield text
        if text := decoder.finish():
            yield text

    # ── internals ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _update_vocabulary(self) -> None:
        """Update the cached attributes after the vocabulary changed."""
        added = self._rust.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values()}
        #: special token → id
        self.special_tokens = {token.content: i for i, token in added.items() if token.special and token.content}
        #: rows that an embedding table needs: the largest id + 1, because ids can have gaps
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # Like the tokenizer, this pattern matches the longest special token at the leftmost position.
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # The pattern can miss spellings of a special token that is matched after normalization.
        self._has_normalized_specials = any(self._added[token].normalized for token in self.special_tokens)
        self._twin: _Twin | None = None

    def _named_id(self, role: str) -> int | None:
        token = self.named_special_tokens.get(role)
        return None if token is None else self.token_to_id(token)

    def _find_special_matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yield every special token in the text, including one that starts inside another."""
        at = 0
        while found := self._pattern.search(text, at):
            yield found
            at = found.start() + 1

    def _replace_special_tokens(self, text: str, hidden: bytearray) -> str:
        """Return the text with stand-ins for the special tokens that touch no hidden character."""
        anchors = self._get_twin().anchors
        if any(stand_in in text for stand_in in anchors.values()):
            raise TextError(
                "the text contains private-use characters that are reserved for special tokens",
                f"remove the characters from U+{_ANCHOR:X} on",
            )
        parts, at, start = [], 0, 0
        while found := self._pattern.search(text, at):
            if any(hidden[slice(*found.span())]):
                at = found.start() + 1
            else:
                parts += [text[start : found.start()], anchors[found[0]]]
                at = found.end()
                start = at
        return "".join([*parts, text[start:]])

    def _get_twin(self) -> _Twin:
        """Create the twin on first use. It is a copy, so that other threads see no changed setting."""
        if self._twin is None:
            try:
                rust = tokenizers.Tokenizer.from_str(self._rust.to_str())
            except Exception as error:  # merges of tokens that the vocabulary lacks, which the library keeps in memory
                raise TextError(f"the tokenizer cannot be copied: {error}", "do not use this tokenizer") from None
            rust.encode_special_tokens = True
            anchors = {token: chr(_ANCHOR + n) * len(token) for n, token in enumerate(self.special_tokens)}
            rust.add_tokens([_make_stand_in(self._added[token], anchor) for token, anchor in anchors.items()])
            stood_for = {anchor: self.special_tokens[token] for token, anchor in anchors.items()}
            added = {i: token.content for i, token in rust.get_added_tokens_decoder().items()}
            origin = {i: stood_for[token] for i, token in added.items() if token in stood_for}
            self._twin = _Twin(rust, anchors, origin)
        return self._twin


class StreamingDecoder:
    """Streaming decoder: call `push` for each id and `finish` at the end.

    Returned text never changes. The decoder holds back bytes of incomplete characters. It decodes each id with some
    context, because some tokenizers treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_tokens.values() if skip_special_tokens else ())
        self._window: list[int] = []  # ids still needed: context, then pending ids
        self._context = 0  # number of context ids in the window
        self._given = 0  # number of characters of the window's text already returned

    def push(self, id: SupportsIndex) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        id = index(id)
        if id in self._skipped:
            return ""
        text = self._tokenizer.decode([*self._window, id])
        self._window.append(id)
        # A run of byte tokens is valid only as a whole, and � can still become a character: wait for the end.
        if text.endswith("�") or _BYTE_PIECE.fullmatch(self._tokenizer.id_to_token(id)):
            return ""
        fresh = text[self._given :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._tokenizer.decode(self._window))
        return fresh

    def finish(self) -> str:
        """Return the text held back, and reset the decoder."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._context, self._given = [], 0, 0
        return rest


def build_span_mask(text: str, spans: Sequence[CharSpan]) -> bytearray:
    """Return one byte per character: 1 inside a span, 0 outside."""
    marks = bytearray(len(text))
    for start, end in spans:
        marks[start:end] = b"\1" * (end - start)
    return marks


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to bytes: printable bytes first, then the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(_BYTE_ALPHABET_SIZE) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(_BYTE_ALPHABET_SIZE + n): byte for n, byte in enumerate(rest)}


BYTE_OF_CHAR = _byte_alphabet()


def _format_bytes(data: bytes) -> str:
    return f"⟨{data.hex(' ').upper()}⟩"


def _add_text_tokens(rust: tokenizers.Tokenizer, text: Sequence[str], special: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer in which tokens of texts are not special. If it lacks them, add them and special tokens."""
    if rust.token_to_id(text[0]) is None:
        rust.add_tokens([AddedToken(token, special=False, normalized=False) for token in text])
        rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return rust
    content = json.loads(rust.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in text
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _make_stand_in(token: AddedToken, anchor: str) -> AddedToken:
    """Return the token with another spelling, not special, so that the twin still matches it."""
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(anchor, special=False, **flags)


def _keep_spaces_in_offsets(post: Any) -> None:
    """Disable offset trimming, with which a token of spaces would have an empty span."""
    for part in post if isinstance(post, processors.Sequence) else [post]:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False


def _call(call: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call the library. A panic, which is no Exception, becomes a TextError."""
    try:
        return call(*args, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TextError(f"the tokenizers library fails: {error!s:.200}", "use another tokenizer") from None


def _encode(call: Callable[..., _T], text: Any, **options: Any) -> _T:
    try:
        return _call(call, text, **options)
    except TextError:
        raise
    except Exception as error:  # the library raises nothing more precise
        for one in [text] if isinstance(text, str) else text:
            _check_unicode(one)
        raise TextError(
            f"the tokenizer cannot encode the text: {error}", "use a tokenizer with byte fallback or an unk token"
        ) from None


def _check_unicode(text: str) -> str:
    """Raise a precise error for invalid Unicode text, which the library rejects without a reason."""
    if not isinstance(text, str):
        raise TypeError(f"expected a string, not {type(text).__name__}")
    for at, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise TextError(
                f"character {at} of a text is an unpaired surrogate (U+{ord(char):X})", "decode the text as UTF-8"
            )
    return text


def _check_tokens(tokens: Sequence[str]) -> None:
    if isinstance(tokens, str) or not all(isinstance(token, str) and token for token in tokens):
        raise TextError(f"special_tokens is {tokens!r}", "give a list of non-empty strings")
