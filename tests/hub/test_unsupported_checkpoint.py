"""Pipelines of diffusers are opened by their codec. What is not supported is refused by its real name."""

import json

import pytest
import torch

from helpers import randomize
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.quantizers import KLConfig
from vitrail.errors import CheckpointError
from vitrail.hub import load, to_hf
from vitrail.hub.checkpoint_info import find_checkpoint, read_config

STABLE_DIFFUSION = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.6.0",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
TEXT_ENCODER = {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "eos_token_id": 2}


def write_pipeline(folder, **changes):
    for name, content in {
        "text_encoder": TEXT_ENCODER,
        "unet": {"_class_name": "UNet2DConditionModel", "in_channels": 4},
        "vae": {"_class_name": "AutoencoderKL", "latent_channels": 4},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    (folder / "model_index.json").write_text(json.dumps(STABLE_DIFFUSION | changes))
    return folder


def test_pipeline_opens_its_codec(tmp_path):
    folder = write_pipeline(tmp_path)
    net = ConvAutoencoderConfig(widths=(8,), layers=1, norm_groups=4, latent_channels=3)
    codec = randomize(Codec(CodecConfig(net=net, quantizer=KLConfig(width=3)))).eval()
    to_hf(codec, folder / "vae")
    again = load(folder)
    assert again.config == codec.config == read_config(folder / "vae")
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in codec.state_dict().items())


def test_pipeline_without_the_codec_folder(tmp_path):
    folder = write_pipeline(tmp_path)
    (folder / "vae/config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"lists vae \(AutoencoderKL\), but .*vae/config\.json does not exist"
    ) as e:
        find_checkpoint(folder)
    assert e.value.remedy == "download the subfolder vae too"


def test_pipeline_with_another_codec(tmp_path):
    folder = write_pipeline(tmp_path, _class_name="MochiPipeline", vae=["diffusers", "AutoencoderKLMochi"])
    (folder / "vae/config.json").write_text('{"_class_name": "AutoencoderKLMochi"}')
    with pytest.raises(CheckpointError, match=r"no part of this MochiPipeline .*vae: AutoencoderKLMochi") as error:
        find_checkpoint(folder)
    assert error.value.remedy == (
        "supported classes: AutoencoderKL, AutoencoderKLCogVideoX, AutoencoderKLCosmos, AutoencoderKLWan, VQModel; "
        f"or give a subfolder: {folder}/text_encoder"
    )


UNSUPPORTED = {
    "codec": (
        {"_class_name": "AutoencoderKLMochi", "latent_channels": 12},
        r"config\.json has the class AutoencoderKLMochi",
        "nearest supported family is AutoencoderKL",
    ),
    "network of a diffusion model": (
        {"_class_name": "UNet2DConditionModel"},
        "has the class UNet2DConditionModel",
        "supported classes of diffusers: AutoencoderKL, VQModel, AutoencoderKLCosmos",
    ),
    "class beside a model_type": (
        {"_class_name": "WanModel", "model_type": "llama"},
        "has the class WanModel",
        "supported classes of diffusers",
    ),
    "LeRobot policy": (
        {"type": "pi0", "input_features": {}, "output_features": {}},
        "is a LeRobot policy of type 'pi0'",
        "lerobot",
    ),
    "vision-language model": (
        {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": {}},
        r"unknown model_type 'qwen2_5_omni' \(Qwen2_5OmniModel\)",
        "nearest supported family is qwen2_5_vl",
    ),
    "language model": (
        {"model_type": "mamba", "vocab_size": 9},
        "unknown model_type 'mamba'",
        "supported language models: llama",
    ),
    "encoder-decoder model": (
        {
            "model_type": "bart",
            "architectures": ["BartForConditionalGeneration"],
            "is_encoder_decoder": True,
            "vocab_size": 9,
        },
        r"is the encoder-decoder model 'bart' \(BartForConditionalGeneration\), which is not supported",
        "use a model with a decoder only; supported language models: ",
    ),
    "no name at all": ({"hidden_size": 4}, "no model_type, _class_name or architecture", "add the model_type"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_checkpoint_is_refused_by_its_real_name(case, tmp_path):
    hf_config, problem, remedy = UNSUPPORTED[case]
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    with pytest.raises(CheckpointError, match=problem) as error:
        find_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in error.value.problem
    assert remedy in error.value.remedy
    assert "download" not in error.value.remedy


def test_quantized_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})
    )
    assert read_config(tmp_path).layers == 32
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config has the quant_method 'awq'"):
        load(tmp_path)
