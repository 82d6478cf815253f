"""Text to ids and back: any tokenizer.json, or a small byte-level BPE trained here.

A thin typed coat over the `tokenizers` library. What it adds: errors that name the file, special tokens that stay
plain text where a stranger spelled them, offsets fit for loss masks, and a streaming decoder that is exact.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from vitrail.errors import TextError
from vitrail.processing.sidecar import Sidecar, dump, no_tokenizer, read_bytes, read_json, read_sidecar

Span = tuple[int, int]  # characters [start, end) of a text
_T = TypeVar("_T")

MOST = 2**20  # tokens that a vocabulary may be trained to; the trainer sets room aside for all of them at once
_BYTES = 256  # a byte-complete vocabulary starts with every byte
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece vocabularies write one byte
_ANCHOR = 0x100000  # first code point of the last private-use plane
_LEGIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


class _Twin(NamedTuple):
    """A copy that reads every special token as plain text, and knows each by a private stand-in instead."""

    rust: tokenizers.Tokenizer
    anchors: dict[str, str]  # special token → stand-in of the same length, so that offsets hold
    origin: dict[int, int]  # id of the stand-in → id of the special token


class Tokenizer:
    """Ids for text and text for ids.

    `named` maps bos, eos, unk and pad to their tokens; `stops` are the ids that end a generation; `chat_template` is
    the Jinja source that came with the tokenizer (see `ChatTemplate.of`).
    """

    def __init__(
        self,
        rust: tokenizers.Tokenizer,
        named: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        stops: Iterable[int] = (),
    ):
        # A stored length limit would cut or pad texts silently.
        rust.no_truncation()
        rust.no_padding()
        _keep_spaces_in_offsets(rust.post_processor)
        self._rust = rust
        self.named = dict(named or {})
        self.chat_template = chat_template
        self._survey()
        self.add_specials([t for t in self.named.values() if rust.token_to_id(t) is None])
        self.stops = tuple(dict.fromkeys([*([] if self.eos is None else [self.eos]), *stops]))

    # ── making one ────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a tokenizer.json, or a folder that holds one; the files beside it give names and chat template."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        data = read_bytes(file, "give a tokenizer.json, or a folder that holds one")
        try:
            rust = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more precise
            raise no_tokenizer(file, data, str(error)) from None
        beside = read_sidecar(file.parent) if file.name == "tokenizer.json" else Sidecar({}, None, ())
        return cls(rust, *beside)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        specials: Sequence[str] = ("<|endoftext|>",),
        bos: str | None = None,
        eos: str | None = "<|endoftext|>",
        pad: str | None = None,
        progress: bool = False,
    ) -> Self:
        """Train a byte-level BPE: every string round-trips, and the same texts give the same vocabulary.

        The special tokens take the first ids. A `bos` is put before each text encoded with `specials=True`. A short
        corpus may yield fewer than `vocab_size` tokens: read `size`.
        """
        named = {role: token for role, token in (("bos", bos), ("eos", eos), ("pad", pad)) if token is not None}
        tokens = list(dict.fromkeys([*specials, *named.values()]))
        _check_tokens(tokens)
        least = _BYTES + len(tokens)
        if vocab_size < least:
            raise TextError(
                f"vocab_size {vocab_size} is too small: {_BYTES} bytes and {len(tokens)} special tokens need {least}",
                f"ask for at least {least}; a few thousand suit captions",
            )
        if vocab_size > MOST:
            raise TextError(f"vocab_size {vocab_size:,} is too large", f"ask for at most {MOST:,}")
        rust = tokenizers.Tokenizer(models.BPE())
        # One digit a token keeps numbers regular; the byte level splits words as GPT-2 does.
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
        rust.train_from_iterator((_checked(text) for text in texts), trainer)
        if bos is not None:
            rust.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, rust.token_to_id(bos))]
            )
        return cls(rust, named)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and the files beside it, for `load` and transformers' PreTrainedTokenizerFast."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": token for role, token in self.named.items()},
        }
        files = {"tokenizer.json": self._rust.to_str(pretty=True), "tokenizer_config.json": dump(config)}
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template
        if self.stops != (self.eos,) and self.stops:
            # A model's generation settings may already live there: change only what is ours.
            generation = read_json(folder / "generation_config.json") | {"eos_token_id": list(self.stops)}
            files["generation_config.json"] = dump(generation)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise TextError(
                f"cannot save the tokenizer to {folder}: {error}", "give a folder you may write to"
            ) from None

    # ── what is in it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def bos(self) -> int | None:
        return self._named_id("bos")

    @property
    def eos(self) -> int | None:
        return self._named_id("eos")

    @property
    def unk(self) -> int | None:
        return self._named_id("unk")

    @property
    def pad(self) -> int | None:
        return self._named_id("pad")

    def id(self, token: str) -> int:
        """The id of one token as the vocabulary spells it."""
        found = self._rust.token_to_id(token)
        if found is None:
            known = ", ".join(list(self.specials)[:8]) or "none"
            raise TextError(
                f"the tokenizer has no token {token!r}", f"add_specials([{token!r}]); special tokens now: {known}"
            )
        return found

    def token(self, id: int) -> str:
        """The token of an id as the vocabulary spells it."""
        found = self._rust.id_to_token(id) if 0 <= id < self.size else None
        if found is None:
            raise TextError(
                f"id {id} is not in the vocabulary (ids go from 0 to {self.size - 1})",
                "decode with the tokenizer that made the ids; leave out picture codes and padding labels",
            )
        return found

    def piece(self, id: int) -> str:
        """One token made legible: spaces as ·, line ends as ⏎, what does not print as its bytes."""
        token = self.token(id)
        if byte := _BYTE_PIECE.fullmatch(token):
            return f"⟨{byte[1]}⟩"
        if token not in self._added:
            if isinstance(self._rust.decoder, decoders.ByteLevel) and all(char in _BYTE_OF for char in token):
                data = bytes(_BYTE_OF[char] for char in token)
                token = data.decode(errors="replace")
                if "�" in token:
                    return _bytes_shown(data)
            token = token.replace("▁", " ")
        return "".join(c if c.isprintable() else _bytes_shown(c.encode()) for c in token.translate(_LEGIBLE))

    def add_specials(self, tokens: Sequence[str]) -> list[int]:
        """Make each token special (`<image>`, `<|vision_start|>` …) and give its id; known ones keep theirs."""
        _check_tokens(tokens)
        if new := [token for token in tokens if token not in self.specials]:
            self._rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])
            self._survey()
        return [self.id(token) for token in tokens]

    # ── encoding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self, text: str, *, specials: bool = False, literal: bool | Sequence[Span] = False) -> list[int]:
        """Ids of a text. `specials` adds what the tokenizer puts around one (bos, eos).

        `literal` is for text by strangers: with True a spelled-out special token such as `<|im_end|>` stays plain
        text; given character spans, only those that touch a span do.
        """
        return self.encode_spans(text, specials=specials, literal=literal)[0]

    def encode_spans(
        self, text: str, *, specials: bool = False, literal: bool | Sequence[Span] = False
    ) -> tuple[list[int], list[Span]]:
        """Ids, and for each the characters it stands for; tokens of one split character share its span."""
        hidden = mark_spans(text, [(0, len(text))] if literal is True else literal or [])
        if not any(hidden) or not (self._loose or any(any(hidden[slice(*m.span())]) for m in self._starts(text))):
            found = _encode(self._rust.encode, text, add_special_tokens=specials)
            return found.ids, found.offsets
        twin = self._make_twin()
        found = _encode(twin.rust.encode, self._anchored(text, hidden), add_special_tokens=specials)
        written = {i for i, ours in zip(found.ids, found.special_tokens_mask, strict=True) if not ours}
        unknown = {self.unk, self.specials.get(getattr(self._rust.model, "unk_token", None) or "")}
        if leaked := written & set(self.specials.values()) - unknown:
            raise TextError(
                f"the tokenizer's model has {self.token(leaked.pop())!r} as a word and cannot spell it as plain text",
                "remove it from the text",
            )
        return [twin.origin.get(i, i) for i in found.ids], found.offsets

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Ids of many texts, on all cores."""
        found = _encode(self._rust.encode_batch_fast, list(texts), add_special_tokens=specials)
        return [encoding.ids for encoding in found]

    def spelled(self, text: str) -> list[int]:
        """Where a special token is spelled in the text, or begins and is cut off by the end of the text."""
        whole = {found.start() for found in self._starts(text)}
        longest = max(map(len, self.specials), default=0)
        ends = range(max(0, len(text) - longest + 1), len(text))
        cut = {at for at in ends if any(token.startswith(text[at:]) for token in self.specials)}
        return sorted(whole | cut)

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, ids: Iterable[SupportsIndex], *, skip_specials: bool = False) -> str:
        numbers = [index(i) for i in ids]
        for i in numbers:
            self.token(i)  # the library drops ids it does not know without a word
        return self._rust.decode(numbers, skip_special_tokens=skip_specials)

    def decoder(self, *, skip_specials: bool = False) -> "Decoder":
        """A decoder to which ids are given one by one, as a model writes them."""
        return Decoder(self, skip_specials)

    def stream(self, ids: Iterable[SupportsIndex], *, skip_specials: bool = False) -> Iterator[str]:
        """Text as the ids arrive, in whole characters; joined together it is `decode(ids)`."""
        decoder = self.decoder(skip_specials=skip_specials)
        for id in ids:
            if text := decoder.push(id):
                yield text
        if text := decoder.finish():
            yield text

    # ── within ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _survey(self) -> None:
        """Take stock after the vocabulary changed."""
        added = self._rust.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values()}
        #: special token → id
        self.specials = {token.content: i for i, token in added.items() if token.special and token.content}
        #: rows an embedding table needs; ids may have holes, so this is not a count
        self.size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # The tokenizer takes the longest special token at the leftmost place; so does this pattern.
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A special token that is matched after normalising may be spelled in ways the pattern does not see.
        self._loose = any(self._added[token].normalized for token in self.specials)
        self._twin: _Twin | None = None

    def _named_id(self, role: str) -> int | None:
        token = self.named.get(role)
        return None if token is None else self.id(token)

    def _starts(self, text: str) -> Iterator[re.Match[str]]:
        """Every special token spelled in the text, also one that starts inside another."""
        at = 0
        while found := self._pattern.search(text, at):
            yield found
            at = found.start() + 1

    def _anchored(self, text: str, hidden: bytearray) -> str:
        """The text with stand-ins for the special tokens that touch no hidden character."""
        anchors = self._make_twin().anchors
        if any(stand_in in text for stand_in in anchors.values()):
            raise TextError(
                "the text holds private-use characters that stand for special tokens here",
                f"remove the characters from U+{_ANCHOR:X} on",
            )
        parts, at, kept = [], 0, 0
        while found := self._pattern.search(text, at):
            if any(hidden[slice(*found.span())]):
                at = found.start() + 1
            else:
                parts += [text[kept : found.start()], anchors[found[0]]]
                at = kept = found.end()
        return "".join([*parts, text[kept:]])

    def _make_twin(self) -> _Twin:
        """Made once, on the first text that needs it: a copy, so that no setting flips under another thread."""
        if self._twin is None:
            rust = tokenizers.Tokenizer.from_str(self._rust.to_str())
            rust.encode_special_tokens = True
            anchors = {token: chr(_ANCHOR + n) * len(token) for n, token in enumerate(self.specials)}
            rust.add_tokens([_stand_in(self._added[token], anchor) for token, anchor in anchors.items()])
            stood_for = {anchor: self.specials[token] for token, anchor in anchors.items()}
            added = {i: token.content for i, token in rust.get_added_tokens_decoder().items()}
            origin = {i: stood_for[token] for i, token in added.items() if token in stood_for}
            self._twin = _Twin(rust, anchors, origin)
        return self._twin


