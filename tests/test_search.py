"""Search: an updated index equals a new one after any change of a folder; scores match transformers."""

import os
import random
import shutil
import string
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from helpers import randomize
from vitrail.cli.search_command import search_images
from vitrail.errors import CheckpointError, ConfigError, DataError, ImageError
from vitrail.processing.image_loading import load_image
from vitrail.search import SearchQuery, find_nearest, image_index, update_index
from vitrail.search.embedder import load_embedder

SIDE = 24


class Counting:
    """Embedder of mean colours that counts images."""

    key = "colours"

    def __init__(self, stop: int | None = None):
        self.seen, self.stop = 0, stop

    def preprocess(self, image):
        return np.asarray(image, np.float64).mean((0, 1)) + 1

    def embed_images(self, images):
        if self.stop is not None and self.seen >= self.stop:
            raise KeyboardInterrupt
        self.seen += len(images)
        return np.stack([v / np.linalg.norm(v) for v in images])


def paint(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> Path:
    """Write an image that is unique for each seed, with a unique time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(path)
    os.utime(path, ns=(0, 10**18 + seed))
    return path


def fill(folder: Path, count: int = 12) -> list[str]:
    names = [f"{'deep/er/' if i % 3 == 0 else ''}{i:02}.png" for i in range(count)]
    for i, name in enumerate(names):
        paint(folder / name, i, (40 + i, 30))
    return names


def quiet(_: str) -> None:
    pass


def plain(found: image_index.ImageIndex) -> dict:
    return {
        path: (*e.file_stamp, e.error, None if e.vector is None else e.vector.tolist())
        for path, e in found.entries.items()
    }


# ---- the index --------------------------------------------------------------------------------------------------


def test_only_changed_files_are_embedded(tmp_path):
    names = fill(tmp_path)
    first = Counting()
    assert update_index(tmp_path, first).added == first.seen == 12
    again = Counting()
    assert update_index(tmp_path, again)[1:] == (0, 0, 0)
    assert again.seen == 0

    paint(tmp_path / "new.png", 100)
    paint(tmp_path / names[1], 101)
    (tmp_path / names[2]).unlink()
    third = Counting()
    found = update_index(tmp_path, third)
    assert found[1:] == (1, 1, 1)
    assert third.seen == 2
    assert found.paths == sorted({*names, "new.png"} - {names[2]})

    (tmp_path / names[4]).unlink()
    assert [update_index(tmp_path, Counting()).removed for _ in range(2)] == [1, 0]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["paint", "break", "delete", "update"]), st.sampled_from("abcd"), st.integers(0, 5)),
        max_size=14,
    )
)
def test_updated_index_equals_new_index(history):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step, (what, name, seed) in enumerate(history):
            path = folder / f"{name}.png"
            match what:
                case "paint":
                    paint(path, seed)
                case "break":
                    path.write_bytes(b"no picture" * seed)
                case "delete":
                    path.unlink(missing_ok=True)
                case "update":
                    update_index(folder, Counting(), log=quiet)
            if path.exists():
                os.utime(path, ns=(0, 10**18 + 1000 * step))
        kept = plain(update_index(folder, Counting(), log=quiet))
        shutil.rmtree(folder / image_index.INDEX_FOLDER)
        assert kept == plain(update_index(folder, Counting(), log=quiet))


def test_hidden_files_and_links_are_skipped(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "out"
    paint(folder / "a.PNG", 1)
    paint(folder / ".cache" / "b.png", 2)
    paint(folder / ".c.png", 3)
    paint(outside / "d.png", 4)
    (folder / "notes.txt").write_text("words")
    (folder / "link").symlink_to(outside)
    (folder / "e.png").symlink_to(outside / "d.png")
    (folder / "loop").symlink_to(folder)
    sheet = paint(folder / "found.png", 5)
    assert update_index(folder, Counting(), skip=[sheet]).paths == ["a.PNG"]


def test_unreadable_image_is_reported_once(tmp_path, monkeypatch):
    fill(tmp_path, 3)
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"\xff\xd8\xff" + b"junk" * 9)
    found = update_index(tmp_path, Counting())
    assert list(found.unreadable) == ["bad.jpg"]
    assert "bad.jpg" in found.unreadable["bad.jpg"]
    with monkeypatch.context() as patch:
        patch.setattr(image_index, "load_image", lambda *_, **__: pytest.fail("looked at again"))
        assert list(update_index(tmp_path, Counting()).unreadable) == ["bad.jpg"]
    paint(bad, 7)
    assert not update_index(tmp_path, Counting()).unreadable


def test_animation_and_non_unicode_name(tmp_path):
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    shutil.copy(tmp_path / "a.gif", os.fsencode(tmp_path) + b"/\xff.gif")
    update_index(tmp_path, Counting())
    again = Counting()
    assert update_index(tmp_path, again).paths == ["a.gif", "\udcff.gif"]
    assert again.seen == 0


@pytest.mark.parametrize("harm", ["cut", "noise", "empty", "other", "count"])
def test_damaged_index_is_rebuilt(tmp_path, harm):
    fill(tmp_path, 4)
    good = plain(update_index(tmp_path, Counting()))
    (file,) = (tmp_path / image_index.INDEX_FOLDER).glob(f"*/{image_index.INDEX_FILE}")
    entries = image_index._load_entries(file, Counting.key, pytest.fail)
    match harm:
        case "cut":
            file.write_bytes(file.read_bytes()[:-5])
        case "noise":
            file.write_bytes(os.urandom(500))
        case "empty":
            file.write_bytes(b"")
        case "other":
            image_index._save_entries(entries, file, "another model")
        case "count":
            del entries["01.png"]
            image_index._save_entries(
                dict.fromkeys([*entries, "x"], entries["02.png"]._replace(error="?")), file, Counting.key
            )
    output, image_embedder = [], Counting()
    assert plain(update_index(tmp_path, image_embedder, log=output.append)) == good
    assert image_embedder.seen == 4
    assert str(file) in output[0]


def test_interruption_saves_progress(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.setattr(image_index, "BATCH_SIZE", 5)
    with pytest.raises(KeyboardInterrupt):
        update_index(tmp_path, Counting(stop=10))
    rest = Counting()
    assert len(update_index(tmp_path, rest).paths) == 12
    assert rest.seen == 2


def test_kill_keeps_saved_entries(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.setattr(image_index, "BATCH_SIZE", 5)

    class Killed(Counting):
        def embed_images(self, images):
            if self.seen >= 10:
                os._exit(9)  # no Python cleanup runs
            return super().embed_images(images)

    if not (child := os.fork()):
        update_index(tmp_path, Killed(), save_interval=0.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    rest = Counting()
    assert len(update_index(tmp_path, rest).paths) == 12
    assert rest.seen == 2
    assert not list((tmp_path / image_index.INDEX_FOLDER).glob("*/.partial-*"))


def test_second_process_waits(tmp_path):
    fill(tmp_path)
    entered, leave = os.pipe(), os.pipe()

    class Slow(Counting):
        def embed_images(self, images):
            os.write(entered[1], b"x")
            os.read(leave[0], 1)
            return super().embed_images(images)

    if not (child := os.fork()):
        update_index(tmp_path, Slow())
        os._exit(0)
    os.read(entered[0], 1)
    output, image_embedder = [], Counting()

    def say(line: str) -> None:
        output.append(line)
        os.write(leave[1], b"x")

    assert len(update_index(tmp_path, image_embedder, log=say).paths) == 12
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert image_embedder.seen == 0
    assert "waiting" in output[0]


def test_read_only_folder_uses_cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "photos"
    fill(folder, 3)
    (folder / image_index.INDEX_FOLDER).write_text("in the way")  # like a read-only folder, also for root
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    update_index(folder, Counting())
    again = Counting()
    assert len(update_index(folder, again).paths) == 3
    assert again.seen == 0
    assert len(list((tmp_path / "home" / "search").glob(f"*/*/{image_index.INDEX_FILE}"))) == 1


def test_ties_are_sorted_by_path(tmp_path):
    for name in random.Random(0).sample(string.ascii_lowercase, 26):
        paint(tmp_path / f"{name}.png", 3)
    found = update_index(tmp_path, Counting())
    hits = find_nearest(found, found.vectors[0], 26)
    assert [hit.path for hit in hits] == [f"{name}.png" for name in string.ascii_lowercase]


# ---- with a model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A CLIP with random weights, tokenizer and preprocessor, saved by transformers."""
    folder = tmp_path_factory.mktemp("clip")
    letters = {"<s>": 0, "</s>": 1, **{c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}}
    rust = Tokenizer(models.BPE(letters, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = [("<s>", 0), ("</s>", 1)]
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    words = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    words.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40}
    text = {**sizes, "vocab_size": 300, "max_position_embeddings": 40, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config={**text, "pad_token_id": 1},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 8},
        projection_dim=16,
    )
    model = randomize(CLIPModel(config), seed=1, spread=0.6).eval()  # so that images differ
    model.save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE + 4}, crop_size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return folder, model, words, processor


