"""Shards as a training source: contents, remote reading, faults, workers, and shards written by webdataset."""

import io
import itertools
import json
import pickle

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from training import ranks as rank_processes
from vitrail.data.image_captions import build_caption_source
from vitrail.data.qa import build_qa_dataset
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.scene_source import group_by_source
from vitrail.data.shards import ShardDataset, ShardsConfig, shard_file
from vitrail.data.shards.shard_file import RemoteFile, RemoteReadError
from vitrail.data.shards.shard_paths import expand_shards, is_shards
from vitrail.data.shards.shard_source import ShardConversationSource, ShardImageSource, ShardSourceConfig
from vitrail.data.source_spec import SourceContext
from vitrail.encoders.text_tower import TextTowerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, DataError
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig
from vitrail.processing.image_loading import load_image
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import DATA_SOURCES
from vitrail.tasks.contrastive_task import ContrastiveSettings, ContrastiveTask
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

COLOURS = ("red", "green", "blue", "teal", "gold", "navy")
COUNT = 24
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"a {colour} picture of number {n}" for colour in COLOURS for n in range(COUNT)]
    return Tokenizer.train(texts, 300, special_tokens=("<end>",), eos="<end>")


def make_image(n: int) -> Image.Image:
    pixels = np.kron(np.random.default_rng(n).integers(0, 256, (2, 3, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
    return Image.fromarray(pixels)


def make_turns(n: int) -> list[dict]:
    return [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": f"a {COLOURS[n % 6]} picture"}]


def write_webdataset(folder, count=COUNT, **more):
    """Write shards with the package webdataset, whose image and JSON encoders are its own."""
    with webdataset.ShardWriter(f"{folder}/part-%03d.tar", maxcount=7, verbose=0) as writer:
        for n in range(count):
            document = {"negative": f"no {COLOURS[n % 6]} picture", "conversations": make_turns(n)}
            sample = {"__key__": f"s{n:04}", "png": make_image(n), "txt": f"a {COLOURS[n % 6]} picture of number {n}"}
            writer.write(sample | {"cls": n % 6, "json": document} | more)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_webdataset(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def remote(shards, tmp_path, monkeypatch):
    """The same shards on a remote file system, with the index cache in a folder of the test."""
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_file, "FIRST_WAIT", 0.0)
    fs = fsspec.filesystem("memory")
    for path in shards.glob("*.tar"):
        fs.pipe_file(f"/data/{path.name}", path.read_bytes())
    yield fs
    fs.store.clear()


def open_source(paths, tokenizer=None, **more):
    config = ShardSourceConfig(paths=str(paths), **{"image_size": 16, "max_tokens": 16} | more)
    return DATA_SOURCES["shards"].open_source(config, SourceContext("shards", tokenizer, {}))


def test_images_and_captions_of_webdataset(shards, tokenizer):
    source = open_source(shards, tokenizer)
    assert isinstance(source, ShardImageSource) and len(source) == COUNT
    rows = group_by_source([source[n] for n in range(COUNT)])["shards"]
    assert rows.dtype == torch.uint8 and source.pixels(rows).shape == (COUNT, 3, 16, 16)
    expected = {s["__key__"]: s for s in webdataset.WebDataset(str(shards / "part-{000..003}.tar"), shardshuffle=False)}
    captions = build_caption_source(source).make_batch(rows).captions
    texts = source.pieces.to_texts(captions)
    assert texts == [sample["txt"].decode() for sample in expected.values()]
    for n, sample in enumerate(expected.values()):
        square = load_image(sample["png"]).crop((4, 0, 20, 16))
        assert np.array_equal(source.pixels(rows)[n].permute(1, 2, 0).numpy(), np.asarray(square))
    assert torch.equal(source.pixels(torch.tensor([3, 5])), source.pixels(rows[[3, 5]]))  # by index
    ids = source.pieces.tokenize(tokenizer, [], []).to_ids(captions, 16)[0]
    assert [tokenizer.decode(row[row > 0].tolist()) for row in ids] == texts


def test_classes_pairs_and_questions(shards, tokenizer):
    classes = open_source(shards, tokenizer, contents="classes", class_names=COLOURS, templates=("a {} thing", "{a}"))
    rows = group_by_source([classes.sample(n, (n, 1)) for n in range(COUNT)])["shards"]
    captions = build_caption_source(classes)
    assert captions.concepts == list(COLOURS) and captions.concept_rows(rows).tolist() == [n % 6 for n in range(COUNT)]
    texts = classes.pieces.to_texts(captions.make_batch(rows).captions)
    assert {text for text in texts if "red" in text} <= {"a red thing", "a red"} and all(
        COLOURS[n % 6] in text for n, text in enumerate(texts)
    )
    pairs = open_source(shards, tokenizer, contents="pairs")
    rows = group_by_source([pairs[n] for n in range(2)])["shards"]
    batch = build_caption_source(pairs).make_batch(rows, swap_negatives=True)
    assert pairs.pieces.to_texts(batch.negative_captions) == ["no red picture", "no green picture"]
    questions = build_qa_dataset(pairs, 1).sample_qa(rows)
    end = len(pairs.pieces)
    answers = [[p for p in row[mask].tolist() if p not in (0, end)] for row, mask in zip(*questions[1:3], strict=True)]
    assert [tokenizer.decode([p - 1 for p in row]) for row in answers] == [
        f"a {c} picture of number {n}" for n, c in enumerate(COLOURS[:2])
    ]


def test_long_captions_are_counted(shards, tokenizer):
    source = open_source(shards, tokenizer, max_tokens=2)
    assert [source[n].source for n in range(5)] == ["shards"] * 5
    assert "5 texts were cut" in str(source.report())


def test_images_alone_need_no_tokenizer(shards):
    source = open_source(shards, contents="images")
    rows = group_by_source([source[0], source[1]])["shards"]
    assert source.pixels(rows).shape == (2, 3, 16, 16)
    with pytest.raises(ConfigError, match="no captions"):
        build_caption_source(source)
    spec = DATA_SOURCES["shards"]
    assert not spec.needs_tokenizer(source.config) and spec.get_contents(source.config) == ("images",)
    texts = ShardSourceConfig(paths=str(shards))
    assert spec.needs_tokenizer(texts) and spec.read_texts(texts)[7] == "a green picture of number 7"
    with pytest.raises(ConfigError, match="no tokenizer"):
        open_source(shards)
    for wrong in ({"contents": "classes"}, {"class_names": ("a",)}, {"templates": ("no name",)}):
        with pytest.raises(ConfigError):
            ShardSourceConfig(paths="x.tar", **wrong)


def test_conversations(shards):
    source = open_source(shards, contents="conversations")
    assert isinstance(source, ShardConversationSource) and len(source) == COUNT
    sample = source[8]
    assert [turn.text for turn in sample.turns] == ["what?", "a blue picture"]
    assert np.array_equal(np.asarray(sample.load_image()), np.asarray(make_image(8)))
    assert pickle.loads(pickle.dumps(source))[8].turns == sample.turns


def write_tar(path, samples):
    with webdataset.TarWriter(str(path)) as writer:
        for n, sample in enumerate(samples):
            writer.write({"__key__": f"{n:03}"} | sample)
    return path


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_conversation_layouts(tmp_path):
    images = {f"{n}.png": encode(make_image(n)) for n in (10, 2)}
    user = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": "two"}]
    named = [{"from": "human", "value": "<image> and <image>"}, {"from": "gpt", "value": "named"}]
    plain = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    samples = [
        images | {"json": {"messages": messages}},
        images | {"json": {"images": ["x/10.png", "x/2.png"], "conversations": named}},
        {"json": plain},  # the turns themselves
        {"png": images["2.png"], "json": {"caption": "from json"}},
        {"png": images["2.png"], "txt": "a caption", "json": {"width": 24}},
    ]
    source = open_source(write_tar(tmp_path / "a.tar", samples), contents="conversations", caption_prompt="Say.")
    texts = [[turn.text for turn in source[n].turns] for n in range(5)]
    assert texts == [
        ["and", "two"],
        [" and ", "named"],
        ["hello", "hi"],
        ["Say.", "from json"],
        ["Say.", "a caption"],
    ]
    two, ten = (np.asarray(make_image(n)) for n in (2, 10))
    for sample, expected in ((source[0], (two, ten)), (source[1], (ten, two))):
        for n, image in enumerate(expected):
            assert np.array_equal(np.asarray(sample.load_image(n)), image)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"json": {"conversations": make_turns(0) + make_turns(0)}}, "2 × <image>, but the sample has 1 images"),
        ({"json": {"conversations": []}}, "no turns"),
        ({"json": {"conversations": [{"from": "human", "value": "<image>"}]}}, "assistant's turns are empty"),
        ({"json": {"conversations": [{"from": "cat", "value": "<image>"}]}}, "unknown role 'cat'"),
        ({"json": {"conversations": 3}}, "Expected `array`"),
        ({"json": b"{"}, "truncated"),
        ({"png": b"no image"}, "not an image"),
        ({"mp4": b"film"}, "video"),
        ({"json": {"width": 3}}, "no turns and no caption"),
    ],
)
def test_bad_conversations_are_named_replaced_and_counted(tmp_path, change, reason):
    good = {"png": encode(make_image(0)), "json": {"conversations": make_turns(0)}}
    source = open_source(write_tar(tmp_path / "a.tar", [good, good | change, good]), contents="conversations")
    assert [source[n].id for n in range(3)].count("001") == 0
    (fault,) = source.report().faults
    assert fault.file == "a.tar" and fault.member.startswith("001") and reason in fault.reason
    with pytest.raises(DataError, match=r"a\.tar: 001"):
        source.dataset.read_original(1)
    strict = open_source(tmp_path / "a.tar", contents="conversations", max_faults=0, max_fault_fraction=0.0)
    with pytest.raises(DataError, match=r"(?s)1 of \d samples are unreadable.*a\.tar: 001"):
        [strict[n] for n in range(3)]


