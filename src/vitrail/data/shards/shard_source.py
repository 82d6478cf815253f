"""Shards as a source of training samples: images, captions, classes, pairs and conversations.

Samples are read by data workers. An image sample is one row of bytes: its pixels, the token ids of its texts, and its
class. Batches of such rows travel to the device, so images need not fit in the memory of the device, nor of the host.

Shapes: B samples, S pixels a side, T tokens of a text.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.config import Config, Fraction, NonNegativeInt, PositiveInt
from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.conversations import (
    CAPTION_PROMPT,
    MAX_TOKENIZER_TEXTS,
    collect_turn_texts,
    complete_conversation,
    find_problem,
)
from vitrail.data.formats.chat_messages import ConversationsRow, MessagesRow
from vitrail.data.formats.media_folders import CAPTION_KEYS, IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vitrail.data.formats.sample import Sample
from vitrail.data.image_captions import CaptionBatch, build_caption_source
from vitrail.data.language.english import with_indefinite_article
from vitrail.data.language.templates import NAMED_IMAGE_CAPTIONS
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.qa import NAMING_QUESTIONS, DrawingPromptSample, QASample, build_qa_dataset, build_turns
from vitrail.data.sample_faults import SampleReport
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.data.shards.shard_dataset import ShardDataset, ShardsConfig
from vitrail.data.source_spec import DataSourceSpec, SourceContext
from vitrail.errors import ConfigError, DataError
from vitrail.processing.image_loading import load_image
from vitrail.processing.resolution_policies import CropPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import DATA_SOURCES

IMAGE_ENDINGS = "jpg;jpeg;png;webp"
NUM_LARGEST = 4  # samples of the most bytes, which are checked before training


class ShardSourceConfig(Config, tag="shards", tag_field="kind"):
    """Settings of a source of WebDataset shards.

    paths           tar files, folders of them, patterns ("train-{000..099}.tar"), or URLs of these (`s3://…`)
    contents        what a sample is: an image; an image with a caption; an image with a class; an image with a caption
                    and a caption that is wrong; a conversation about any number of images
    image           endings of the image, of which the first that a sample has is read
    caption         ending of the caption, or `json:KEY` for a key of the member `json`
    negative        the same for the wrong caption of `pairs`
    label           the same for the class: its number or its name
    class_names     names of the classes, in the order of their numbers
    templates       captions around the name of a class: {} is the name, {a} the name with its article
    image_size      size of the images, which are resized and cropped in the centre
    max_tokens      tokens of a caption; longer ones are cut and counted
    caption_prompt  question about an image that has a caption instead of turns, in conversations
    augmentation    augmentation of the images in training
    max_fault_fraction  training stops if more than this fraction of the samples read is unreadable,
    max_faults          and more than this number
    """

    paths: str | tuple[str, ...]
    contents: Literal["images", "captions", "classes", "pairs", "conversations"] = "captions"
    image: str = IMAGE_ENDINGS
    caption: str = "txt"
    negative: str = "json:negative"
    label: str = "cls"
    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = NAMED_IMAGE_CAPTIONS
    image_size: PositiveInt = 64
    max_tokens: PositiveInt = 64
    caption_prompt: str = CAPTION_PROMPT
    augmentation: AugmentationConfig = AugmentationConfig()
    max_fault_fraction: Fraction = 0.01
    max_faults: NonNegativeInt = 10

    def __post_init__(self) -> None:
        if (self.contents == "classes") != bool(self.class_names):
            raise ConfigError(
                f"contents is {self.contents!r} and class_names has {len(self.class_names)} names",
                'give class_names with contents = "classes", and only with it',
            )
        if not self.templates or any(t.count("{}") + t.count("{a}") != 1 for t in self.templates):
            raise ConfigError("a template does not have exactly one {} or {a}", "write it once, where the name is")

    @property
    def has_texts(self) -> bool:
        return self.contents in ("captions", "classes", "pairs")

    def open_dataset(self, **options: Any) -> ShardDataset:
        """Open the shards with the fields that the contents need."""
        fields: list[str] = []
        if self.contents != "conversations":
            texts = {"captions": [self.caption], "pairs": [self.caption, self.negative], "classes": [self.label]}
            endings = [text.partition(":")[0] for text in texts.get(self.contents, [])]
            fields = [self.image, *dict.fromkeys(endings)]
        config = ShardsConfig(
            paths=self.paths,
            fields=tuple(fields),
            transform=options.pop("transform", None),
            max_fault_fraction=self.max_fault_fraction,
            max_faults=self.max_faults,
        )
        return ShardDataset(config, **options)


def read_field(sample: dict[str, Any], field: str) -> Any:
    """Read a member of a sample, or a key of its JSON."""
    ending, _, key = field.partition(":")
    value = sample[ending]
    if not key:
        return value
    if not isinstance(value, dict) or key not in value:
        raise DataError(f"has no key {key!r} in its {ending}", "name another key")
    return value[key]


def _read_text(sample: dict[str, Any], field: str) -> str:
    text = read_field(sample, field)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"has no text in {field}: {text!r:.80}", "repair or remove the sample")
    return text.strip()


# ── images with texts ────────────────────────────────────────────────────────────────────────────────────────────


class _Fields(NamedTuple):
    """Fields of packed rows on a device."""

    pixels: Tensor  # uint8 (B, 3, S, S)
    captions: Tensor  # (B, T) pieces
    second_captions: Tensor  # (B, T) another wording
    negatives: Tensor  # (B, T)
    classes: Tensor  # (B,)


class TokenPieces(PieceTable):
    """Token ids as text pieces: piece n + 1 is token n. Free text has no table of pieces that could be enumerated."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.tokenizer.vocab_size + 1

    def add(self, text: str) -> int:
        raise NotImplementedError("a text has several tokens")

    def to_rows(self, text: str) -> list[int]:
        """Convert a text to pieces."""
        return [token + 1 for token in self.tokenizer.encode(text)]

    def tokenize(self, tokenizer: Tokenizer, *extra_rows: Sequence[int]) -> TokenTable:
        if tokenizer.vocab_size != self.tokenizer.vocab_size:
            raise ConfigError("the source and the task have different tokenizers", "use one tokenizer")
        return TokenTable([[], *([token] for token in range(tokenizer.vocab_size)), *extra_rows])

    def to_texts(self, rows: Tensor) -> list[str]:
        return [self.tokenizer.decode([piece - 1 for piece in row if piece]) for row in rows.tolist()]


