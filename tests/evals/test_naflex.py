"""SigLIP 2 NaFlex in search, evaluation and training: images of unequal sizes in one batch, as in transformers."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import processors
from transformers import Siglip2Config, Siglip2Model
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from helpers import randomize
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.cli.search_command import search_images
from vitrail.errors import CheckpointError
from vitrail.evals.contrastive_embedder import tokenize_texts
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.pipelines.embedding import EmbeddingPipeline
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.patchify import patchify_rows
from vitrail.processing.resolution_policies import NaFlexPolicy
from vitrail.processing.tokenizer import Tokenizer

TEXTS = ["a photo of a cat", "two dogs", "the sea"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPES = [(61, 43), (30, 97), (30, 30), (7, 120), (200, 11), (16, 16)]
IMAGES = [np.random.default_rng(i).integers(0, 256, (*shape, 3), dtype=np.uint8) for i, shape in enumerate(SHAPES)]


def build_tokenizer() -> Tokenizer:
    made = Tokenizer.train(TEXTS, 300, special_tokens=("<pad>", "</s>"), eos="</s>", pad="<pad>")
    made._rust.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))]
    )
    return made


@pytest.fixture
def naflex(tmp_path):
    """A random SigLIP 2 of transformers with its processor and a tokenizer: its folder, the model, the processor."""
    tokenizer = build_tokenizer()
    text = SIZES | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 10, "projection_size": 32}
    vision = SIZES | {"num_patches": 25, "patch_size": 4}
    model = randomize(Siglip2Model(Siglip2Config(text_config=text, vision_config=vision)), seed=1).eval()
    processor = Siglip2ImageProcessorPil(patch_size=4, max_num_patches=21)
    folder = tmp_path / "naflex"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save(folder)
    return folder, model, processor


def test_pixels_match_the_processor(naflex):
    folder, _, processor = naflex
    preprocessing = EmbeddingPipeline.load(folder).preprocessing
    assert preprocessing.policy == NaFlexPolicy(patch_size=4, max_patches=21)
    expected = processor([Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    for i, image in enumerate(IMAGES):
        rows, grid = patchify_rows(preprocessing(image), 4)
        assert (grid.h, grid.w) == tuple(expected["spatial_shapes"][i].tolist())
        assert torch.equal(rows, expected["pixel_values"][i][: len(rows)])


@torch.no_grad()
def test_unequal_images_match_transformers(naflex):
    folder, model, processor = naflex
    pipeline = EmbeddingPipeline.load(folder)
    inputs = processor([Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    ids, _ = tokenize_texts(TEXTS, pipeline.tokenizer, pipeline.model.config.text)
    expected = model(**inputs, input_ids=ids)
    images, texts = pipeline.encode_images(IMAGES), pipeline.encode_texts(TEXTS)
    torch.testing.assert_close(images, expected.image_embeds, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(texts, expected.text_embeds, rtol=1e-4, atol=1e-5)
    for batch_size in (1, 2, 100):
        embedder = pipeline.build_embedder(batch_size)
        torch.testing.assert_close(embedder.embed_images(IMAGES), images, rtol=1e-4, atol=1e-5)
    features = embedder.extract_features(IMAGES)
    pooled = model.vision_model(**inputs).pooler_output
    torch.testing.assert_close(features, pooled, rtol=1e-4, atol=1e-4)
    probabilities = pipeline.zero_shot(IMAGES, ["cat", "dog"], ["a photo of a {}"]).probabilities
    assert probabilities.shape == (6, 2)


@torch.no_grad()
def test_features_of_a_tower_without_pooling_leave_padding_out(naflex):
    folder, model, processor = naflex
    pipeline = EmbeddingPipeline.load(folder)
    tower = pipeline.model.image
    tower.config = tower.config.replace(pool="none")
    found = ImageFeatureExtractor(tower, pipeline.preprocessing, batch_size=3).extract_features(IMAGES)
    inputs = processor([Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    states, mask = model.vision_model(**inputs).last_hidden_state, inputs["pixel_attention_mask"].bool()
    expected = torch.stack([x[real].mean(0) for x, real in zip(states, mask, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def save_images(folder):
    """Images of two classes and of unequal sizes."""
    for n, image in enumerate(IMAGES):
        file = folder / ("test/cat" if n % 2 else "test/dog") / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return folder


def test_search_and_zero_shot_commands(naflex, tmp_path, capsys):
    folder, model, processor = naflex
    photos = save_images(tmp_path / "photos")
    search_images(photos, ["two dogs"], model=str(folder), out=tmp_path / "sheet.png")
    found = [line for line in capsys.readouterr().out.splitlines() if ".png" in line]
    inputs = processor([Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    pipeline = EmbeddingPipeline.load(folder)
    ids, _ = tokenize_texts(["two dogs"], pipeline.tokenizer, pipeline.model.config.text)
    with torch.no_grad():
        best = int(model(**inputs, input_ids=ids).logits_per_text[0].argmax())
    assert f"{best}.png" in found[0]
    app(
        [str(folder), "zeroshot", "--data", str(photos), "--out", str(tmp_path / "scores.json")],
        result_action="return_value",
    )
    assert json.loads((tmp_path / "scores.json").read_text())["scores"][0]["count"] == 6
    assert "by prompt, top-1" in capsys.readouterr().out


def test_export_writes_the_processor_of_transformers(naflex, tmp_path):
    """Also that of a model trained here, which has no file of its own."""
    folder, _, _ = naflex
    for name, model in (("loaded", hub.load(folder)), ("trained", ContrastiveModel(hub.load(folder).config))):
        hub.to_hf(model, tmp_path / name)
        hf_config = json.loads((tmp_path / name / "preprocessor_config.json").read_text())
        assert hf_config["image_processor_type"].startswith("Siglip2ImageProcessor")
        processor = Siglip2ImageProcessorPil.from_pretrained(tmp_path / name)
        assert processor.max_num_patches == {"loaded": 21, "trained": 25}[name]
        expected = processor([Image.fromarray(IMAGES[1])], return_tensors="pt")["pixel_values"][0]
        rows, _ = patchify_rows(ImagePreprocessor.from_folder(tmp_path / name, model.config.image)(IMAGES[1]), 4)
        assert torch.equal(rows, expected[: len(rows)])


def test_processor_of_another_model_is_refused(naflex):
    folder, _, _ = naflex
    config = hub.load(folder).config.image
    with pytest.raises(CheckpointError, match="the tower has patches of 8 pixels"):
        ImagePreprocessor.from_folder(folder, config.replace(patch_size=8, image_size=40))
    with pytest.raises(CheckpointError, match="takes square images"):
        ImagePreprocessor.from_folder(folder, config.replace(patch_order="channels_first"))