def test_truncated_and_empty_shards(shards, tmp_path):
    data = (shards / "part-000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    source = open_source(tmp_path / "cut.tar", contents="conversations")
    assert 0 < len(source) < 7 and source[0].turns
    assert any(fault.file == "cut.tar" and "truncated" in str(fault) for fault in source.report().faults)
    with pytest.raises(DataError, match=r"(?s)unreadable.*cut\.tar"):
        open_source(tmp_path / "cut.tar", contents="conversations", max_faults=0, max_fault_fraction=0.0)
    (tmp_path / "cut.tar").write_bytes(data[:700])
    (tmp_path / "cut.tar.vidx").unlink()
    with pytest.raises(DataError, match=r"(?s)cut\.tar hold no samples.*may be truncated"):
        open_source(tmp_path / "cut.tar", contents="conversations")
    write_tar(tmp_path / "none.tar", [])
    with pytest.raises(DataError, match=r"none\.tar hold no samples"):
        open_source(tmp_path / "none.tar", contents="conversations")


# ── remote ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("paths", ["memory://data", "memory://data/*.tar", "memory://data/part-{000..003}.tar"])
def test_remote_shards_are_those_of_the_disk(shards, remote, paths):
    here, there = (ShardDataset(ShardsConfig(paths=path)) for path in (str(shards), paths))
    assert [path.name for path in there.paths] == [path.name for path in here.paths]
    for a, b in itertools.zip_longest(here, there):
        assert all(np.array_equal(a[key], b[key]) for key in a)
    assert there.fingerprint == here.fingerprint


def test_a_remote_sample_is_one_request_and_the_index_is_cached(remote, monkeypatch, tmp_path):
    ShardDataset(ShardsConfig(paths="memory://data"))
    assert len(list((tmp_path / "cache/shards").iterdir())) == 4
    reads, read = [], RemoteFile.read
    monkeypatch.setattr(RemoteFile, "read", lambda self, *place: reads.append(place) or read(self, *place))
    dataset = ShardDataset(ShardsConfig(paths="memory://data"))
    assert not reads
    assert dataset[9]["txt"] == "a teal picture of number 9" and len(reads) == 1
    remote.pipe_file("/data/part-001.tar", remote.cat_file("/data/part-000.tar"))
    changed = ShardDataset(ShardsConfig(paths="memory://data"))
    assert changed[9]["txt"] == "a blue picture of number 2"
    with pytest.raises(DataError, match="changed since it was indexed"):
        ShardDataset.read_original(pickle.loads(pickle.dumps(dataset)), 9)


def test_lost_connections_are_tried_again_and_then_stop_the_run(remote, monkeypatch):
    dataset = ShardDataset(ShardsConfig(paths="memory://data"))
    fails, read = iter([True, True, False]), type(remote).cat_file

    def lose(self, *args, **options):
        if next(fails, True):
            raise ConnectionError("lost")
        return read(self, *args, **options)

    monkeypatch.setattr(type(remote), "cat_file", lose)
    assert dataset[0]["txt"] == "a red picture of number 0"
    with pytest.raises(RemoteReadError, match=r"part-000\.tar cannot be read after 4 attempts: ConnectionError: lost"):
        dataset[1]
    assert not dataset.report().faults  # not the fault of the sample: it is not replaced


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://data/none.tar", "cannot be read: FileNotFoundError"),
        ("memory://empty/*.tar", "matches no shard"),
        ("s3://bucket/a.tar", "s3fs"),
        ("nonsense://a.tar", "nonsense"),
    ],
)
def test_wrong_urls_are_refused(remote, url, message):
    pytest.importorskip("fsspec")
    with pytest.raises((DataError, ConfigError), match=message):
        ShardDataset(ShardsConfig(paths=url))