class Decoder:
    """Decodes a growing sequence: `push` each id, `finish` at the end.

    What it has given never changes: it holds back bytes that do not yet make a character, and decodes each step after
    a little of what went before, because some decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_specials: bool):
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.specials.values() if skip_specials else ())
        self._window: list[int] = []  # ids still needed: context, then what waits
        self._context = 0  # how many of them are context
        self._given = 0  # characters of the window's text given already

    def push(self, id: SupportsIndex) -> str:
        """The text this id completes; empty while a character is unfinished."""
        id = index(id)
        if id in self._skipped:
            return ""
        text = self._tokenizer.decode([*self._window, id])
        self._window.append(id)
        # A run of byte pieces is valid as a whole or not at all, so only its end tells; � may yet become a character.
        if text.endswith("�") or _BYTE_PIECE.fullmatch(self._tokenizer.token(id)):
            return ""
        fresh = text[self._given :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._tokenizer.decode(self._window))
        return fresh

    def finish(self) -> str:
        """What was held back; afterwards the decoder is as new."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._context, self._given = [], 0, 0
        return rest


def mark_spans(text: str, spans: Sequence[Span]) -> bytearray:
    """One byte a character: 1 inside a span."""
    marks = bytearray(len(text))
    for start, end in spans:
        marks[start:end] = b"\1" * (end - start)
    return marks


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, read backwards: what prints stands for itself, the rest follow."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(_BYTES) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(_BYTES + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _bytes_shown(data: bytes) -> str:
    return f"⟨{data.hex(' ').upper()}⟩"


