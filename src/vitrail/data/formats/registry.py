"""Registry of dataset formats: open one by name, or detect the format of a file."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats.chat_messages import open_messages
from vitrail.data.formats.coco import open_captions, open_instances
from vitrail.data.formats.compositional_captions import open_aro, open_winoground
from vitrail.data.formats.data_files import check_file, decode_json, open_media_folder, read_bytes
from vitrail.data.formats.hallusion_bench import open_hallusion
from vitrail.data.formats.json_rows import LARGE_FILE_BYTES, JsonRows
from vitrail.data.formats.llava_conversations import open_llava
from vitrail.data.formats.media_folders import IMAGE_SUFFIXES, METADATA_FILES, VIDEO_SUFFIXES, open_images, open_videos
from vitrail.data.formats.mme import open_mme
from vitrail.data.formats.ocr_vqa import open_ocrvqa
from vitrail.data.formats.parquet_benchmarks import COLUMN_FORMATS as COLUMNS
from vitrail.data.formats.parquet_benchmarks import detect_columns, open_columns
from vitrail.data.formats.parquet_table import is_parquet
from vitrail.data.formats.refcoco import open_refcoco
from vitrail.data.formats.sample import SampleDataset
from vitrail.data.formats.text_choices import open_arc, open_hellaswag, open_piqa, open_siqa, open_winogrande
from vitrail.data.formats.tsv_table import open_mmbench
from vitrail.data.formats.video_moments import CHARADES_LINE, open_activitynet, open_charades, open_qvhighlights
from vitrail.data.formats.visual_qa import (
    POPE_SPLITS,
    open_chartqa,
    open_docvqa,
    open_gqa,
    open_needles,
    open_ocrbench,
    open_pope,
    open_textvqa,
    open_vqa,
)
from vitrail.errors import ConfigError, DataError, suggest_name


class DataFormat(NamedTuple):
    """How a format is opened, and the signatures that identify it. All parts of a signature must be present.

    `media_option` names the option for the folder of images or videos, if `open` takes a `folder`.
    """

    open: Callable[..., SampleDataset]
    signatures: tuple[str, ...]
    media_option: str = "image_folder"

    @property
    def has_folder(self) -> bool:
        return "folder" in inspect.signature(self.open).parameters

    def list_options(self) -> list[str]:
        """List the options of `open_dataset` for this format."""
        names = [name for name in list(inspect.signature(self.open).parameters)[1:] if name != "folder"]
        return [self.media_option, "allow_outside", *names] if self.has_folder else names


# Parts of a signature: `key` of an object; `list.key` of the rows of its lists; `*.key` of its values; `[].key` of the
# rows of a list or of JSON lines; `|column` of a table; `##` of lines with a moment each; `/…` of a folder. The first
# match wins.
FORMATS: dict[str, DataFormat] = {
    "llava": DataFormat(open_llava, ("[].conversations",)),
    "messages": DataFormat(open_messages, ("[].messages",)),
    "refcoco": DataFormat(open_refcoco, ("images annotations images.caption annotations.bbox",)),
    "coco-captions": DataFormat(open_captions, ("images annotations annotations.caption",)),
    "coco-instances": DataFormat(open_instances, ("images annotations categories annotations.bbox",)),
    "vqa": DataFormat(open_vqa, ("questions questions.question questions.image_id",)),
    "textvqa": DataFormat(open_textvqa, ("data data.question data.image_id",)),
    "gqa": DataFormat(open_gqa, ("*.question *.imageId",)),
    "ocrvqa": DataFormat(open_ocrvqa, ("*.questions *.answers *.imageURL",)),
    "docvqa": DataFormat(open_docvqa, ("data data.questionId data.question data.image",)),
    "chartqa": DataFormat(open_chartqa, ("[].imgname [].query [].label",)),
    "ocrbench": DataFormat(open_ocrbench, ("[].image_path [].question [].answers",)),
    "hallusion": DataFormat(open_hallusion, ("[].visual_input [].figure_id [].gt_answer",)),
    "winoground": DataFormat(open_winoground, ("[].image_0 [].image_1 [].caption_0 [].caption_1",)),
    "aro": DataFormat(open_aro, ("[].image_path [].true_caption [].false_caption",)),
    "pope": DataFormat(open_pope, ("[].question_id [].image [].text [].label", "/pope")),
    "mmbench": DataFormat(open_mmbench, ("|index |question |image |A |B",)),
    "mmmu": DataFormat(partial(open_columns, "mmmu"), ()),  # parquet only, like the next
    "realworldqa": DataFormat(partial(open_columns, "realworldqa"), ()),
    "mme": DataFormat(open_mme, ("|index |question |image |answer", "/questions")),
    "charades-sta": DataFormat(open_charades, ("##",), "video_folder"),
    "qvhighlights": DataFormat(open_qvhighlights, ("[].qid [].query [].vid",), "video_folder"),
    "activitynet-captions": DataFormat(open_activitynet, ("*.timestamps *.sentences",), "video_folder"),
    "v-niah": DataFormat(open_needles, ("[].path [].prompt [].answer",)),
    "arc": DataFormat(open_arc, ("[].id [].question [].answerKey", "/arc")),
    "hellaswag": DataFormat(open_hellaswag, ("[].activity_label [].ctx_a [].ctx_b [].endings", "/hellaswag")),
    "piqa": DataFormat(open_piqa, ("[].goal [].sol1 [].sol2",)),
    "siqa": DataFormat(open_siqa, ("[].context [].question [].answerA [].answerB [].answerC",)),
    "winogrande": DataFormat(open_winogrande, ("[].sentence [].option1 [].option2",)),
    "images": DataFormat(open_images, ("/metadata", "/picture")),
    "videos": DataFormat(open_videos, ("/video",)),
}

_MAX_EXAMINED_FILES = 5000  # most files of a folder examined for detection


def open_dataset(format_name: str, path: str | Path, **options: Any) -> SampleDataset:
    """Open a dataset in one of `FORMATS`. Samples are numbered; their images are read on access.

    The options depend on the format. Most accept `image_folder` (default: the folder of the file) and `allow_outside`
    (follow names and links that lead out of that folder).
    """
    if format_name not in FORMATS:
        raise ConfigError(f"unknown format {format_name!r}", suggest_name(format_name, FORMATS))
    columns = Path(path).suffix == ".parquet" or (format_name in COLUMNS and is_parquet(Path(path)))
    data_format = DataFormat(partial(open_columns, format_name), ()) if columns else FORMATS[format_name]
    known = data_format.list_options()
    for name in options:
        if name not in known:
            suffix = "as parquet " if columns else ""
            remedy = suggest_name(name, known) if known else "leave it out"
            raise ConfigError(f"the format {format_name!r} {suffix}has no option {name!r}", remedy)
    if data_format.has_folder:
        media_folder, allow_outside = options.pop(data_format.media_option, None), options.pop("allow_outside", False)
        options["folder"] = open_media_folder(Path(path), media_folder, allow_outside, data_format.media_option)
    return data_format.open(Path(path), **options)


def detect_format(path: str | Path) -> str:
    """Detect the format of a file or folder. Raise `DataError` with what was found if it is none of `FORMATS`."""
    path = Path(path)
    if is_parquet(path):
        return detect_columns(path)
    try:
        found = set(_folder_signatures(path) if path.is_dir() else _file_signatures(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path!s:.200} cannot be read: {error}", "check the path and its permissions") from error
    for name, kind in FORMATS.items():
        if any(found.issuperset(signs.split()) for signs in kind.signatures):
            return name
    if path.suffix == ".tar" or "/tar" in found:
        raise DataError(f"{path} holds WebDataset shards", "open them with vitrail.data.shards")
    summary = ", ".join(sorted(found)[:12]) or "nothing of use"
    raise DataError(
        f"{path} has an unknown format; found in it: {summary:.300}", f"name the format: {', '.join(FORMATS)}"
    )


def _folder_signatures(path: Path) -> Iterable[str]:
    for entry in islice(path.rglob("*"), _MAX_EXAMINED_FILES):
        suffix = entry.suffix.lower()
        deep = entry.parent != path
        if suffix in IMAGE_SUFFIXES:
            yield "/picture"
        elif suffix in VIDEO_SUFFIXES:
            yield "/video"
        elif suffix == ".tar":
            yield "/tar"
        elif entry.name in METADATA_FILES and not deep:
            yield "/metadata"
        elif suffix == ".txt" and deep and _has_answer(entry):
            yield "/questions"
        elif suffix in (".json", ".jsonl") and "pope" in entry.name and any(s in entry.name for s in POPE_SPLITS):
            yield "/pope"
        elif suffix == ".jsonl" and entry.name.startswith(("ARC-", "hellaswag_")):
            yield "/arc" if entry.name.startswith("ARC-") else "/hellaswag"


def _has_answer(text: Path) -> bool:
    """Whether a .txt file holds MME questions: its lines end in a tab and Yes or No. Caption files are .txt too."""
    with text.open("rb") as file:
        return file.readline(1 << 16).strip().lower().endswith((b"\tyes", b"\tno"))


def _file_signatures(path: Path) -> Iterable[str]:
    if path.suffix == ".tar":
        return
    if path.suffix.lower() == ".tsv":
        with path.open("rb") as file:
            head = file.readline(1 << 16).decode("utf-8-sig", "replace").strip("\r\n")
        yield from (f"|{column}" for column in head.split("\t"))
        return
    check_file(path)
    if path.stat().st_size >= LARGE_FILE_BYTES and path.suffix in (".json", ".jsonl"):
        with path.open("rb") as file:
            is_rows = path.suffix == ".jsonl" or file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        if is_rows:
            yield from (f"[].{key}" for key in _first_row_keys([JsonRows(path, msgspec.Raw)[0]]))
            return
    data = read_bytes(path).lstrip()
    if data[:1] == b"[":
        rows = decode_json(data, list[msgspec.Raw], str(path))
        yield from (f"[].{key}" for key in _first_row_keys(rows[:1]))
    elif data[:1] == b"{":
        try:
            values = decode_json(data, dict[str, msgspec.Raw], str(path))
        except DataError:  # JSON lines: each line is a value
            yield from (f"[].{key}" for key in _first_row_keys(data.splitlines()[:1]))
            return
        yield from _object_signatures(values)
    elif CHARADES_LINE.fullmatch(data.partition(b"\n")[0].decode("utf-8", "replace")):
        yield "##"
    else:
        raise DataError(
            f"{path} begins with {data[:20]!r}", f"give JSON, TSV or a folder; known formats: {', '.join(FORMATS)}"
        )


def _object_signatures(values: dict[str, msgspec.Raw]) -> Iterable[str]:
    if len(values) and all(_starts_with(value, b"{") for value in list(values.values())[:3]):
        yield from (f"*.{key}" for key in _first_row_keys(list(values.values())[:1]))
    for name, value in values.items():
        yield name
        yield f"[].{name}"  # a JSON lines file with one line looks the same
        if _starts_with(value, b"["):
            rows = decode_json(value, list[msgspec.Raw], name)
            yield from (f"{name}.{key}" for key in _first_row_keys(rows[:1]))
        if name.isdecimal():  # an object by id: one value is enough
            return


def _starts_with(value: msgspec.Raw, mark: bytes) -> bool:
    return bytes(memoryview(value)[:64]).lstrip()[:1] == mark


def _first_row_keys(rows: Iterable[bytes | msgspec.Raw]) -> Iterable[str]:
    """Yield the keys of the first row, if it is an object."""
    for row in rows:
        try:
            yield from decode_json(row, dict[str, msgspec.Raw], "a row")
        except DataError:
            return