def test_names_of_shards(shards, tmp_path):
    assert is_shards(str(shards)) and is_shards("x-{0..3}.tar") and is_shards("s3://bucket/folder")
    assert not is_shards(str(tmp_path)) and not is_shards("talks.json")
    assert expand_shards("memory://data/x.tar")[0].name == "x.tar"


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────


def build_model(tokenizer) -> ContrastiveModel:
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=16))
    vision = ViTConfig(image_size=16, patch_size=8, layers=1, block=block, pool="mean")
    vocab_size, end = tokenizer.vocab_size, tokenizer.eos_token_id
    text = TextTowerConfig(vocab_size=vocab_size, layers=1, block=block, context_length=18, eos_token_id=end)
    torch.manual_seed(0)
    return ContrastiveModel(ContrastiveConfig(image=vision, text=text, embed_dim=8))


def train(source_by_name, tokenizer, folder, steps=4, stop=None, **more):
    model, weights = build_model(tokenizer), dict.fromkeys(source_by_name, 1.0)
    stage = StageConfig(
        name="pairs",
        task="contrastive",
        steps=steps,
        batch_size=8,
        mixture=MixtureConfig(weights=weights),
        optim=OptimConfig(lr=1e-2),
        save_every=2,
        **more,
    )
    settings = ContrastiveSettings(swap_negatives=any(s.config.contents == "pairs" for s in source_by_name.values()))
    task = ContrastiveTask(model, source_by_name, tokenizer, settings)
    trainer = Trainer(stage, task, source_by_name, folder, quiet=True, device="cpu")
    if stop is not None:
        step = trainer._train_step

        def interrupt(batches):
            if trainer.step == stop:
                raise KeyboardInterrupt
            return step(batches)

        trainer._train_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trainer.train()
    losses = [row["loss/pairs"] for row in map(json.loads, (folder / "log.jsonl").open()) if "loss/pairs" in row]
    return model.state_dict(), losses


