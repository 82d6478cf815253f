"""`vitrail finetune` on files that other programs write: one command each, a kill, resumption, and the adapter in peft.

The rows have the structure of published examples: LLaVA's JSON, LLaMA-Factory's demo in ShareGPT's and its own format,
ms-swift's JSON lines, the columns of TRL's vision datasets, the image folders of Hugging Face datasets, and the
captions of img2dataset's shards.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers import relative
from hub.shrunk_checkpoints import write_checkpoint
from hub.vlm_parity import build_samples, compute_logits, compute_reference
from vitrail import hub

ROWS, STEPS, SAVE_EVERY = 10, 24, 3
QUESTION, ANSWERS = "what is this?", ("a red cube", "a blue ball")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint("llava-hf/llava-1.5-7b-hf", tmp_path_factory.mktemp("acceptance") / "base")


def make_image(n: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def save_images(folder: Path) -> list[str]:
    (folder / "images").mkdir()
    for n in range(ROWS):
        make_image(n).save(folder / f"images/{n}.jpg")
    return [f"images/{n}.jpg" for n in range(ROWS)]


def write_llava_by_pandas(folder: Path) -> Path:
    """LLaVA's columns; rows without an image have null."""
    import pandas

    names = save_images(folder)
    turns = [
        [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": ANSWERS[n % 2]}]
        for n in range(ROWS)
    ]
    turns[3] = [{"from": "human", "value": "how many?"}, {"from": "gpt", "value": "what"}]
    table = {"id": range(ROWS), "image": [None if n == 3 else name for n, name in enumerate(names)]}
    pandas.DataFrame(table | {"conversations": turns}).to_json(folder / "llava.json", orient="records")
    return folder / "llava.json"


def write_sharegpt_by_datasets(folder: Path) -> Path:
    """ShareGPT's turns with several images and a system message, as JSON lines of `Dataset.to_json`."""
    import datasets

    names = save_images(folder)
    turns = [
        [{"from": "human", "value": f"<image><image>{QUESTION}"}, {"from": "gpt", "value": ANSWERS[n % 2]}]
        for n in range(ROWS)
    ]
    rows = {
        "conversations": turns,
        "system": ["what is this"] * ROWS,
        "images": [[names[n], names[-1 - n]] for n in range(ROWS)],
    }
    datasets.Dataset.from_dict(rows).to_json(folder / "sharegpt.jsonl")
    return folder / "sharegpt.jsonl"


def write_messages_by_json(folder: Path) -> Path:
    """ms-swift's JSON lines."""
    names = save_images(folder)
    with (folder / "swift.jsonl").open("w") as file:
        for n, name in enumerate(names):
            messages = [{"role": "user", "content": f"<image>{QUESTION}"}]
            messages += [{"role": "assistant", "content": ANSWERS[n % 2]}]
            file.write(json.dumps({"messages": messages, "images": [name]}) + "\n")
    return folder / "swift.jsonl"


def write_parquet_by_datasets(folder: Path) -> Path:
    """The columns of LLaMA-Factory's demo on the hub, with an `Image` feature."""
    import datasets

    messages = [
        [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": ANSWERS[n % 2]}]
        for n in range(ROWS)
    ]
    rows = {"messages": messages, "images": [[make_image(n)] for n in range(ROWS)]}
    made = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    made.to_parquet(folder / "train-00000-of-00001.parquet")
    return folder / "train-00000-of-00001.parquet"


def write_parquet_parts_by_datasets(folder: Path) -> Path:
    """TRL's vision columns: content is a list of parts, and `images` has one image."""
    import datasets

    parts = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    messages = [
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[n % 2]}]},
        ]
        for n in range(ROWS)
    ]
    rows = {"messages": messages, "images": [make_image(n) for n in range(ROWS)]}
    made = datasets.Dataset.from_dict(rows).cast_column("images", datasets.Image())
    (folder / "data").mkdir()
    made.to_parquet(folder / "data/train.parquet")
    return folder / "data"