def _stand_in(token: AddedToken, anchor: str) -> AddedToken:
    """The token under another spelling, and not special, so that the twin still reads it."""
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(anchor, special=False, **flags)


def _keep_spaces_in_offsets(post: Any) -> None:
    """A byte-level post-processor trims spaces from offsets; a token of spaces would then cover nothing."""
    for part in post if isinstance(post, processors.Sequence) else [post]:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False


def _encode(call: Callable[..., _T], text: Any, **options: Any) -> _T:
    try:
        return call(text, **options)
    except Exception as error:  # the library raises nothing more precise
        for one in [text] if isinstance(text, str) else text:
            _checked(one)
        raise TextError(
            f"the tokenizer cannot encode the text: {error}", "use a tokenizer that has all bytes or an unk token"
        ) from None


def _checked(text: str) -> str:
    """Refuse what is not Unicode text before the library does so without a reason."""
    if not isinstance(text, str):
        raise TypeError(f"expected a string, not {type(text).__name__}")
    for at, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise TextError(
                f"half a surrogate pair (U+{ord(char):X}) at character {at} of a text", "decode the text as UTF-8"
            )
    return text


def _check_tokens(tokens: Sequence[str]) -> None:
    if isinstance(tokens, str) or not all(isinstance(token, str) and token for token in tokens):
        raise TextError(f"special tokens must be a list of non-empty strings, not {tokens!r}")