class ShardImageSource:
    """Map an item to a `SceneSample` whose index is a packed row (bytes,); `pixels` unpacks a batch of rows (B, bytes).

    Wherever a task takes indices, it may take packed rows. Indices (B,) are read at once.
    """

    def __init__(self, config: ShardSourceConfig, tokenizer: Tokenizer | None, name: str = "shards"):
        if config.has_texts and tokenizer is None:
            raise ConfigError(f"source {name!r} has texts, but there is no tokenizer", "add a [tokenizer] table")
        self.config, self.name = config, name
        self.pieces = TokenPieces(tokenizer) if config.has_texts and tokenizer is not None else PieceTable()
        transform = CropPolicy(image_size=config.image_size, patch_size=1)
        self.dataset = config.open_dataset(transform=transform, convert=self._pack)
        self.num_cut = torch.zeros(1, dtype=torch.int64).share_memory_()  # captions that were cut, by all workers

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> SceneSample:
        return self.sample(item, (item,))

    def sample(self, item: int, seed: tuple[int, ...]) -> SceneSample:
        """Read a sample. `seed` draws the template of a class."""
        return SceneSample(self.name, self.dataset.read_sample(item, seed))

    @property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of the shards and their members."""
        return self.dataset.fingerprint

    def report(self) -> SampleReport:
        """Report what was read, and the faults."""
        report = self.dataset.report()
        return report._replace(num_cut=int(self.num_cut)) if int(self.num_cut) else report

    @property
    def concepts(self) -> list[str] | None:
        """Names of the classes; None for captions."""
        return [name.lower() for name in self.config.class_names] or None

    def pixels(self, rows: Tensor) -> Tensor:
        """Images as uint8 (B, 3, S, S)."""
        return self.unpack(rows).pixels

    def unpack(self, rows: Tensor) -> _Fields:
        """Unpack rows (B, bytes), or read the samples of indices (B,)."""
        if rows.ndim == 1:
            rows = torch.stack([self[item].index for item in rows.tolist()]).to(rows.device)  # type: ignore[arg-type]
        side, length = self.config.image_size, self.config.max_tokens
        num_pixels = 3 * side * side
        images = rows[:, :num_pixels].unflatten(1, (3, side, side))
        words = rows[:, num_pixels:].contiguous().view(torch.int32).long()
        texts = words[:, : 3 * length].unflatten(1, (3, length)) if self.config.has_texts else words[:, None, :0]
        captions, seconds, negatives = texts.expand(-1, 3, -1).unbind(1)
        return _Fields(images, captions, seconds, negatives, words[:, -1])

    def _pack(self, sample: dict[str, Any], seed: tuple[int, ...]) -> Tensor:
        """Pack a sample into a row: pixels, caption, second wording, wrong caption, class."""
        config = self.config
        image = next(value for value in sample.values() if isinstance(value, np.ndarray))
        number, texts = -1, ["", "", ""]
        if config.contents == "classes":
            number = self._find_class(read_field(sample, config.label))
            drawn = np.random.default_rng(seed).integers(len(config.templates), size=2)
            texts[:2] = [_fill_template(config.templates[n], config.class_names[number]) for n in drawn]
        elif config.has_texts:
            texts[:2] = [_read_text(sample, config.caption)] * 2
            texts[2] = _read_text(sample, config.negative) if config.contents == "pairs" else ""
        encoded = {text: self._encode(text) for text in dict.fromkeys(texts)} if config.has_texts else {}
        words = [token for text in texts if encoded for token in encoded[text]]
        numbers = np.array([*words, number], np.int32)
        pixels = np.ascontiguousarray(image.transpose(2, 0, 1)).reshape(-1)
        return torch.from_numpy(np.concatenate([pixels, numbers.view(np.uint8)]))

    def _encode(self, text: str) -> list[int]:
        assert isinstance(self.pieces, TokenPieces)
        row, length = self.pieces.to_rows(text), self.config.max_tokens
        if len(row) > length:
            self.num_cut += 1
        return [*row[:length], *[0] * (length - len(row))]

    def _find_class(self, value: Any) -> int:
        """Return the number of a class from its number or its name."""
        names = self.config.class_names
        if isinstance(value, bytes):
            value = value.decode()
        if isinstance(value, str):
            value = int(value) if value.strip().isdecimal() else names.index(value.strip())
        if not isinstance(value, int) or not 0 <= value < len(names):
            raise DataError(f"has the class {value!r:.80}, but there are {len(names)} classes", "add its name")
        return value


def _fill_template(template: str, name: str) -> str:
    return template.replace("{a}", with_indefinite_article(name)).replace("{}", name)


class ShardCaptions:
    """Captions of the images of shards."""

    def __init__(self, source: ShardImageSource):
        if not source.config.has_texts:
            raise ConfigError(f"source {source.name!r} has no captions", 'set contents to "captions" or "classes"')
        self.source, self.pieces, self.augmentation = source, source.pieces, source.config.augmentation
        self.concepts, self.has_negatives = source.concepts, source.config.contents == "pairs"

    def make_batch(self, index: Tensor, *, randomize: bool = True, swap_negatives: bool = False) -> CaptionBatch:
        fields = self.source.unpack(index)
        return CaptionBatch(
            fields.pixels, fields.captions, fields.negatives if swap_negatives and self.has_negatives else None
        )

    def resample_captions(self, index: Tensor, *, randomize: bool = True) -> Tensor:
        return self.source.unpack(index).second_captions

    def concept_rows(self, index: Tensor) -> Tensor:
        return self.source.unpack(index).classes

    def count_max_tokens(self, token_table: TokenTable) -> int:
        return self.source.config.max_tokens


class ShardQADataset:
    """One question for each image, whose answer is its caption or class."""

    def __init__(self, source: ShardImageSource):
        assert isinstance(source.pieces, TokenPieces)
        self.source, self.pieces, self.augmentation = source, source.pieces, source.config.augmentation
        questions = NAMING_QUESTIONS if source.config.contents == "classes" else (source.config.caption_prompt,)
        rows = [torch.tensor(source.pieces.to_rows(question)) for question in questions]
        self._questions = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def sample_qa(self, index: Tensor) -> QASample:
        fields = self.source.unpack(index)
        drawn = torch.randint(len(self._questions), (len(index),), device=index.device)
        valid = torch.ones(len(index), dtype=torch.bool, device=index.device)
        question = self._questions.to(index.device)[drawn]
        rows, loss_mask = build_turns(question, fields.captions, valid, len(self.pieces))
        return QASample(fields.pixels, rows, loss_mask, torch.zeros_like(rows))

    def sample_drawing_prompts(self, index: Tensor) -> DrawingPromptSample:
        fields = self.source.unpack(index)
        return DrawingPromptSample(fields.pixels, pad(fields.captions, (0, 1), value=len(self.pieces)))

    def count_max_tokens(self, token_table: TokenTable) -> tuple[int, int]:
        answer = self.source.config.max_tokens
        return self._questions.shape[1] + answer + 2, answer + 1


build_caption_source.register(ShardImageSource, ShardCaptions)
build_qa_dataset.register(ShardImageSource, lambda source, *_args, **_options: ShardQADataset(source))


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────


class ShardConversationSource:
    """Map an item to a `Sample` whose images are decoded and whose answer is its last turn.

    The member `json` holds the turns as LLaVA, ShareGPT or OpenAI write them. A sample without turns needs a caption.
    `extreme_items` are the samples with the most bytes of text, and of images.
    """

    format_name = "shards"

    def __init__(self, config: ShardSourceConfig, name: str = "shards"):
        self.config, self.name = config, name
        endings = [suffix[1:] for suffix in IMAGE_SUFFIXES]
        self.dataset = config.open_dataset(convert=self._convert, decoders=_EndingDecoders(endings))
        kinds = {kind for index in self.dataset.indexes for kind in index.kinds}
        images = {kind for kind in kinds if f".{kind.rsplit('.', 1)[-1]}" in IMAGE_SUFFIXES}
        sizes = (self.dataset.measure_members(some) for some in (images, kinds & {"json", "txt"}))
        count = min(NUM_LARGEST, len(self.dataset))
        self.extreme_items = sorted({int(item) for size in sizes for item in np.argsort(-size, kind="stable")[:count]})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> Sample:
        return self.sample(item, (item,))

    def sample(self, item: int, seed: tuple[int, ...]) -> Sample:
        """Read a sample. `seed` selects one of several captions."""
        return self.dataset.read_sample(item, seed)

    @property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of the shards and their members."""
        return self.dataset.fingerprint

    @property
    def pieces(self) -> PieceTable:
        """Texts of the conversations, for tokenizer training."""
        return collect_turn_texts(self[item] for item in range(len(self)))

    def report(self) -> SampleReport:
        """Report what was read, and the faults."""
        return self.dataset.report()

    def _convert(self, members: dict[str, Any], seed: tuple[int, ...]) -> Sample:
        sample = read_conversation(members)
        sample = complete_conversation(sample, self.config.caption_prompt, seed)
        if problem := find_problem(sample):
            raise DataError(*problem)
        return sample


