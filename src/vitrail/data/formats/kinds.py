"""The formats as rows of one table: open one by name, or find out which a file is."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats.coco import open_captions, open_instances
from vitrail.data.formats.documents import open_chartqa, open_docvqa, open_ocrbench, open_ocrvqa
from vitrail.data.formats.files import decode, read_bytes
from vitrail.data.formats.folders import METADATA, PICTURES, VIDEOS, open_images, open_videos
from vitrail.data.formats.hallusion import open_hallusion
from vitrail.data.formats.hubs import KINDS as COLUMNS
from vitrail.data.formats.hubs import guess_columns, open_columns
from vitrail.data.formats.llava import open_llava
from vitrail.data.formats.moments import CHARADES, open_activitynet, open_charades, open_qvhighlights
from vitrail.data.formats.needles import open_needles
from vitrail.data.formats.pairs import open_aro, open_winoground
from vitrail.data.formats.parquet import is_parquet
from vitrail.data.formats.questions import open_gqa, open_textvqa, open_vqa
from vitrail.data.formats.refer import open_refcoco
from vitrail.data.formats.sample import Samples
from vitrail.data.formats.tables import open_mmbench
from vitrail.data.formats.texts import open_arc, open_hellaswag, open_piqa, open_siqa, open_winogrande
from vitrail.data.formats.yesno import SPLITS, open_mme, open_pope
from vitrail.errors import ConfigError, DataError, nearest


class Kind(NamedTuple):
    """How a format is opened, and the signs it is known by: each string a set of signs that must all be there."""

    open: Callable[..., Samples]
    signs: tuple[str, ...]


# Signs: `key` of an object, `list.key` of the rows of its lists, `*.key` of its values; `[].key` of a list's rows or of
# JSON lines; `|column` of a table; `##` of lines with a moment each; `/…` of a folder. The first row that fits wins.
KINDS: dict[str, Kind] = {
    "llava": Kind(open_llava, ("[].conversations",)),
    "refcoco": Kind(open_refcoco, ("images annotations images.caption annotations.bbox",)),
    "coco-captions": Kind(open_captions, ("images annotations annotations.caption",)),
    "coco-instances": Kind(open_instances, ("images annotations categories annotations.bbox",)),
    "vqa": Kind(open_vqa, ("questions questions.question questions.image_id",)),
    "textvqa": Kind(open_textvqa, ("data data.question data.image_id",)),
    "gqa": Kind(open_gqa, ("*.question *.imageId",)),
    "ocrvqa": Kind(open_ocrvqa, ("*.questions *.answers *.imageURL",)),
    "docvqa": Kind(open_docvqa, ("data data.questionId data.question data.image",)),
    "chartqa": Kind(open_chartqa, ("[].imgname [].query [].label",)),
    "ocrbench": Kind(open_ocrbench, ("[].image_path [].question [].answers",)),
    "hallusion": Kind(open_hallusion, ("[].visual_input [].figure_id [].gt_answer",)),
    "winoground": Kind(open_winoground, ("[].image_0 [].image_1 [].caption_0 [].caption_1",)),
    "aro": Kind(open_aro, ("[].image_path [].true_caption [].false_caption",)),
    "pope": Kind(open_pope, ("[].question_id [].image [].text [].label", "/pope")),
    "mmbench": Kind(open_mmbench, ("|index |question |image |A |B",)),
    "mmmu": Kind(partial(open_columns, "mmmu"), ()),  # parquet alone, as is the next
    "realworldqa": Kind(partial(open_columns, "realworldqa"), ()),
    "mme": Kind(open_mme, ("|index |question |image |answer", "/questions")),
    "charades-sta": Kind(open_charades, ("##",)),
    "qvhighlights": Kind(open_qvhighlights, ("[].qid [].query [].vid",)),
    "activitynet-captions": Kind(open_activitynet, ("*.timestamps *.sentences",)),
    "v-niah": Kind(open_needles, ("[].path [].prompt [].answer",)),
    "arc": Kind(open_arc, ("[].id [].question [].answerKey", "/arc")),
    "hellaswag": Kind(open_hellaswag, ("[].activity_label [].ctx_a [].ctx_b [].endings", "/hellaswag")),
    "piqa": Kind(open_piqa, ("[].goal [].sol1 [].sol2",)),
    "siqa": Kind(open_siqa, ("[].context [].question [].answerA [].answerB [].answerC",)),
    "winogrande": Kind(open_winogrande, ("[].sentence [].option1 [].option2",)),
    "images": Kind(open_images, ("/metadata", "/picture")),
    "videos": Kind(open_videos, ("/video",)),
}

_LOOKED_AT = 5000  # files of a folder, at most, before it is guessed


def open_format(kind: str, path: str | Path, **options: Any) -> Samples:
    """A data set of one of `KINDS`, opened: numbered samples, their pictures read when asked for.

    Options are the format's own; most take `pictures` (the folder they lie in; beside the file unless said) and
    `anywhere` (follow names and links that lead out of it).
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no format {kind!r}", nearest(kind, KINDS))
    columns = Path(path).suffix == ".parquet" or (kind in COLUMNS and is_parquet(Path(path)))
    opened = partial(open_columns, kind) if columns else KINDS[kind].open
    known = list(inspect.signature(opened).parameters)[1:]
    for name in options:
        if name not in known:
            form = "as parquet " if columns else ""
            remedy = nearest(name, known) if known else "leave it out"
            raise ConfigError(f"the format {kind!r} {form}has no option {name!r}", remedy)
    return opened(Path(path), **options)


