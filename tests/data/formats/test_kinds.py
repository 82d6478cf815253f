"""All formats alike: opened by name, recognised, read, sent to another process."""

import pickle
import tarfile

import numpy as np
import pytest

from vitrail.data.formats import KINDS, guess, open_format
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.processing.chat import ChatTemplate


def test_every_format_opens_reads_and_is_recognised(any_made):
    kind, made = any_made
    assert guess(made.path) == kind
    samples = open_format(kind, made.path, **made.options)
    samples.check()
    assert samples.kind == kind and len(samples) == len(list(samples)) > 0
    assert len({sample.id for sample in samples}) == len(samples)
    for number, sample in enumerate(samples):
        assert samples[number] == sample
        for index in range(len(sample.pictures)):
            assert sample.image(index).size == (8, 6)
        for turn in sample.turns:
            assert turn.text
            assert all(part.index < len(sample.pictures) for part in turn.parts if part.kind == "image")
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_every_format_goes_to_another_process(any_made):
    kind, made = any_made
    samples = open_format(kind, made.path, **made.options)
    assert list(pickle.loads(pickle.dumps(samples))) == list(samples)


def test_every_kind_has_a_tiny_file(makers):
    parquet = {"mmmu", "realworldqa"}  # alone: tested with the hubs' columns
    assert {kind for kind, _ in makers.values()} | {"videos"} | parquet == set(KINDS)


def test_turns_go_into_a_chat_template(make):
    made = make("pope")
    sample = open_format("pope", made.path, **made.options)[0]
    assert sample.messages() == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is there a card in the image?"}]}
    ]
    assert "Is there a card" in ChatTemplate.preset("chatml").render(sample.messages())


def test_what_is_asked_wrongly_is_said(make, tmp_path):
    made = make("gqa")
    with pytest.raises(ConfigError, match="did you mean 'llava'"):
        open_format("lava", made.path)
    with pytest.raises(ConfigError, match="did you mean 'pictures'"):
        open_format("gqa", made.path, picturs="here")
    with pytest.raises(DataError, match="is no folder"):
        open_format("gqa", made.path, pictures=tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        open_format("gqa", tmp_path / "nothing.json")
    with pytest.raises(DataError, match="is a folder"):
        open_format("gqa", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "seen"),
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
def test_guess_says_what_it_saw(tmp_path, name, content, seen):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=seen):
        guess(tmp_path / name)


def test_guess_of_folders(tmp_path):
    with pytest.raises(DataError, match="nothing of use"):
        guess(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "clip.mp4").write_bytes(b"")
    assert guess(tmp_path) == "videos"
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "0.tar", "w"):
        pass
    for path in (shards, shards / "0.tar"):
        with pytest.raises(VitrailError, match=r"vitrail\.data\.shards"):
            guess(path)


def test_one_json_line_is_json_lines(tmp_path, make):
    made = make("pope")
    line = made.files[0].read_text().splitlines()[0]
    one = tmp_path / "one.json"
    one.write_text(line)
    assert guess(one) == "pope"
    assert open_format("pope", one, **made.options)[0].id == "1"


def test_check_counts_what_cannot_be_read(make):
    made = make("vqa")
    (made.options["pictures"] / "COCO_val2014_000000000001.jpg").unlink()
    samples = open_format("vqa", made.path, **made.options)
    with pytest.raises(DataError, match=r"1 of 3 samples .* sample 10: picture 'COCO_val2014_000000000001.jpg' is not"):
        samples.check()


def test_a_broken_picture_names_its_sample(make):
    made = make("gqa")
    (made.options["pictures"] / "n1.jpg").write_bytes(b"no picture")
    sample = open_format("gqa", made.path, **made.options)[0]
    with pytest.raises(VitrailError, match=r"sample 02930152: .*n1\.jpg is not a picture"):
        sample.image()


def test_pictures_arrive_as_rgb(make):
    made = make("mmbench")
    sample = open_format("mmbench", made.path)[1]  # its picture is that of another row
    assert np.asarray(sample.image())[0, 0].tolist() == [0, 128, 128]
