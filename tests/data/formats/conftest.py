"""A tiny valid dataset of every format, written anew for each test."""

import base64
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image


class Made(NamedTuple):
    path: Path
    options: dict[str, Any]
    files: tuple[Path, ...]  # files that fuzzing may damage


def png(colour: str = "teal", size: tuple[int, int] = (8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tsv(rows: list[list[str]]) -> str:
    return "".join("\t".join(cells) + "\n" for cells in rows)


def llava(root: Path) -> Made:
    for name in ("a.png", "b.png"):
        write(root / "pictures" / name, png())
    rows = [
        {
            "id": "one",
            "image": "a.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": "A teal card."},
            ],
        },
        {
            "id": 2,
            "image": ["a.png", "b.png"],
            "conversations": [
                {"from": "human", "value": "Compare <image> with <image>."},
                {"from": "gpt", "value": "Equal."},
            ],
        },
        {"id": "words", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]
    path = write(root / "llava.json", rows)
    return Made(path, {"image_folder": root / "pictures"}, (path,))


def messages(root: Path) -> Made:
    for name in ("a.png", "b.png"):
        write(root / "pictures" / name, png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "text", "text": "Which colour?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    contents = ["<image>\nWhat is this?", parts, "Hi"]
    rows = [
        {"id": "one", "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Teal."}]}
        for content in contents
    ]
    rows[0] |= {"images": ["a.png"]}
    path = write(root / "messages.json", rows)
    return Made(path, {"image_folder": root / "pictures"}, (path,))


def _coco(root: Path) -> dict[str, Any]:
    write(root / "val" / "000000000042.png", png())
    write(root / "val" / "000000000007.png", png("red"))
    return {
        "info": {"year": 2017},
        "images": [
            {"id": 42, "file_name": "000000000042.png", "height": 6, "width": 8},
            {"id": 7, "file_name": "000000000007.png", "height": 6, "width": 8},
        ],
    }


def coco_captions(root: Path) -> Made:
    captions = [(42, "a card"), (7, "red"), (42, "a teal card")]
    annotations = [{"id": n, "image_id": i, "caption": caption} for n, (i, caption) in enumerate(captions)]
    path = write(root / "captions.json", _coco(root) | {"annotations": annotations})
    return Made(path, {"image_folder": root / "val"}, (path,))