def guess(path: str | Path) -> str:
    """Which of `KINDS` a file or folder is; an error with what was seen if it is none."""
    path = Path(path)
    if is_parquet(path):
        return guess_columns(path)
    try:
        seen = set(_folder_signs(path) if path.is_dir() else _file_signs(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path!s:.200} cannot be read: {error}", "check it and its permissions") from error
    for name, kind in KINDS.items():
        if any(seen.issuperset(signs.split()) for signs in kind.signs):
            return name
    if path.suffix == ".tar" or "/tar" in seen:
        raise DataError(f"{path} is WebDataset shards", "open them with vitrail.data.shards")
    shown = ", ".join(sorted(seen)[:12]) or "nothing of use"
    raise DataError(f"{path} is no format known here; seen in it: {shown:.300}", f"name one: {', '.join(KINDS)}")


def _folder_signs(path: Path) -> Iterable[str]:
    for entry in islice(path.rglob("*"), _LOOKED_AT):
        suffix = entry.suffix.lower()
        deep = entry.parent != path
        if suffix in PICTURES:
            yield "/picture"
        elif suffix in VIDEOS:
            yield "/video"
        elif suffix == ".tar":
            yield "/tar"
        elif entry.name in METADATA and not deep:
            yield "/metadata"
        elif suffix == ".txt" and deep and _has_answer(entry):
            yield "/questions"
        elif suffix in (".json", ".jsonl") and "pope" in entry.name and any(s in entry.name for s in SPLITS):
            yield "/pope"
        elif suffix == ".jsonl" and entry.name.startswith(("ARC-", "hellaswag_")):
            yield "/arc" if entry.name.startswith("ARC-") else "/hellaswag"


def _has_answer(text: Path) -> bool:
    """A caption beside a picture is a .txt too; MME's lines end in a tab and Yes or No."""
    with text.open("rb") as file:
        return file.readline(1 << 16).strip().lower().endswith((b"\tyes", b"\tno"))


def _file_signs(path: Path) -> Iterable[str]:
    if path.suffix == ".tar":
        return
    if path.suffix.lower() == ".tsv":
        with path.open("rb") as file:
            head = file.readline(1 << 16).decode("utf-8-sig", "replace").strip("\r\n")
        yield from (f"|{column}" for column in head.split("\t"))
        return
    data = read_bytes(path).lstrip()
    if data[:1] == b"[":
        rows = decode(data, list[msgspec.Raw], str(path))
        yield from (f"[].{key}" for key in _keys(rows[:1]))
    elif data[:1] == b"{":
        try:
            whole = decode(data, dict[str, msgspec.Raw], str(path))
        except DataError:  # JSON lines: each is whole by itself
            yield from (f"[].{key}" for key in _keys(data.splitlines()[:1]))
            return
        yield from _object_signs(whole)
    elif CHARADES.fullmatch(data.partition(b"\n")[0].decode("utf-8", "replace")):
        yield "##"
    else:
        raise DataError(
            f"{path} begins with {data[:20]!r}", f"JSON, TSV or a folder was expected for {', '.join(KINDS)}"
        )


def _object_signs(whole: dict[str, msgspec.Raw]) -> Iterable[str]:
    if len(whole) and all(_starts(value, b"{") for value in list(whole.values())[:3]):
        yield from (f"*.{key}" for key in _keys(list(whole.values())[:1]))
    for name, value in whole.items():
        yield name
        yield f"[].{name}"  # JSON lines of one line look like this
        if _starts(value, b"["):
            rows = decode(value, list[msgspec.Raw], name)
            yield from (f"{name}.{key}" for key in _keys(rows[:1]))
        if name.isdecimal():  # by id: one is enough
            return


def _starts(value: msgspec.Raw, mark: bytes) -> bool:
    return bytes(memoryview(value)[:64]).lstrip()[:1] == mark


def _keys(rows: Iterable[bytes | msgspec.Raw]) -> Iterable[str]:
    """Keys of the first row, if it is an object."""
    for row in rows:
        try:
            yield from decode(row, dict[str, msgspec.Raw], "a row")
        except DataError:
            return
