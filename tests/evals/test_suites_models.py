"""Suites on models in folders: the same pixels, ids, logits and choices as transformers', and the command line."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import processors

from data.scenes.conftest import drawn
from vitrail import hub
from vitrail.cli.eval import app
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders.text import TextConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evals.contrastive import Embedder, to_ids
from vitrail.evals.suites import sets
from vitrail.evals.suites.sets import some_of
from vitrail.evals.suites.zeroshot import classifier
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainConfig
from vitrail.processing.preprocessing import Preprocessing
from vitrail.processing.text import Tokenizer

NAMES = ("red", "green", "blue")
TEXTS = ["a photo of a cat", "two dogs", "the sea, far away, and a very small boat on it"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TALL = np.random.default_rng(0).integers(0, 256, (61, 43, 3), dtype=np.uint8)
WIDE = np.random.default_rng(1).integers(0, 256, (30, 97, 3), dtype=np.uint8)
PICTURES = [TALL, WIDE, WIDE[:, :30]]


def tokenizer() -> Tokenizer:
    """Puts a start before each text and an end behind it, as CLIP's does."""
    made = Tokenizer.train(TEXTS, 300, specials=("<s>", "</s>"), bos="<s>", eos="</s>", pad="</s>")
    ends = [(token, made.id(token)) for token in ("<s>", "</s>")]
    made._rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def own(folder, *, texts: bool = True) -> Contrastive:
    """A model of ours for pictures of 16 pixels, saved."""
    block = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=64))
    words = tokenizer()
    text = TextConfig(vocab=words.size, layers=1, block=block, context=48, eos=words.eos)
    image = ViTConfig(layers=1, block=block, image=16, patch=8, pool="mean")
    torch.manual_seed(0)
    model = Contrastive(ContrastiveConfig(image=image, text=text, embed=24))
    hub.save(model, folder, words if texts else None)
    return model


def theirs(kind: str, folder):
    """A random CLIP or SigLIP of transformers, and its processor of pictures, saved with a tokenizer."""
    import transformers as hf

    torch.manual_seed(1)
    words = tokenizer()
    text = SIZES | {"vocab_size": words.size, "max_position_embeddings": 12, "eos_token_id": words.eos}
    vision = SIZES | {"image_size": 28, "patch_size": 7}
    if kind == "clip":
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
        processor = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})
    else:
        model = hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision))
        processor = hf.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.ndim else None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    words.save(folder)
    return model.eval(), processor


def embedder(folder) -> Embedder:
    model = hub.load(folder)
    return Embedder(model, Preprocessing.read(folder, model.config.image), hub.tokenizer(folder), batch=2)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_pixels_logits_and_choices_are_transformers(kind, tmp_path):
    model, processor = theirs(kind, tmp_path)
    ours = embedder(tmp_path)
    expected = processor([Image.fromarray(p) for p in PICTURES], return_tensors="pt")["pixel_values"]
    pixels = torch.stack([ours.preprocessing(p) for p in PICTURES])
    torch.testing.assert_close(pixels, expected, rtol=0, atol=0)

    config = ours.model.config.text
    ids, cut = to_ids(TEXTS, ours.tokenizer, config)
    assert cut == 1 == sum(len(row) > 12 for row in ours.tokenizer.encode_batch(TEXTS, specials=True))
    with torch.no_grad():
        logits = model(pixel_values=expected, input_ids=ids).logits_per_image
    u, v = ours.images(PICTURES), ours.texts(TEXTS)
    found = ours.model.scale * u @ v.T + (0 if ours.model.bias is None else ours.model.bias)
    torch.testing.assert_close(found.detach(), logits, rtol=1e-4, atol=1e-4)
    assert len(set(logits.flatten().tolist())) == logits.numel()  # not all alike
    assert torch.equal(found.argmax(1), logits.argmax(1))

    # With one template, classes by prompt are the texts themselves.
    by_prompt = u @ classifier(ours.texts, TEXTS, ["{}"]).T
    assert torch.equal(by_prompt.argmax(1), logits.argmax(1))