def write_image_folder(folder: Path) -> Path:
    """An image folder of Hugging Face datasets with a split, and metadata written by pandas."""
    import pandas

    (folder / "photos/train").mkdir(parents=True)
    for n in range(ROWS):
        make_image(n).save(folder / f"photos/train/{n}.png")
    table = {"file_name": [f"{n}.png" for n in range(ROWS)], "text": [ANSWERS[n % 2] for n in range(ROWS)]}
    pandas.DataFrame(table).to_csv(folder / "photos/train/metadata.csv", index=False)
    import datasets

    read = datasets.load_dataset("imagefolder", data_dir=str(folder / "photos"), cache_dir=str(folder / "cache"))
    assert read["train"][1]["text"] == ANSWERS[1]  # the reference reads it too
    return folder / "photos"


def write_captions(folder: Path) -> Path:
    """Images with text files of the same name."""
    (folder / "captions").mkdir()
    for n in range(ROWS):
        make_image(n).save(folder / f"captions/{n}.png")
        (folder / f"captions/{n}.txt").write_text(ANSWERS[n % 2] + "\n")
    return folder / "captions"


def write_shards_by_webdataset(folder: Path) -> Path:
    """img2dataset's members: jpg, txt and json."""
    import webdataset

    (folder / "shards").mkdir()
    with webdataset.ShardWriter(str(folder / "shards/%05d.tar"), maxcount=4, verbose=0) as writer:
        for n in range(ROWS):
            caption = ANSWERS[n % 2]
            document = {"caption": caption, "key": f"{n:09}", "status": "success", "width": 60, "height": 40}
            writer.write({"__key__": f"{n:09}", "jpg": make_image(n), "txt": caption, "json": document})
    return folder / "shards"


WRITERS = [
    write_llava_by_pandas,
    write_sharegpt_by_datasets,
    write_messages_by_json,
    write_parquet_by_datasets,
    write_parquet_parts_by_datasets,
    write_image_folder,
    write_captions,
    write_shards_by_webdataset,
]
KILLED = {write_llava_by_pandas, write_sharegpt_by_datasets, write_parquet_by_datasets, write_shards_by_webdataset}


def build_command(base: Path, data: Path, out: Path, steps: int = STEPS) -> list[str]:
    options = f"--steps {steps} --batch-size 2 --rank 2 --dropout 0.1 --max-length 256 --save-every {SAVE_EVERY}"
    command = [sys.executable, "-m", "vitrail", "finetune", str(base), str(data), "--out", str(out), "--device", "cpu"]
    return [*command, *options.split(), "--dtype", "float32", "--lr", "1e-3"]


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def kill_in_the_middle(command: list[str], out: Path) -> int:
    """Start a training, kill it when it has saved twice, and return the number of logged steps."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = out / "finetune/log.jsonl"
    while process.poll() is None:
        rows = log.read_text().splitlines() if log.is_file() else []
        if len([row for row in rows if '"loss"' in row]) > 2 * SAVE_EVERY:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors[-3000:]
    return len(log.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_one_command_trains_on_files_of_other_programs(base, tmp_path, write):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    data, is_killed = write(tmp_path), write in KILLED
    steps = STEPS if is_killed else 2
    done = run_command(build_command(base, data, tmp_path / "whole", steps))
    adapter = tmp_path / "whole/adapter"
    assert done.stdout.strip() == f"→ {adapter}"
    assert f"{ROWS} conversations" in (adapter / "README.md").read_text()
    whole = load_file(adapter / "adapter_model.safetensors")
    if is_killed:
        out = tmp_path / "killed"
        assert kill_in_the_middle(build_command(base, data, out), out) < STEPS
        assert not (out / "adapter").exists()
        run_command(build_command(base, data, out))
        resumed = load_file(out / "adapter/adapter_model.safetensors")
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert any(tensor.abs().max() > 0 for name, tensor in whole.items() if "lora_B" in name)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(reference, adapter).eval()
    ours = hub.load(tmp_path / "whole/final").eval()
    samples = build_samples(ours)
    with torch.no_grad():
        expected = compute_reference(adapted, *samples, lambda _s, _m, v: {"pixel_values": torch.cat(v)} if v else {})
        for a, b in zip(compute_logits(ours, *samples), expected, strict=True):
            assert relative(a, b) <= 1e-4
