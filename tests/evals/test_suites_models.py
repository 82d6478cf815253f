"""Suites on saved models: pixels, ids, logits and predictions compared with transformers, and the CLI."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import processors

from data.scenes.conftest import drawn
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.data.scenes.atlas import Atlas
from vitrail.encoders.text_tower import TextTowerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder, tokenize_texts
from vitrail.evals.suites import image_collections
from vitrail.evals.suites.image_collections import sample_rows
from vitrail.evals.suites.zero_shot import zero_shot_classifier
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.tokenizer import Tokenizer

NAMES = ("red", "green", "blue")
TEXTS = ["a photo of a cat", "two dogs", "the sea, far away, and a very small boat on it"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TALL = np.random.default_rng(0).integers(0, 256, (61, 43, 3), dtype=np.uint8)
WIDE = np.random.default_rng(1).integers(0, 256, (30, 97, 3), dtype=np.uint8)
PICTURES = [TALL, WIDE, WIDE[:, :30]]


def tokenizer() -> Tokenizer:
    """Tokenizer with start and end tokens, like CLIP's."""
    made = Tokenizer.train(TEXTS, 300, special_tokens=("<s>", "</s>"), bos="<s>", eos="</s>", pad="</s>")
    ends = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made._rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def own(folder, *, texts: bool = True) -> ContrastiveModel:
    """A saved native model for images of 16 pixels."""
    block = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=64))
    words = tokenizer()
    text = TextTowerConfig(
        vocab_size=words.vocab_size, layers=1, block=block, context_length=48, eos_token_id=words.eos_token_id
    )
    image = ViTConfig(layers=1, block=block, image_size=16, patch_size=8, pool="mean")
    torch.manual_seed(0)
    model = ContrastiveModel(ContrastiveConfig(image=image, text=text, embed_dim=24))
    hub.save(model, folder, words if texts else None)
    return model


def theirs(kind: str, folder):
    """A random CLIP or SigLIP of transformers, saved with image processor and tokenizer."""
    import transformers as hf

    torch.manual_seed(1)
    words = tokenizer()
    text = SIZES | {"vocab_size": words.vocab_size, "max_position_embeddings": 12, "eos_token_id": words.eos_token_id}
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


def embedder(folder) -> ContrastiveEmbedder:
    model = hub.load(folder)
    return ContrastiveEmbedder(
        model, ImagePreprocessor.from_folder(folder, model.config.image), hub.load_tokenizer(folder), batch_size=2
    )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_zero_shot_matches_transformers(kind, tmp_path):
    model, processor = theirs(kind, tmp_path)
    ours = embedder(tmp_path)
    expected = processor([Image.fromarray(p) for p in PICTURES], return_tensors="pt")["pixel_values"]
    pixels = torch.stack([ours.preprocessing(p) for p in PICTURES])
    torch.testing.assert_close(pixels, expected, rtol=0, atol=0)

    config = ours.model.config.text
    ids, cut = tokenize_texts(TEXTS, ours.tokenizer, config)
    assert cut == 1 == sum(len(row) > 12 for row in ours.tokenizer.encode_batch(TEXTS, add_special_tokens=True))
    with torch.no_grad():
        logits = model(pixel_values=expected, input_ids=ids).logits_per_image
    u, v = ours.embed_images(PICTURES), ours.embed_texts(TEXTS)
    found = ours.model.scale * u @ v.T + (0 if ours.model.bias is None else ours.model.bias)
    torch.testing.assert_close(found.detach(), logits, rtol=1e-4, atol=1e-4)
    assert len(set(logits.flatten().tolist())) == logits.numel()  # not all equal
    assert torch.equal(found.argmax(1), logits.argmax(1))

    # With one template, class embeddings are the text embeddings.
    by_prompt = u @ zero_shot_classifier(ours.embed_texts, TEXTS, ["{}"]).T
    assert torch.equal(by_prompt.argmax(1), logits.argmax(1))


def test_ids_match_the_transformers_tokenizer(tmp_path):
    """Truncated and padded like CLIP (to the longest) and SigLIP (to the full context)."""
    from transformers import PreTrainedTokenizerFast

    words = tokenizer()
    words.save(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8))
    clip = TextTowerConfig(
        vocab_size=words.vocab_size, layers=1, block=block, context_length=12, eos_token_id=words.eos_token_id
    )
    siglip = TextTowerConfig(
        vocab_size=words.vocab_size, layers=1, block=block, context_length=12, causal=False, pool="last"
    )
    for config, padding in ((clip, "longest"), (siglip, "max_length")):
        expected = reference(TEXTS, padding=padding, truncation=True, max_length=12, return_tensors="pt")
        ids, cut = tokenize_texts(TEXTS, words, config)
        assert torch.equal(ids, expected["input_ids"]) and cut == 1