def unit(x) -> np.ndarray:
    x = x if torch.is_tensor(x) else x.pooler_output
    return torch.nn.functional.normalize(x.detach(), dim=-1).numpy()


def theirs(clip, folder: Path, names: list[str]) -> np.ndarray:
    _, model, _, processor = clip
    pictures = [load_image(folder / name) for name in names]
    return unit(model.get_image_features(**processor(pictures, return_tensors="pt")))


def test_scores_match_transformers(clip, tmp_path):
    names = sorted(fill(tmp_path))
    folder, model, words, _ = clip
    text = unit(model.get_text_features(**words(["a red bicycle"], return_tensors="pt")))[0]
    scores = dict(zip(names, theirs(clip, tmp_path, names) @ text, strict=True))
    image_embedder = load_embedder(str(folder))
    hits = find_nearest(update_index(tmp_path, image_embedder), SearchQuery("a red bicycle").embed(image_embedder), 12)
    assert [hit.path for hit in hits] == sorted(names, key=lambda name: -scores[name])
    np.testing.assert_allclose([hit.score for hit in hits], [scores[hit.path] for hit in hits], atol=1e-3)
    assert hits[0].score - hits[-1].score > 0.05  # else the order would mean little


def test_excluded_texts(clip, tmp_path):
    names = sorted(fill(tmp_path))
    folder, model, words, _ = clip
    a, b = (unit(model.get_text_features(**words([text], return_tensors="pt")))[0] for text in ("sea", "people"))
    query = a - b + theirs(clip, tmp_path, names)[4]
    image_embedder = load_embedder(str(folder))
    ours = SearchQuery("sea", (tmp_path / names[4],), ("people",)).embed(image_embedder)
    np.testing.assert_allclose(ours, query / np.linalg.norm(query), atol=1e-4)
    with pytest.raises(ConfigError, match="excluded texts cancel"):
        SearchQuery("sea", (), ("sea",)).embed(image_embedder)


