"""`vitrail.load` opens every kind of model; embedding, codec and text pipelines match their models."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from test_search import clip  # noqa: F401  a fixture
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.quantizers import BSQConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.pipelines import CodecPipeline, DetectorPipeline, EmbeddingPipeline, TextPipeline
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))


def test_embedding_pipeline(clip, image):  # noqa: F811
    pipeline = vitrail.load(clip[0], device="cpu")
    assert isinstance(pipeline, EmbeddingPipeline)
    images, texts = pipeline.encode_images([image, image]), pipeline.encode_texts(["sea", "a red bicycle"])
    assert images.shape == texts.shape and torch.allclose(images.norm(dim=-1), torch.ones(2))
    assert torch.allclose(pipeline.encode_images(image), images[:1], atol=1e-5)
    result = pipeline.zero_shot(image, ["sea", "bicycle"])
    assert result.labels[0] in ("sea", "bicycle") and torch.allclose(result.probabilities.sum(-1), torch.ones(1))
    with pytest.raises(ConfigError, match="no image"):
        pipeline.encode_images([])


def test_codec_pipeline(tmp_path, image):
    torch.manual_seed(0)
    net = ConvAutoencoderConfig(widths=(8, 12), layers=1, latent_channels=5, norm_groups=4, image_size=(16, 16))
    codec = Codec(CodecConfig(net=net, quantizer=BSQConfig(bits=6)))
    hub.save(codec, tmp_path / "codec")
    pipeline = vitrail.load(tmp_path / "codec", device="cpu")
    assert isinstance(pipeline, CodecPipeline) and pipeline.name == "codec"
    ids = pipeline.encode([image, image])
    assert ids.shape[0] == 2 and torch.equal(pipeline.encode(image), ids[:1])
    decoded, direct = pipeline.decode(ids), pipeline.reconstruct([image, image])
    assert [np.array(one).tolist() for one in decoded] == [np.array(one).tolist() for one in direct]
    image.save(tmp_path / "a.png")
    seen = []
    with vitrail.tokenize(
        tmp_path / "a.png", pipeline, tmp_path / "a.vtok", progress=lambda count, total: seen.append((count, total))
    ) as file:
        assert len(file) == 1 and seen[-1] == (1, 1)
    with pytest.raises(ConfigError, match="image_size needs fit"):
        vitrail.tokenize(tmp_path / "a.png", pipeline, tmp_path / "b.vtok", fit="pad", image_size=16)


def test_text_pipeline(tmp_path):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["a dog and two cats"] * 3, 280)
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=24))
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, layers=1, context_length=64, block=block, rotary=RotaryConfig(8)
    )
    hub.save(Decoder(config), tmp_path / "lm", tokenizer)
    pipeline = vitrail.load(tmp_path / "lm", device="cpu")
    assert isinstance(pipeline, TextPipeline)
    text = pipeline.generate("a dog", max_new_tokens=5)
    assert (
        text == "".join(pipeline.stream("a dog", max_new_tokens=5)) == pipeline.generate(["a dog"], max_new_tokens=5)[0]
    )
    assert pipeline.loglikelihoods([("a dog", " and"), ("a", " dog")])[0] < 0
    with pytest.raises(ConfigError, match="takes no template"):
        vitrail.load(tmp_path / "lm", template="vicuna")


def test_kinds_without_pipeline_raise(tmp_path):
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=24))
    hub.save(ViT(ViTConfig(layers=1, block=block, image_size=16, patch_size=8)), tmp_path)
    with pytest.raises(CheckpointError, match="no pipeline"):
        vitrail.load(tmp_path)


def test_detector(tmp_path):
    pipeline = vitrail.load("judge", device="cpu")
    assert isinstance(pipeline, DetectorPipeline)
    grey = Image.new("RGB", (80, 60), "grey")
    found = pipeline.detect([grey, grey], threshold=0.0)
    assert len(found) == 2 and found[0] == found[1] and len(found[0]) > 1
    scores = [each.score for each in found[0]]
    assert scores == sorted(scores, reverse=True) and all(0 <= x <= 1 for each in found[0] for x in each.box)
    assert pipeline.detect(grey) == [[]]


def test_training_function_is_callable_beside_its_package():
    from vitrail.training.trainer import Trainer

    assert callable(vitrail.train) and Trainer.__module__ == "vitrail.training.trainer"
    with pytest.raises(ConfigError, match="go together"):
        vitrail.train("smoke", "unused", start_stage="first")


def test_training_function_takes_overrides_as_keywords(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr("vitrail.api.train_recipe", lambda recipe, *_, **__: trained.append(recipe))
    result = vitrail.train("smoke", tmp_path, seed=3, **{"stages.0.steps": 40})
    assert trained == [result.recipe] and (result.recipe.seed, result.recipe.stages[0].steps) == (3, 40)
    assert result.weights == tmp_path / "final"
    with pytest.raises(ConfigError, match="no key 'sead'"):
        vitrail.train("smoke", tmp_path, sead=3)
    with pytest.raises(ConfigError, match="by name or file"):
        vitrail.train(result.recipe, tmp_path, seed=4)
