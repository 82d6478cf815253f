"""Timing of passes with tiny models; tests assert arithmetic, never speed."""

import pytest
import torch

from models import test_cross_attention_vlm as cross_vlm
from models import test_unified_model as unified
from models import test_vlm as vlm
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs import CausalVideoCodecConfig, CogVideoXAutoencoderConfig
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.codecs.quantizers import KLConfig
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.errors import ConfigError
from vitrail.lab import pass_timing as lab
from vitrail.lab.cost_ledger import DeviceSpec, compute_ledger
from vitrail.models.contrastive_model import ContrastiveConfig
from vitrail.models.detector import DetectorConfig
from vitrail.models.vlm import VLMConfig
from vitrail.nn import Workload, cost
from worlds import genie_config

AT = DeviceSpec(flops=1e9, bandwidth=1e8, memory=1e10, origin="made up")
BLOCK = VIT_PRESETS["clip-b16"].block
SMALL = BLOCK.replace(width=32, attention=BLOCK.attention.replace(heads=2), mlp=BLOCK.mlp.replace(intermediate_size=48))
VIT = VIT_PRESETS["clip-b16"].replace(layers=2, image_size=32, block=SMALL)
WORDS = DECODER_PRESETS["stories15m"].replace(layers=2, vocab_size=60)


def measured(config, **more):
    return lab.time_passes(config, AT, dtype="float32", **more)


def test_decoder_prefill_and_decoding():
    read, word = measured(WORDS, name="tiny", context_length=12, batch_size=2)
    assert (read.name, read.pass_name, word.pass_name) == ("tiny", "prefill, 12 tokens", "a token at 12")
    one = compute_ledger(WORDS, context_length=12, batch_size=2, dtype="float32", devices=())
    assert read.flops == 2 * one.forward_flops
    # Two warmup and seven timed steps, each with one more token: the middle one follows 12 + 2 + 3 tokens.
    with torch.device("meta"):
        assert word.flops == cost.count_flops(Decoder(WORDS), Workload.decode(18, 2))
    for found in (read, word):
        assert found.roofline == max(found.flops / AT.flops, found.bytes / AT.bandwidth)
        assert found.bound == ("compute" if found.flops / AT.flops >= found.bytes / AT.bandwidth else "memory")
        assert found.ratio == pytest.approx(found.seconds / found.roofline) and found.seconds > 0


def test_empty_workload_raises():
    for more in ({"batch_size": 0}, {"context_length": 0}):
        with pytest.raises(ConfigError, match="invalid workload"):
            measured(WORDS, **more)


def test_towers_and_codecs():
    net = CODEC_PRESETS["bsq-vit-b16-28"].net
    pair = net.replace(
        encoder=net.encoder.replace(layers=1, image_size=32, block=SMALL),
        decoder=net.decoder.replace(layers=1, image_size=2, block=SMALL),
        intermediate_size=40,
    )
    for config in (VIT, CODEC_PRESETS["bsq-vit-b16-28"].replace(net=pair)):
        (found,) = measured(config, batch_size=3)
        assert found.pass_name == "forward" and found.flops == 3 * compute_ledger(config, devices=()).forward_flops


def test_video_codec():
    net = CogVideoXAutoencoderConfig(
        widths=(2, 4), layers=1, latent_channels=2, temporal_factor=2, norm_groups=1, image_size=(4, 6)
    )
    config = CausalVideoCodecConfig(net=net, quantizer=KLConfig(width=2))
    (found,) = measured(config, batch_size=2)
    assert found.pass_name == "video, 49 frames"
    assert found.flops == 2 * compute_ledger(config, devices=()).forward_flops


def test_detector():
    image = VIT_PRESETS["siglip-b16-224"].replace(layers=2, image_size=32, block=SMALL, pool="none")
    config = DetectorConfig(image=image, concepts=("cat", "dog"), colours=("red",))
    (found,) = measured(config, batch_size=2)
    head = 2 * (VIT.image_size // VIT.patch_size) ** 2 * VIT.block.width * (1 + 4 + 2 + 1)
    assert found.flops == 2 * (compute_ledger(image, devices=()).forward_flops + head)


def test_contrastive_model():
    text = next(iter(TEXT_TOWER_PRESETS.values()))
    text = text.replace(
        layers=1,
        vocab_size=50,
        eos_token_id=49,
        context_length=7,
        block=text.block.replace(width=32, attention=SMALL.attention),
    )
    config = ContrastiveConfig(image=VIT, text=text, embed_dim=16)
    (found,) = measured(config, batch_size=2)
    assert found.flops > 2 * compute_ledger(VIT, devices=()).forward_flops
    (alone,) = measured(text)
    assert alone.flops == compute_ledger(text, devices=()).forward_flops


def test_vlm():
    config = VLMConfig(
        tower=vlm.TOWER,
        decoder=vlm.DECODER,
        policy=vlm.POLICIES["naive"],
        connector=vlm.PROJECTOR,
        vision_feature_layer=-2,
    )
    found, word = measured(config, context_length=5, image_size=(30, 50), batch_size=2)
    assert found.pass_name == "first token, an image and 5 text tokens"
    assert found.flops == 2 * compute_ledger(config, context_length=5, image_size=(30, 50), devices=()).forward_flops
    assert word.pass_name.startswith("a token at") and 0 < word.flops < found.flops


@pytest.mark.parametrize("kind", ["llama", "flamingo", "idefics", "patches"])
def test_cross_attention_vlm(kind):
    config = cross_vlm.KINDS[kind]
    config = config.replace(tower=config.tower.replace(channels=3))  # RGB images, unlike in those tests
    found, word = measured(config, context_length=5, image_size=(30, 50), batch_size=2)
    assert found.pass_name == "first token, an image and 5 text tokens"
    assert found.flops == 2 * compute_ledger(config, context_length=5, image_size=(30, 50), devices=()).forward_flops
    assert word.pass_name.startswith("a token at") and 0 < word.flops < found.flops


def test_unified_model():
    config = unified.made(order="masked").config
    found, word = measured(config, context_length=5, batch_size=2)
    assert found.pass_name == "first token, an image and 5 text tokens"
    assert found.flops == 2 * compute_ledger(config, context_length=5, devices=()).forward_flops
    assert word.pass_name == "a token at 15"  # a start token and nine codes
    with torch.device("meta"):
        assert word.flops == cost.count_flops(Decoder(config.decoder), Workload.decode(21, 2))


@pytest.mark.parametrize("acts", ["added", "token"])
def test_world_model(acts):
    config = genie_config(acts=acts)
    (found,) = measured(config, batch_size=2)
    assert found.pass_name == f"dynamics, {config.dynamics.transformer.context_frames} frames"
    assert found.flops == 2 * compute_ledger(config, devices=()).forward_flops


def test_rates_match_the_timed_operations(monkeypatch):
    monkeypatch.setitem(lab.PROBE_SIZES, "cpu", (64, 2**16))
    monkeypatch.setattr(lab, "_time_calls", lambda call, device: [call() is None or 0.5, 0.25])
    found = lab.measure_device("cpu", torch.float32)
    assert (found.flops, found.bandwidth) == (2 * 64**3 / 0.25, 2 * 2**16 / 0.25)
    assert found.memory > 0 and found.origin.startswith("CPU")


def test_model_larger_than_memory_raises():
    with pytest.raises(ConfigError, match=r"llama needs 13\.7 GB, and the device has 10\.0 GB"):
        lab.time_passes(DECODER_PRESETS["llama-2-7b"], AT, name="llama")