def test_each_model_has_its_own_index(clip, tmp_path):
    copy = shutil.copytree(clip[0], tmp_path / "copy")
    assert load_embedder(str(copy)).key == load_embedder(str(clip[0])).key  # independent of path and time
    other = randomize(CLIPModel(clip[1].config), seed=2)
    other.save_pretrained(copy)
    assert load_embedder(str(copy)).key != load_embedder(str(clip[0])).key


def test_command_line_finds_image_itself(clip, tmp_path, capsys):
    photos, out = tmp_path / "photos", tmp_path / "photos" / "found.png"
    names = fill(photos)
    (photos / "bad.png").write_bytes(b"?")
    for _ in range(2):
        search_images(photos, [str(photos / names[5])], model=str(clip[0]), out=out, count=4)
        output = capsys.readouterr()
        lines = output.out.splitlines()
        assert len(lines) == 5
        assert lines[0].split() == ["1.000", names[5]]
        assert "1 cannot be read" in output.err
        assert "bad.png" in output.err
    assert "12 images, 0 new, 0 changed, 0 gone" in output.err
    with Image.open(out) as sheet:
        assert sheet.width > 2 * 176


@pytest.mark.parametrize(
    ("terms", "more", "kind", "message"),
    [
        ([], {}, ConfigError, "the query is empty"),
        (["nowhere.jpg"], {}, ImageError, "nowhere.jpg does not exist"),
        (["a cat"], {"model": "no/such/model"}, CheckpointError, "no/such/model does not exist"),
        (["a cat"], {"count": 0}, ConfigError, "--count"),
        (["a cat"], {"folder": Path("nowhere")}, DataError, "nowhere is not a folder"),
        (["a cat"], {}, DataError, "contains no readable image"),
    ],
)
def test_invalid_queries_raise(clip, tmp_path, terms, more, kind, message):
    given = {"folder": tmp_path, "model": str(clip[0]), **more}
    with pytest.raises(kind, match=message):
        search_images(given.pop("folder"), terms, out=tmp_path / "x.png", **given)


def test_query_needs_no_quotes(tmp_path):
    app = App()
    app.command(search_images, name="search")
    line = ["search", str(tmp_path), "a", "red  bicycle", "--exclude", "a dog", "--model", "m", "--count", "3"]
    _, bound, *_ = app.parse_args(line)
    assert bound.args == (tmp_path, ["a", "red  bicycle"])
    assert bound.kwargs == {"model": "m", "exclude": ("a dog",), "count": 3}
    assert SearchQuery.parse(bound.args[1]).text == "a red bicycle"
    assert str(SearchQuery("a cat", (Path("x/y.png"),), ("a dog",))) == "“a cat” + y.png − “a dog”"