def test_ids_are_those_of_transformers_tokenizer(tmp_path):
    """Cut and filled as CLIP (to the longest) and SigLIP (to the whole context) have it."""
    from transformers import PreTrainedTokenizerFast

    words = tokenizer()
    words.save(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    clip = TextConfig(vocab=words.size, layers=1, block=block, context=12, eos=words.eos)
    siglip = TextConfig(vocab=words.size, layers=1, block=block, context=12, causal=False, pool="last")
    for config, padding in ((clip, "longest"), (siglip, "max_length")):
        expected = reference(TEXTS, padding=padding, truncation=True, max_length=12, return_tensors="pt")
        ids, cut = to_ids(TEXTS, words, config)
        assert torch.equal(ids, expected["input_ids"]) and cut == 1


def test_texts_get_the_end_that_the_tower_pools_at():
    """A tokenizer that puts no end behind a text, as those trained here."""
    words = Tokenizer.train(TEXTS, 300)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    config = TextConfig(vocab=words.size, layers=1, block=block, context=12, eos=words.eos)
    ids, cut = to_ids([*TEXTS, ""], words, config)
    assert ids.shape == (4, 12) and (ids == words.eos).any(1).all() and cut >= 1 and ids[3].eq(words.eos).all()
    with pytest.raises(CheckpointError, match="tokenizer"):
        to_ids(TEXTS, words, config.with_(vocab=40))


def test_batches_change_nothing(tmp_path):
    model = own(tmp_path)
    one, three = (Embedder(model, Preprocessing.own(model.config.image), tokenizer(), batch=n) for n in (1, 3))
    for method, items in (("images", PICTURES), ("features", PICTURES), ("texts", TEXTS)):
        torch.testing.assert_close(getattr(one, method)(items), getattr(three, method)(items), atol=1e-5, rtol=1e-4)
    assert one.images(PICTURES).norm(dim=1).allclose(torch.ones(3))
    assert one.features(PICTURES).shape == (3, 32)
    with pytest.raises(DataError, match="empty"):
        one.images([])


def test_ours_reads_pictures_between_minus_one_and_one():
    image = ViTConfig(
        layers=1, block=BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    )
    pixels = Preprocessing.own(image)(np.full((5, 9, 3), 255, np.uint8))
    assert pixels.shape == (3, 224, 224) and pixels.eq(1).all()


@pytest.mark.parametrize(
    ("about", "match"),
    [
        (None, "does not say how"),
        ({"size": {"height": 16, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "square"),
        ({"size": 32, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "the tower is for 16"),
        ({"size": 16, "image_mean": [0.5] * 3}, "image_std"),
        ({"max_num_patches": 256}, "no one size"),
        ({"size": {"shortest_edge": 16}}, "square|size"),
        ([], "no JSON object"),
    ],
)
def test_preprocessing_that_cannot_be_followed_is_refused(about, match, tmp_path):
    if about is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    with pytest.raises(CheckpointError, match=match):
        Preprocessing.read(tmp_path, ViTConfig(layers=1, block=block, image=16, patch=8))


def test_older_and_newer_folders_say_the_same(tmp_path):
    """Sizes as plain numbers, and a processor that keeps its picture part in a file of its own."""
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    config = ViTConfig(layers=1, block=block, image=16, patch=8)
    norm = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "do_center_crop": True, "resample": 2}
    older = norm | {"size": 20, "crop_size": 16}
    newer = norm | {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}, "rescale_factor": 1 / 255}
    for folder, name, about in (
        ("a", "preprocessor_config", older),
        ("b", "processor_config", {"image_processor": newer}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(about))
    found = [Preprocessing.read(tmp_path / folder, config) for folder in "ab"]
    assert found[0] == found[1] and found[0].policy.edge == 20 and found[0].policy.resample == "bilinear"


def test_some_are_drawn_from_all():
    assert some_of(5, None) == some_of(5, 9) == [0, 1, 2, 3, 4]
    few = some_of(1000, 50)
    assert few == some_of(1000, 50) == sorted(set(few)) and few[0] < 200 and few[-1] > 800
    with pytest.raises(ConfigError):
        some_of(5, 0)


# ---- the command line -------------------------------------------------------------------------------------------


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture
def folder(tmp_path):
    """Twelve pictures of each of three classes, in train and in test."""
    for part, seed in (("train", 0), ("test", 1)):
        for c, name in enumerate(NAMES):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for n in range(12):
                noise = np.random.default_rng([seed, c, n]).integers(0, 60, (20, 24, 3))
                noise[..., c] += 180
                file = tmp_path / "data" / part / name / f"{n:02}.png"
                Image.fromarray(noise.astype(np.uint8)).save(file)
    return tmp_path / "data"


def test_zeroshot_from_the_command_line(tmp_path, folder, capsys):
    model = own(tmp_path / "ckpt").eval()
    out = tmp_path / "made" / "scores.json"
    template = ["a {} thing", "{}"]
    run(
        tmp_path / "ckpt",
        "zeroshot",
        "--data",
        folder,
        "--template",
        template[0],
        "--template",
        template[1],
        "--out",
        out,
    )
    printed = capsys.readouterr().out
    assert "by prompt, top-1" in printed and "zero-shot" not in printed and "chance 33.3%" in printed
    found = json.loads(out.read_text())
    assert found["suite"] == "zeroshot" and found["templates"] == template and found["scores"][0]["of"] == 36
    # The same by hand.
    data, words = sets.classes(str(folder), "test"), tokenizer()
    pixels = torch.stack([Preprocessing.own(model.config.image)(p()) for p in data.pictures])
    with torch.no_grad():
        rows = [F.normalize(model.encode_text(torch.tensor([words.encode(t.replace("{}", n), specials=True)])), dim=1)
                for n in data.names for t in template]  # fmt: skip
        prompts = torch.cat(rows).view(3, 2, -1).mean(1)
        chosen = (model.encode_image(pixels) @ F.normalize(prompts, dim=1).T).argmax(1)
    assert data.names == tuple(sorted(NAMES))
    assert found["scores"][0]["value"] == pytest.approx(float((chosen == data.labels).double().mean()))
    run(tmp_path / "ckpt", "zeroshot", "--data", folder, "--limit", 9, "--unseen")
    assert "zero-shot, top-1" in (printed := capsys.readouterr().out) and "of 9" in printed


def test_probe_from_the_command_line(tmp_path, folder, capsys):
    own(tmp_path / "ckpt", texts=False)  # a probe reads no text
    run(tmp_path / "ckpt", "probe", "--data", folder, "--out", tmp_path / "scores.json")
    assert "penalty" in capsys.readouterr().out
    score = json.loads((tmp_path / "scores.json").read_text())["scores"][0]
    assert score["value"] == 1 and score["beside"]["majority"] == pytest.approx(1 / 3)  # colours are easy


def test_retrieval_from_the_command_line(tmp_path, folder, capsys):
    own(tmp_path / "ckpt")
    files = sorted((folder / "test").rglob("*.png"))[::3]
    images = [{"id": n, "file_name": str(f.relative_to(folder))} for n, f in enumerate(files)]
    notes = [{"id": 2 * n + k, "image_id": n, "caption": f"{f.parent.name} {n} {k}"}
             for n, f in enumerate(files) for k in range(2)]  # fmt: skip
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    run(tmp_path / "ckpt", "retrieval", "--data", folder / "captions.json", "--out", tmp_path / "scores.json")
    printed = capsys.readouterr().out
    assert "12 pictures and 24 captions" in printed
    of = {s["name"]: s["of"] for s in json.loads((tmp_path / "scores.json").read_text())["scores"]}
    assert of["text→image, recall@1"] == 24 and of["image→text, recall@10"] == 12 and of["text→text, median rank"] == 12
    # A folder: its captions are the files' names, which the classes share.
    run(tmp_path / "ckpt", "retrieval", "--data", folder / "test")
    assert "36 pictures and 12 captions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suite", "preset", "shown"), [("winoground", "colours", "group"), ("aro", "relations", "blind")]
)
def test_pairs_from_the_command_line(suite, preset, shown, tmp_path, capsys):
    own(tmp_path / "ckpt")
    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    run(tmp_path / "ckpt", suite, "--preset", preset, "--count", 12, "--atlas", tmp_path / "atlas.safetensors")
    printed = capsys.readouterr().out
    assert "such as: " in printed and shown in printed and "of 12" in printed and "chance" in printed


def test_what_is_wrong_is_said(tmp_path, folder):
    own(tmp_path / "ckpt"), own(tmp_path / "mute", texts=False)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainConfig(hidden=8))
    hub.save(ViT(ViTConfig(layers=1, block=block, image=16, patch=8)), tmp_path / "tower")
    (tmp_path / "empty").mkdir()
    for error, match, words in (
        (CheckpointError, "no tokenizer.json", (tmp_path / "mute", "zeroshot", "--data", folder)),
        (CheckpointError, "is a ViT, not a contrastive", (tmp_path / "tower", "zeroshot", "--data", folder)),
        (DataError, "called 'cifar11'", (tmp_path / "ckpt", "zeroshot", "--data", "cifar11")),
        (DataError, "empty", (tmp_path / "ckpt", "zeroshot", "--data", tmp_path / "empty")),
        (DataError, "empty", (tmp_path / "ckpt", "retrieval", "--data", tmp_path / "empty")),
        (ConfigError, "no place for the name", (tmp_path / "ckpt", "zeroshot", "--data", folder, "--template", "x")),
        (ConfigError, "no suite 'zeroshoot'", (tmp_path / "ckpt", "zeroshoot")),
        (ConfigError, "no pairs are made", (tmp_path / "ckpt", "winoground", "--preset", "crowded")),
        (ConfigError, "limit of 0", (tmp_path / "ckpt", "zeroshot", "--data", folder, "--limit", 0)),
    ):
        with pytest.raises(error, match=match):
            run(*words)
