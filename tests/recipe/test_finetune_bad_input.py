"""Bad input of `vitrail finetune`: errors name the item, skipped samples are counted, and no code of the data runs."""

import io
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from hub.shrunk_checkpoints import write_checkpoint
from vitrail import hub
from vitrail.data.formats import json_rows, registry
from vitrail.errors import VitrailError
from vitrail.hub.peft_adapters import load_adapter
from vitrail.recipe.finetuning import FinetuneConfig, FinetunePlan, finetune

TURNS = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a red cube"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint("llava-hf/llava-1.5-7b-hf", tmp_path_factory.mktemp("bad") / "base")


def encode_png(n: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def settings(base, data, **more) -> FinetuneConfig:
    defaults = {"batch_size": 2, "rank": 2, "max_length": 256, "dtype": "float32"}
    return FinetuneConfig(model=str(base), data=str(data), **defaults | more)


def write_json(folder: Path, count: int = 6, changes: dict | None = None) -> Path:
    (folder / "photo.png").write_bytes(encode_png())
    rows = [{"id": f"r{n}", "image": "photo.png", "conversations": TURNS} for n in range(count)]
    for number, change in (changes or {}).items():
        rows[number] |= change
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


def write_shards(folder: Path, count: int = 6, changes: dict | None = None) -> Path:
    with webdataset.TarWriter(str(folder / "a.tar")) as writer:
        for n in range(count):
            sample = {"__key__": f"r{n}", "png": encode_png(n), "json": {"conversations": TURNS}}
            writer.write(sample | (changes or {}).get(n, {}))
    return folder / "a.tar"


TWICE = [{"from": "human", "value": "<image><image>what?"}, TURNS[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "gone.png"}, "sample r4: image 'gone.png' is not in"),
        ({"conversations": TWICE}, r"sample 4 \(r4\): the text has 2 × <image>, but the sample names 1 image"),
        ({"image": None}, r"sample 4 \(r4\): the text has 1 × <image>, but the sample names 0 image"),
        ({"image": "../secret.png"}, "sample r4: image '../secret.png' leads out of"),
        ({"image": "link.png"}, "sample r4: image 'link.png' leads out of"),
        ({"image": "https://example.org/a.png"}, "sample r4: image 'https://example.org/a.png' is a URL"),
    ],
)
def test_a_bad_sample_is_named_before_training(base, tmp_path, change, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encode_png())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(VitrailError, match=message):
        FinetunePlan(settings(base, write_json(folder, changes={4: change})), "cpu")


def test_a_damaged_image_is_named_when_it_is_read(base, tmp_path):
    data = write_json(tmp_path, 12, {11: {"image": "bad.png"}})
    (tmp_path / "bad.png").write_bytes(encode_png()[:100])
    with pytest.raises(VitrailError, match="conversation r11: sample r11"):
        finetune(settings(base, data, steps=12), tmp_path / "out", device="cpu", quiet=True)


def write_empty_parquet(folder: Path) -> Path:
    schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    pq.write_table(schema.empty_table(), folder / "empty.parquet")
    return folder / "empty.parquet"


def write_text(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


EMPTY = {
    "list": lambda folder: write_text(folder, "a.json", "[]"),
    "file": lambda folder: write_text(folder, "a.json", ""),
    "lines": lambda folder: write_text(folder, "a.jsonl", "\n\n"),
    "folder": lambda folder: folder,
    "shard": lambda folder: write_shards(folder, 0),
    "parquet": write_empty_parquet,
    "nothing": lambda folder: folder / "none.json",
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_dataset_is_named(base, tmp_path, kind):
    folder = tmp_path / "empty"
    folder.mkdir()
    path = EMPTY[kind](folder)
    with pytest.raises(VitrailError, match=r"empty|no samples|holds nothing|does not exist") as error:
        FinetunePlan(settings(base, path), "cpu")
    assert path.name in str(error.value)


def test_skipped_samples_of_shards_are_counted_and_listed(base, tmp_path, capsys):
    data = write_shards(tmp_path, 8, {3: {"png": b"no image"}, 5: {"json": {"conversations": TWICE}}})
    finetune(settings(base, data, steps=4), tmp_path / "out", device="cpu", quiet=True)
    assert "read 8 of 8 samples, 2 faults" in capsys.readouterr().err
    report = (tmp_path / "out/finetune/skipped.txt").read_text()
    assert "a.tar: r3.png" in report and "a.tar: r5 the text has 2 × <image>" in report


def test_a_truncated_shard_trains_on_what_is_whole_and_says_so(base, tmp_path):
    data = write_shards(tmp_path)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    summary = "\n".join(FinetunePlan(settings(base, data), "cpu").format_summary())
    assert "unreadable so far" in summary and "a.tar" in summary
    data.write_bytes(data.read_bytes()[:600])
    with pytest.raises(VitrailError, match=r"a\.tar hold no samples"):
        FinetunePlan(settings(base, data), "cpu")


def test_skipped_samples_of_a_large_file_are_counted(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "cache"))
    for module in (json_rows, registry):
        monkeypatch.setattr(module, "LARGE_FILE_BYTES", 1)
    data = write_json(tmp_path, 8, {3: {"image": "gone.png"}, 6: {"image": "../x.png"}})
    finetune(settings(base, data, steps=4), tmp_path / "out", device="cpu", quiet=True)
    assert "read 8 of 8 samples, 2 faults" in capsys.readouterr().err
    report = (tmp_path / "out/finetune/skipped.txt").read_text()
    assert "sample 3: sample r3#3: image 'gone.png' is not in" in report and "leads out of" in report
    shutil.rmtree(tmp_path / "out")
    write_json(tmp_path, 30, {n: {"image": "gone.png"} for n in range(0, 30, 2)})
    with pytest.raises(VitrailError, match=r"(?s)unreadable, more than the limit of 1.00%.*gone\.png"):
        FinetunePlan(settings(base, data), "cpu")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_of_the_data_runs(base, tmp_path):
    trap = tmp_path / "ran"
    pickled = pickle.dumps(Trap(trap))
    folder = tmp_path / "data"
    folder.mkdir()
    with webdataset.TarWriter(str(folder / "a.tar"), encoder=False) as writer:
        for n in range(6):
            document = json.dumps({"conversations": TURNS}).encode()
            traps = dict.fromkeys(("pkl", "pyd", "pth"), pickled)
            writer.write({"__key__": f"r{n}", "png": encode_png(n), "json": document} | traps)
    (folder / "a.py").write_text(f"open({str(trap)!r}, 'w')")
    finetune(settings(base, folder, steps=3), tmp_path / "out", device="cpu", quiet=True)
    assert not trap.exists()
    pickle.loads(pickled)
    assert trap.exists()  # the trap works


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    (tmp_path / "data").mkdir()
    adapter = finetune(
        settings(base, write_json(tmp_path / "data"), steps=1), tmp_path / "out", device="cpu", quiet=True
    )
    other = hub.load(write_checkpoint("Qwen/Qwen3-VL-30B-A3B-Instruct", tmp_path / "other"))
    with pytest.raises(VitrailError, match=r"adapter|q_proj|layer") as error:
        load_adapter(other, adapter)
    assert error.value.remedy