def test_texts_end_with_the_pooled_token():
    """A tokenizer that adds no end token, like those trained by Vitrail."""
    words = Tokenizer.train(TEXTS, 300)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8))
    config = TextTowerConfig(
        vocab_size=words.vocab_size, layers=1, block=block, context_length=12, eos_token_id=words.eos_token_id
    )
    ids, cut = tokenize_texts([*TEXTS, ""], words, config)
    assert (
        ids.shape == (4, 12)
        and (ids == words.eos_token_id).any(1).all()
        and cut >= 1
        and ids[3].eq(words.eos_token_id).all()
    )
    with pytest.raises(CheckpointError, match="tokenizer"):
        tokenize_texts(TEXTS, words, config.replace(vocab_size=40))


def test_batch_size_does_not_change_embeddings(tmp_path):
    model = own(tmp_path)
    one, three = (
        ContrastiveEmbedder(model, ImagePreprocessor.default(model.config.image), tokenizer(), batch_size=n)
        for n in (1, 3)
    )
    for method, items in (("embed_images", PICTURES), ("extract_features", PICTURES), ("embed_texts", TEXTS)):
        torch.testing.assert_close(getattr(one, method)(items), getattr(three, method)(items), atol=1e-5, rtol=1e-4)
    assert one.embed_images(PICTURES).norm(dim=1).allclose(torch.ones(3))
    assert one.extract_features(PICTURES).shape == (3, 32)
    with pytest.raises(DataError, match="empty"):
        one.embed_images([])


def test_native_preprocessing_range():
    image = ViTConfig(
        layers=1,
        block=BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8)),
    )
    pixels = ImagePreprocessor.default(image)(np.full((5, 9, 3), 255, np.uint8))
    assert pixels.shape == (3, 224, 224) and pixels.eq(1).all()


