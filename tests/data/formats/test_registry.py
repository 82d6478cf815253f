"""All formats: opened by name, detected, read and sent to another process."""

import pickle
import tarfile

import numpy as np
import pytest

from vitrail.data.formats import FORMATS, detect_format, open_dataset
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.processing.chat_template import ChatTemplate


def test_every_format_is_detected_and_read(any_made):
    kind, made = any_made
    assert detect_format(made.path) == kind
    samples = open_dataset(kind, made.path, **made.options)
    samples.check()
    assert samples.format_name == kind and len(samples) == len(list(samples)) > 0
    assert len({sample.id for sample in samples}) == len(samples)
    for number, sample in enumerate(samples):
        assert samples[number] == sample
        for index in range(len(sample.images)):
            assert sample.load_image(index).size == (8, 6)
        for turn in sample.turns:
            assert turn.text
            assert all(part.index < len(sample.images) for part in turn.parts if part.kind == "image")
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_every_format_can_be_pickled(any_made):
    kind, made = any_made
    samples = open_dataset(kind, made.path, **made.options)
    assert list(pickle.loads(pickle.dumps(samples))) == list(samples)


def test_every_format_has_a_test_file(makers):
    parquet = {"mmmu", "realworldqa"}  # parquet only: tested with the hubs' columns
    assert {kind for kind, _ in makers.values()} | {"videos"} | parquet == set(FORMATS)


def test_messages_fit_a_chat_template(make):
    made = make("pope")
    sample = open_dataset("pope", made.path, **made.options)[0]
    assert sample.to_messages() == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there a card in the image?"}]}
    ]
    assert "Is there a card" in ChatTemplate.from_preset("chatml").render(sample.to_messages())


def test_invalid_arguments_are_refused(make, tmp_path):
    made = make("gqa")
    with pytest.raises(ConfigError, match="did you mean 'llava'"):
        open_dataset("lava", made.path)
    with pytest.raises(ConfigError, match="did you mean 'image_folder'"):
        open_dataset("gqa", made.path, image_foldr="here")
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset("gqa", made.path, image_folder=tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        open_dataset("gqa", tmp_path / "nothing.json")
    with pytest.raises(DataError, match="is a folder"):
        open_dataset("gqa", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", b'{"frobs": [{"x": 1}]}', "frobs.x"),
        ("b.jsonl", b'{"x": 1}\n{"x": 2}\n', r"\[\].x"),
        ("c.json", b'"words"', "begins with"),
        ("d.json", b"", "empty"),
        ("e.tsv", b"index\timage\n", r"\|index"),
        ("f.json", b"[]", "nothing of use"),
        ("g.json", b"\xff\xfe[\x00]\x00", "UTF-16"),
        ("h.json", b"[" * 100_000, "nested too deeply"),
    ],
)
def test_detection_errors_name_what_was_found(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=found):
        detect_format(tmp_path / name)


def test_detection_of_folders(tmp_path):
    with pytest.raises(DataError, match="nothing of use"):
        detect_format(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "clip.mp4").write_bytes(b"")
    assert detect_format(tmp_path) == "videos"
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "0.tar", "w"):
        pass
    for path in (shards, shards / "0.tar"):
        with pytest.raises(VitrailError, match=r"vitrail\.data\.shards"):
            detect_format(path)


def test_single_json_line_is_json_lines(tmp_path, make):
    made = make("pope")
    line = made.files[0].read_text().splitlines()[0]
    one = tmp_path / "one.json"
    one.write_text(line)
    assert detect_format(one) == "pope"
    assert open_dataset("pope", one, **made.options)[0].id == "1"


def test_check_counts_unreadable_samples(make):
    made = make("vqa")
    (made.options["image_folder"] / "COCO_val2014_000000000001.jpg").unlink()
    samples = open_dataset("vqa", made.path, **made.options)
    with pytest.raises(DataError, match=r"1 of 3 samples .* sample 10: image 'COCO_val2014_000000000001.jpg' is not"):
        samples.check()


def test_broken_image_names_its_sample(make):
    made = make("gqa")
    (made.options["image_folder"] / "n1.jpg").write_bytes(b"no picture")
    sample = open_dataset("gqa", made.path, **made.options)[0]
    with pytest.raises(VitrailError, match=r"sample 02930152: .*n1\.jpg is not an? "):
        sample.load_image()


def test_images_are_rgb(make):
    made = make("mmbench")
    sample = open_dataset("mmbench", made.path)[1]  # its image is that of another row
    assert np.asarray(sample.load_image())[0, 0].tolist() == [0, 128, 128]