class _EndingDecoders(dict[str, Any]):
    """Decoders of images by the last part of their ending, such as `0.jpg`. They decode the whole image."""

    def __init__(self, endings: Sequence[str]):
        super().__init__(dict.fromkeys(endings, load_image))

    def __contains__(self, ending: object) -> bool:
        return super().__contains__(str(ending).rsplit(".", 1)[-1])

    def __getitem__(self, ending: str) -> Any:
        return super().__getitem__(ending.rsplit(".", 1)[-1])


def read_conversation(members: dict[str, Any]) -> Sample:
    """Read a conversation, or an image with captions, from the members of a sample."""
    key = members["__key__"]
    if any(f".{ending.rsplit('.', 1)[-1]}" in VIDEO_SUFFIXES for ending in members):
        raise DataError("has a video, which is not supported in shards", "use files and a JSON file")
    images = {e: v for e, v in members.items() if f".{e.rsplit('.', 1)[-1]}" in IMAGE_SUFFIXES}
    document = members.get("json")
    if isinstance(document, list):  # the turns themselves
        is_llava = bool(document) and isinstance(document[0], dict) and "from" in document[0]
        document = {"conversations" if is_llava else "messages": document}
    if isinstance(document, dict) and ("conversations" in document or "messages" in document):
        row = _parse_row(document)
        names = _list_image_names(document, row)
        ordered = tuple(_order_images(key, images, names))
        turns = row.parse().turns
        shown = sum(part.kind == "image" for turn in turns for part in turn.parts)
        if shown != len(ordered):
            raise DataError(
                f"the text has {shown} × <image>, but the sample has {len(ordered)} images",
                "write one placeholder for each image, where it is shown",
            )
        return Sample(id=key, images=ordered, turns=turns)
    captions = [members["txt"]] if isinstance(members.get("txt"), str) else []
    for name in CAPTION_KEYS if isinstance(document, dict) else ():
        value = document.get(name, [])  # type: ignore[union-attr]
        captions += [value] if isinstance(value, str) else [text for text in value or () if isinstance(text, str)]
    captions = [text.strip() for text in dict.fromkeys(captions) if text.strip()]
    return Sample(id=key, images=tuple(_order_images(key, images, [])), captions=tuple(captions))