@pytest.mark.parametrize(
    ("about", "match"),
    [
        (None, "has no image preprocessor config"),
        ({"size": {"height": 16, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "square"),
        ({"size": 32, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "the tower takes 16"),
        ({"size": 16, "image_mean": [0.5] * 3}, "image_std"),
        ({"max_num_patches": 256}, "takes square images"),
        ({"size": {"shortest_edge": 16}}, "square|size"),
        ([], "not a JSON object"),
    ],
)
def test_unsupported_preprocessing_raises(about, match, tmp_path):
    if about is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8))
    with pytest.raises(CheckpointError, match=match):
        ImagePreprocessor.from_folder(tmp_path, ViTConfig(layers=1, block=block, image_size=16, patch_size=8))


def test_old_and_new_processor_files_agree(tmp_path):
    """Sizes as plain numbers, and an image processor in a separate file."""
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8))
    config = ViTConfig(layers=1, block=block, image_size=16, patch_size=8)
    norm = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "do_center_crop": True, "resample": 2}
    older = norm | {"size": 20, "crop_size": 16}
    newer = norm | {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}, "rescale_factor": 1 / 255}
    for folder, name, about in (
        ("a", "preprocessor_config", older),
        ("b", "processor_config", {"image_processor": newer}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(about))
    found = [ImagePreprocessor.from_folder(tmp_path / folder, config) for folder in "ab"]
    assert found[0] == found[1] and found[0].policy.shortest_edge == 20 and found[0].policy.resample == "bilinear"


def test_limit_draws_from_all_rows():
    assert sample_rows(5, None) == sample_rows(5, 9) == [0, 1, 2, 3, 4]
    few = sample_rows(1000, 50)
    assert few == sample_rows(1000, 50) == sorted(set(few)) and few[0] < 200 and few[-1] > 800
    with pytest.raises(ConfigError):
        sample_rows(5, 0)


# ---- the command line -------------------------------------------------------------------------------------------


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture
def folder(tmp_path):
    """Twelve images of each of three classes, in train and test."""
    for part, seed in (("train", 0), ("test", 1)):
        for c, name in enumerate(NAMES):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for n in range(12):
                noise = np.random.default_rng([seed, c, n]).integers(0, 60, (20, 24, 3))
                noise[..., c] += 180
                file = tmp_path / "data" / part / name / f"{n:02}.png"
                Image.fromarray(noise.astype(np.uint8)).save(file)
    return tmp_path / "data"


def test_zero_shot_cli(tmp_path, folder, capsys):
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
    assert found["suite"] == "zeroshot" and found["templates"] == template and found["scores"][0]["count"] == 36
    # The same by hand.
    data, words = image_collections.open_labelled_images(str(folder), "test"), tokenizer()
    pixels = torch.stack([ImagePreprocessor.default(model.config.image)(p()) for p in data.images])
    with torch.no_grad():
        rows = [
            F.normalize(
                model.encode_text(torch.tensor([words.encode(t.replace("{}", n), add_special_tokens=True)])), dim=1
            )
            for n in data.names
            for t in template
        ]
        prompts = torch.cat(rows).view(3, 2, -1).mean(1)
        chosen = (model.encode_image(pixels) @ F.normalize(prompts, dim=1).T).argmax(1)
    assert data.names == tuple(sorted(NAMES))
    assert found["scores"][0]["value"] == pytest.approx(float((chosen == data.labels).double().mean()))
    run(tmp_path / "ckpt", "zeroshot", "--data", folder, "--limit", 9, "--unseen-classes")
    assert "zero-shot, top-1" in (printed := capsys.readouterr().out) and "of 9" in printed


def test_probe_cli(tmp_path, folder, capsys):
    own(tmp_path / "ckpt", texts=False)  # a probe needs no text
    run(tmp_path / "ckpt", "probe", "--data", folder, "--out", tmp_path / "scores.json")
    assert "penalty" in capsys.readouterr().out
    score = json.loads((tmp_path / "scores.json").read_text())["scores"][0]
    assert score["value"] == 1 and score["baselines"]["majority"] == pytest.approx(1 / 3)  # colours are easy


def test_retrieval_cli(tmp_path, folder, capsys):
    own(tmp_path / "ckpt")
    files = sorted((folder / "test").rglob("*.png"))[::3]
    images = [{"id": n, "file_name": str(f.relative_to(folder))} for n, f in enumerate(files)]
    notes = [{"id": 2 * n + k, "image_id": n, "caption": f"{f.parent.name} {n} {k}"}
             for n, f in enumerate(files) for k in range(2)]  # fmt: skip
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": notes}))
    run(tmp_path / "ckpt", "retrieval", "--data", folder / "captions.json", "--out", tmp_path / "scores.json")
    printed = capsys.readouterr().out
    assert "12 images and 24 captions" in printed
    of = {s["name"]: s["count"] for s in json.loads((tmp_path / "scores.json").read_text())["scores"]}
    assert of["text→image, recall@1"] == 24 and of["image→text, recall@10"] == 12 and of["text→text, median rank"] == 12
    # A folder: its captions are the file names, which all classes share.
    run(tmp_path / "ckpt", "retrieval", "--data", folder / "test")
    assert "36 images and 12 captions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suite", "preset", "shown"), [("winoground", "colours", "group"), ("aro", "relations", "blind")]
)
def test_compositionality_cli(suite, preset, shown, tmp_path, capsys):
    own(tmp_path / "ckpt")
    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    run(tmp_path / "ckpt", suite, "--preset", preset, "--count", 12, "--atlas", tmp_path / "atlas.safetensors")
    printed = capsys.readouterr().out
    assert "example: " in printed and shown in printed and "of 12" in printed and "chance" in printed


def test_invalid_inputs_raise(tmp_path, folder):
    own(tmp_path / "ckpt"), own(tmp_path / "mute", texts=False)
    block = BlockConfig(width=8, attention=AttentionConfig(heads=1), mlp=PlainMLPConfig(intermediate_size=8))
    hub.save(ViT(ViTConfig(layers=1, block=block, image_size=16, patch_size=8)), tmp_path / "tower")
    (tmp_path / "empty").mkdir()
    for error, match, words in (
        (CheckpointError, "no tokenizer.json", (tmp_path / "mute", "zeroshot", "--data", folder)),
        (CheckpointError, "is a ViT, not a contrastive", (tmp_path / "tower", "zeroshot", "--data", folder)),
        (DataError, "'cifar11' is neither", (tmp_path / "ckpt", "zeroshot", "--data", "cifar11")),
        (DataError, "empty", (tmp_path / "ckpt", "zeroshot", "--data", tmp_path / "empty")),
        (DataError, "empty", (tmp_path / "ckpt", "retrieval", "--data", tmp_path / "empty")),
        (ConfigError, "class name", (tmp_path / "ckpt", "zeroshot", "--data", folder, "--template", "x")),
        (ConfigError, "no suite 'zeroshoot'", (tmp_path / "ckpt", "zeroshoot")),
        (ConfigError, "no caption pairs", (tmp_path / "ckpt", "winoground", "--preset", "crowded")),
        (ConfigError, "limit = 0", (tmp_path / "ckpt", "zeroshot", "--data", folder, "--limit", 0)),
    ):
        with pytest.raises(error, match=match):
            run(*words)