def coco_instances(root: Path) -> Made:
    shared = {"image_id": 42, "area": 6.0}
    annotations = [
        shared
        | {
            "id": 1,
            "category_id": 18,
            "bbox": [1, 1, 3, 2],
            "iscrowd": 0,
            "segmentation": [[1, 1, 4, 1, 4, 3, 1, 3]],
        },
        shared
        | {
            "id": 2,
            "category_id": 1,
            "bbox": [0, 0, 8, 6],
            "iscrowd": 1,
            "segmentation": {"size": [6, 8], "counts": [6, 6, 36]},
        },
        shared
        | {
            "id": 3,
            "category_id": 1,
            "bbox": [0.5, 0, 2.25, 1],
            "iscrowd": 1,
            "segmentation": {"size": [6, 8], "counts": "66T1"},
        },
    ]
    categories = [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
    path = write(root / "instances.json", _coco(root) | {"annotations": annotations, "categories": categories})
    return Made(path, {"image_folder": root / "val"}, (path,))


def vqa(root: Path) -> Made:
    questions, annotations = [], []
    for number in range(3):
        write(root / "val2014" / f"COCO_val2014_{number:012d}.jpg", png())
        questions.append({"question_id": number * 10, "image_id": number, "question": f"What is in {number}?"})
        annotations.append(
            {
                "question_id": number * 10,
                "image_id": number,
                "question_type": "what is",
                "answer_type": "other",
                "multiple_choice_answer": "card",
                "answers": [{"answer": "card", "answer_confidence": "yes", "answer_id": i} for i in range(1, 11)],
            }
        )
    path = write(root / "questions.json", {"data_subtype": "val2014", "questions": questions})
    answers = write(root / "annotations.json", {"data_subtype": "val2014", "annotations": annotations})
    return Made(path, {"image_folder": root / "val2014", "annotation_file": answers}, (path, answers))


def gqa(root: Path) -> Made:
    write(root / "images" / "n1.jpg", png())
    rows = {
        "02930152": {
            "question": "Is it dark?",
            "imageId": "n1",
            "answer": "no",
            "fullAnswer": "No, it is not dark.",
            "isBalanced": True,
            "types": {"detailed": "weatherVerifyC", "semantic": "global", "structural": "verify"},
            "semantic": [{"operation": "select", "dependencies": [], "argument": "scene"}],
        },
        "07333408": {"question": "What colour?", "imageId": "n1"},
    }
    path = write(root / "testdev.json", rows)
    return Made(path, {"image_folder": root / "images"}, (path,))


def textvqa(root: Path) -> Made:
    write(root / "train" / "0ee.jpg", png())
    row = {
        "question_id": 34602,
        "image_id": "0ee",
        "question": "what is the brand?",
        "answers": ["acme"] * 9 + ["acme inc"],
        "image_width": 8,
        "image_height": 6,
        "image_classes": ["Card"],
        "set_name": "val",
    }
    path = write(root / "TextVQA.json", {"dataset_name": "textvqa", "data": [row]})
    ocr = write(root / "ocr.json", {"data": [{"image_id": "0ee", "ocr_tokens": ["ACME", "INC"]}]})
    return Made(path, {"image_folder": root / "train", "ocr_file": ocr}, (path, ocr))


def pope(root: Path) -> Made:
    write(root / "val2014" / "x.jpg", png())
    files = []
    for split in ("random", "popular", "adversarial"):
        rows = [
            {"question_id": n, "image": "x.jpg", "text": f"Is there a {thing} in the image?", "label": label}
            for n, (thing, label) in enumerate([("card", "yes"), ("dog", "no")], start=1)
        ]
        files.append(write(root / "pope" / f"coco_pope_{split}.json", lines(rows)))
    return Made(root / "pope", {"image_folder": root / "val2014"}, tuple(files))


def mmbench(root: Path) -> Made:
    picture = base64.b64encode(png()).decode()
    rows = [
        ["index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image"],
        ["241", "Which colour?", "A hint", "teal", "red", "", "", "A", "attribute", picture],
        ["252", '"Two\nlines, ""quoted"""', "", "yes", "no", "maybe", "both", "D", "logic", "241"],
    ]
    path = write(root / "mmbench.tsv", tsv(rows))
    return Made(path, {}, (path,))


def mme(root: Path) -> Made:
    write(root / "mme" / "count" / "01.png", png())
    one = write(root / "mme" / "count" / "01.txt", "Is there one card? Please answer yes or no.\tYes\nTwo cards?\tNo\n")
    write(root / "mme" / "OCR" / "images" / "02.jpg", png())
    two = write(root / "mme" / "OCR" / "questions_answers_YN" / "02.txt", "Is it a?\tYes\nIs it b?\tNo")
    return Made(root / "mme", {}, (one, two))


def mme_table(root: Path) -> Made:
    picture = base64.b64encode(png()).decode()
    rows = [
        ["index", "image", "question", "answer", "category"],
        ["0", picture, "One card?", "Yes", "count"],
        ["1", "0", "Two cards?", "No", "count"],
    ]
    path = write(root / "MME.tsv", tsv(rows))
    return Made(path, {}, (path,))


def refcoco(root: Path) -> Made:
    write(root / "train2014" / "COCO_train2014_000000000009.jpg", png())
    shared = {"file_name": "COCO_train2014_000000000009.jpg", "height": 6, "width": 8, "original_id": 9}
    images_ = [shared | {"id": 0, "caption": "left card"}, shared | {"id": 1, "caption": "the other one"}]
    annotations = [{"id": n, "image_id": n, "bbox": [n, 1, 3, 2], "area": 6.0, "category_id": 1} for n in range(2)]
    file = {"info": [], "images": images_, "annotations": annotations, "categories": [{"id": 1, "name": "object"}]}
    path = write(root / "finetune_refcoco_val.json", file)
    return Made(path, {"image_folder": root / "train2014"}, (path,))


def chartqa(root: Path) -> Made:
    write(root / "png" / "417.png", png())
    rows = [{"imgname": "417.png", "query": "How many bars?", "label": "14"}]
    path = write(root / "test_human.json", rows)
    return Made(path, {"image_folder": root / "png"}, (path,))


def docvqa(root: Path) -> Made:
    write(root / "documents" / "pybv0228_81.png", png())
    row = {
        "questionId": 49153,
        "question": "What is the total?",
        "question_types": ["table/list"],
        "image": "documents/pybv0228_81.png",
        "docId": 14465,
        "answers": ["$975.00", "975.00"],
        "data_split": "val",
    }
    path = write(root / "val_v1.0.json", {"dataset_name": "docvqa", "dataset_split": "val", "data": [row]})
    return Made(path, {}, (path,))


def ocrbench(root: Path) -> Made:
    write(root / "IIIT5K" / "1.png", png())
    row = {"image_path": "IIIT5K/1.png", "question": "what is written?", "type": "Regular Text Recognition"}
    rows = [
        row | {"dataset_name": "IIIT5K", "answers": "CENTRE", "id": 0},
        row | {"dataset_name": "HME100k", "answers": ["x ^ 2"], "id": 1},
    ]
    path = write(root / "OCRBench.json", rows)
    return Made(path, {}, (path,))


def ocrvqa(root: Path) -> Made:
    for name in ("0761183272.jpg", "1445228777.png"):
        write(root / "images" / name, png())
    shared = {"title": "Mom's Family Wall Calendar 2016", "authorName": "Sandra Boynton", "genre": "Calendars"}
    rows = {
        "0761183272": shared
        | {
            "imageURL": "http://images.example/I/61Y5cOdHJbL.jpg",
            "questions": ["Who wrote this book?", "Is this a games related book?"],
            "answers": ["Sandra Boynton", "No"],
            "split": 3,
        },
        "1445228777": shared
        | {
            "imageURL": "http://images.example/I/51ZPAVu1H8L.png",
            "questions": ["What is the genre of this book?"],
            "answers": ["Calendars"],
            "split": 1,
        },
    }
    path = write(root / "dataset.json", rows)
    return Made(path, {"image_folder": root / "images"}, (path,))


def hallusion(root: Path) -> Made:
    write(root / "VS" / "chart" / "0_1.png", png())
    write(root / "VD" / "figure" / "0_0.png", png())
    columns = ("category", "subcategory", "visual_input", "figure_id", "question", "gt_answer", "filename")
    table = [
        ("VS", "chart", "0", "0", "More?", "1", None),
        ("VS", "chart", "1", "1", "More?", "0", "./VS/chart/0_1.png"),
        ("VD", "figure", "1", "0", "Equal?", "1", "./VD/figure/0_0.png"),
    ]
    shared = {"set_id": "0", "question_id": "0", "sample_note": "", "gt_answer_details": "It is so."}
    rows = [shared | dict(zip(columns, cells, strict=True)) for cells in table]
    path = write(root / "HallusionBench.json", rows)
    return Made(path, {}, (path,))


def winoground(root: Path) -> Made:
    for number in range(2):
        write(root / "images" / f"ex_0_img_{number}.png", png())
    row = {
        "id": 0,
        "image_0": "ex_0_img_0",
        "image_1": "ex_0_img_1",
        "caption_0": "an old person kisses a young person",
        "caption_1": "a young person kisses an old person",
        "tag": "Adjective-Age",
        "num_main_preds": 1,
        "collapsed_tag": "Object",
    }
    path = write(root / "examples.jsonl", lines([row]))
    return Made(path, {"image_folder": root / "images"}, (path,))


def aro(root: Path) -> Made:
    write(root / "images" / "2328.jpg", png(size=(12, 10)))
    row = {
        "image_id": "2328",
        "image_path": "2328.jpg",
        "true_caption": "the cat is on the mat",
        "false_caption": "the mat is on the cat",
        "relation_name": "on",
        "bbox_x": 1,
        "bbox_y": 2,
        "bbox_w": 8,
        "bbox_h": 6,
    }
    path = write(root / "visual_genome_relation.json", [row, row | {"relation_name": "behind"}])
    return Made(path, {"image_folder": root / "images"}, (path,))


def images(root: Path) -> Made:
    folder = root / "classes"
    for name in ("dog/2.png", "dog/10.png", "cat/1.png"):
        write(folder / name, png())
    text = write(folder / "dog/2.txt", "a dog\n")
    metadata = write(folder / "dog/2.json", {"caption": "a dog", "source": "here"})
    return Made(folder, {}, (text, metadata, folder / "dog/10.png"))


def images_metadata(root: Path) -> Made:
    folder = root / "told"
    write(folder / "sub" / "1.png", png())
    write(folder / "2.png", png())
    rows = [{"file_name": "sub/1.png", "text": "one", "label": 3}, {"file_name": "2.png", "text": "two"}]
    return Made(folder, {}, (write(folder / "metadata.jsonl", lines(rows)),))


def images_csv(root: Path) -> Made:
    folder = root / "told_csv"
    write(folder / "1.png", png())
    return Made(folder, {}, (write(folder / "metadata.csv", 'file_name,text\n1.png,"one, two"\n'),))


def _clips(root: Path, *names: str) -> dict[str, Any]:
    for name in names:
        write(root / "clips" / name, b"not looked into")
    return {"video_folder": root / "clips"}


def charades(root: Path) -> Made:
    lines_ = "3MSZA 24.3 30.4##person turn a light on.\n3MSZA 24.3 30.4##person turn the light switch on.\n"
    path = write(
        root / "charades_sta_test.txt", lines_ + "AMT7R 4.3 12.5##a person is putting a picture on the wall.\n"
    )
    return Made(path, _clips(root, "3MSZA.mp4", "AMT7R.mkv"), (path,))


def qvhighlights(root: Path) -> Made:
    shared = {"duration": 150, "relevant_clip_ids": [0, 1], "saliency_scores": [[4, 1, 1], [4, 1, 1]]}
    rows = [
        shared | {"qid": qid, "query": query, "vid": "NUs_60.0_210.0", "relevant_windows": windows}
        for qid, query, windows in ((2579, "A girl cooked.", [[82, 150]]), (9, "A ball.", [[0, 16], [20, 24.5]]))
    ]
    path = write(root / "highlight_val_release.jsonl", lines(rows))
    return Made(path, _clips(root, "NUs_60.0_210.0.mp4"), (path,))


def activitynet(root: Path) -> Made:
    annotation = {
        "duration": 82.73,
        "timestamps": [[0.83, 19.86], [17.37, 60.81]],
        "sentences": ["A woman walks. ", " She runs."],
    }
    path = write(root / "val_1.json", {"v_QOlSCBRmfWY": annotation, "v_ehGHCYKzyZ8": annotation})
    return Made(path, _clips(root, "v_QOlSCBRmfWY.webm", "v_ehGHCYKzyZ8.mp4"), (path,))


def needles(root: Path) -> Made:
    write(root / "images" / "note.png", png())
    rows = [
        {"path": "note.png", "prompt": f"\nWhat is {what} on the note?", "answer": "B"} for what in ("first", "last")
    ]
    path = write(root / "dataset.json", rows)
    return Made(path, {}, (path,))


def arc(root: Path) -> Made:
    files = []
    for set_name, number in (("Easy", 1), ("Challenge", 2)):
        options = [{"text": text, "label": label} for text, label in (("ice", "A"), ("steam", "B"), ("snow", "C"))]
        row = {"id": f"M_{number}", "question": {"stem": "Which is a gas?", "choices": options}, "answerKey": "B"}
        files.append(write(root / f"ARC-{set_name}" / f"ARC-{set_name}-Test.jsonl", lines([row])))
    return Made(root, {}, tuple(files))


def hellaswag(root: Path) -> Made:
    row = {"ind": 4, "activity_label": "Roofs", "ctx_a": "A man is on a roof.", "ctx_b": "he", "split_type": "indomain"}
    row |= {"ctx": "A man is on a roof. he", "endings": ["sits", "sings", "runs", "reads"], "source_id": "wikihow~1"}
    path = write(root / "hellaswag_val.jsonl", lines([row | {"label": 2}, row | {"ind": 5, "label": 0}]))
    return Made(path, {}, (path,))


def _with_labels(root: Path, name: str, rows: list[Any], labels: str) -> Made:
    path = write(root / f"{name}.jsonl", lines(rows))
    return Made(path, {}, (path, write(root / f"{name}-labels.lst", labels)))


def piqa(root: Path) -> Made:
    rows = [{"goal": goal, "sol1": "tap the lid", "sol2": "tap a cloud"} for goal in ("Open a jar", "Close it")]
    return _with_labels(root, "valid", rows, "1\n0\n")


def siqa(root: Path) -> Made:
    row = {"context": "Alex was late.", "answerA": "to win", "answerB": "for fun", "answerC": "none"}
    rows = [row | {"question": question} for question in ("Why did Alex run?", "What next?")]
    return _with_labels(root, "dev", rows, "1\n3\n")


def winogrande(root: Path) -> Made:
    row = {"sentence": "Ann beat Eve, so _ won.", "option1": "Ann", "option2": "Eve"}
    rows = [row | {"qID": f"3QH-{n}", "answer": str(n)} for n in (1, 2)]
    return _with_labels(root, "dev", rows, "1\n2\n")


MAKERS = {  # name → its format, and the function that writes it
    "llava": ("llava", llava),
    "messages": ("messages", messages),
    "coco-captions": ("coco-captions", coco_captions),
    "coco-instances": ("coco-instances", coco_instances),
    "vqa": ("vqa", vqa),
    "gqa": ("gqa", gqa),
    "textvqa": ("textvqa", textvqa),
    "pope": ("pope", pope),
    "mmbench": ("mmbench", mmbench),
    "mme": ("mme", mme),
    "mme-table": ("mme", mme_table),
    "refcoco": ("refcoco", refcoco),
    "chartqa": ("chartqa", chartqa),
    "docvqa": ("docvqa", docvqa),
    "ocrbench": ("ocrbench", ocrbench),
    "ocrvqa": ("ocrvqa", ocrvqa),
    "hallusion": ("hallusion", hallusion),
    "winoground": ("winoground", winoground),
    "aro": ("aro", aro),
    "charades-sta": ("charades-sta", charades),
    "qvhighlights": ("qvhighlights", qvhighlights),
    "activitynet-captions": ("activitynet-captions", activitynet),
    "v-niah": ("v-niah", needles),
    "arc": ("arc", arc),
    "hellaswag": ("hellaswag", hellaswag),
    "piqa": ("piqa", piqa),
    "siqa": ("siqa", siqa),
    "winogrande": ("winogrande", winogrande),
    "images": ("images", images),
    "images-metadata": ("images", images_metadata),
    "images-csv": ("images", images_csv),
}


@pytest.fixture(params=MAKERS)
def any_made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Made]:
    """Each format in turn: its name and its files."""
    kind, maker = MAKERS[request.param]
    return kind, maker(tmp_path)


@pytest.fixture
def make(tmp_path: Path):
    """Return a function that writes the named dataset and returns where."""
    return lambda name: MAKERS[name][1](tmp_path)


@pytest.fixture
def makers():
    return MAKERS