def _parse_row(document: dict[str, Any]) -> MessagesRow:
    """Parse turns as LLaVA, ShareGPT or OpenAI write them."""
    try:
        turns = {key: document[key] for key in ("messages", "conversations", "system") if key in document}
        if "messages" in turns:
            return msgspec.convert(turns, MessagesRow)
        return msgspec.convert(turns, ConversationsRow).to_messages()
    except msgspec.ValidationError as error:
        raise DataError(f"its json: {error}", "write the turns as LLaVA or OpenAI do") from error


def _list_image_names(document: dict[str, Any], row: MessagesRow) -> list[str]:
    """List the names of the images in the JSON, if it has any."""
    named = [file for file in row.parse().files if file is not None]
    listed = document.get("images", document.get("image", []))
    listed = [listed] if isinstance(listed, str) else listed or []
    return named or [name for name in listed if isinstance(name, str)]


def _order_images(key: str, images: dict[str, Any], names: list[str]) -> list[Any]:
    """Order the images of a sample: as its JSON names them, if the names are those of members; else by their endings.

    A JSON may name the files from which the shard was made.
    """
    stem = key.rsplit("/", 1)[-1]
    by_name = {f"{stem}.{ending}": value for ending, value in images.items()} | images
    bases = [name.rsplit("/", 1)[-1] for name in names]
    if bases and all(base in by_name for base in bases):
        return [by_name[base] for base in bases]
    return [images[ending] for ending in sorted(images, key=_natural_key)]