def test_mixtures_train_and_resume_bit_for_bit(shards, remote, tokenizer, tmp_path):
    def open_all():
        return {
            "here": ShardImageSource(
                ShardSourceConfig(paths=str(shards), contents="pairs", image_size=16, max_tokens=14), tokenizer, "here"
            ),
            "there": ShardImageSource(
                ShardSourceConfig(
                    paths="memory://data", contents="classes", class_names=COLOURS, image_size=16, max_tokens=14
                ),
                tokenizer,
                "there",
            ),
        }

    whole, losses = train(open_all(), tokenizer, tmp_path / "whole", steps=6)
    assert losses[-1] < losses[0]
    train(open_all(), tokenizer, tmp_path / "killed", steps=6, stop=3)
    resumed, _ = train(open_all(), tokenizer, tmp_path / "killed", steps=6, num_workers=2)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_workers_share_the_states(shards, tmp_path, tokenizer):
    for path in shards.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes().replace(b"a blue picture of number 2", b"\xff" * 26, 1))
    source = open_source(tmp_path, tokenizer)
    loader = DataLoader(source, batch_size=6, num_workers=2, collate_fn=group_by_source)
    assert sum(len(batch["shards"]) for batch in loader) == COUNT
    (fault, *_), report = source.report().faults, source.report()
    assert report.num_read == COUNT and fault.member == "s0002.txt" and "UnicodeDecodeError" in fault.reason


def train_classes(shards, tokenizer_folder, folder):
    """Train on this rank."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    config = ShardSourceConfig(paths=str(shards), contents="classes", class_names=COLOURS, image_size=16, max_tokens=14)
    train({"here": ShardImageSource(config, tokenizer, "here")}, tokenizer, folder)


@pytest.mark.slow
def test_ranks_train_on_the_same_samples_as_one_process(shards, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
    train_classes(shards, tmp_path / "tokenizer", tmp_path / "1")
    rank_processes.run(2, train_classes, shards, tmp_path / "tokenizer", tmp_path / "2")
    logs = [[json.loads(row) for row in (tmp_path / n / "log.jsonl").open()] for n in ("1", "2")]
    first, second = ([row["loss/pairs"] for row in log if "loss/pairs" in row] for log in logs)
    assert len(first) == 4 and first == pytest.approx(second, rel=1e-4)