def _natural_key(ending: str) -> list[tuple[int, int, str]]:
    """Sort `2.jpg` before `10.jpg`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in ending.split(".")]


# ── registration ─────────────────────────────────────────────────────────────────────────────────────────────────

_CONTENTS = {"images": ("images",), "conversations": ("conversations",)}


def _open_source(config: ShardSourceConfig, context: SourceContext) -> ShardImageSource | ShardConversationSource:
    if config.contents == "conversations":
        return ShardConversationSource(config, context.name)
    return ShardImageSource(config, context.tokenizer, context.name)


def _read_texts(config: ShardSourceConfig) -> list[str]:
    """Read captions, or fill the templates of classes, to train a tokenizer on."""
    if config.contents == "classes":
        return [_fill_template(template, name) for template in config.templates for name in config.class_names]
    if not config.has_texts:
        return []
    ignored = dict.fromkeys(config.image.split(";"), bytes)
    dataset = config.open_dataset(decoders=ignored, convert=lambda sample, _seed: _read_text(sample, config.caption))
    return [dataset[item] for item in range(min(len(dataset), MAX_TOKENIZER_TEXTS))]


DATA_SOURCES.register(
    "shards",
    DataSourceSpec(
        ShardSourceConfig,
        _open_source,
        ("images", "captions", "questions", "conversations"),
        needs_tokenizer=lambda config: config.has_texts,
        read_texts=_read_texts,
        list_contents=lambda config: _CONTENTS.get(config.contents, ("images", "captions", "questions")),
    ),
)
