"""Released checkpoints are read from their real config files, which list only what differs from class defaults.

`released_configs.json` holds the files of released models: name → file name → content. Keys of text generation are left
out of config.json. `total_size` is the number of bytes of all tensors, by the index of the checkpoint.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

from vitrail.hub.checkpoint_info import find_checkpoint

RELEASED = json.loads(Path(__file__).with_name("released_configs.json").read_text())

# Parameters as published: by the index files, the model cards, or the papers.
PARAMETERS = {
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "liuhaotian/llava-v1.5-7b": 7_062_902_784,
    "google/siglip-so400m-patch14-384": 877_960_498,
    "openai/clip-vit-large-patch14": 427_616_513,
    "facebook/dinov2-giant": 1_136_480_768,
    "Salesforce/blip2-opt-2.7b": 3_744_761_856,
    "llava-hf/llava-v1.6-mistral-7b-hf": 7_566_747_648,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Devstral-Small-2-24B-Instruct": 24_011_361_280,
    "microsoft/phi-4": 14_659_507_200,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-11B-Vision-Instruct": 10_670_220_835,
    "TinyLlama/TinyLlama_v1.1": 1_100_048_384,
    "Qwen/Qwen1.5-0.5B-Chat": 463_987_712,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    # Without the head for further tokens (mtp) of the released files.
    "Qwen/Qwen3.5-small": 852_985_920,
    "Qwen/Qwen3.5-9B": 9_409_813_744,
    "Qwen/Qwen3.5-35B-A3B": 35_107_181_936,
    "zai-org/GLM-4.1V-9B-Thinking": 10_292_777_472,
    "google/gemma-4-26B-A4B-it": 25_805_933_872,  # as transformers builds it
    "google/gemma-4-31B-it": 31_273_086_512,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,  # without the layer that predicts further tokens
    "moonshotai/Kimi-K2.5": 1_026_879_353_328,  # as transformers builds it
    "stabilityai/sd-vae-ft-mse": 83_653_863,
    "black-forest-labs/FLUX.1-dev/vae": 83_819_683,
    "zai-org/CogVideoX1.5-5B-I2V/vae": 215_583_907,  # as diffusers builds it
    "meituan-longcat/LongCat-Video/vae": 126_892_531,  # Wan 2.1's, as diffusers builds it
    "stabilityai/stable-diffusion-xl-base-1.0/text_encoder": 123_060_480,
    "stabilityai/stable-diffusion-2-1/text_encoder": 340_387_840,
    "stabilityai/stable-diffusion-xl-base-1.0/text_encoder_2": 694_659_840,
    "stabilityai/stable-diffusion-3-medium-diffusers/text_encoder_3": 4_762_310_656,
    "google/vit-base-patch16-224-in21k": 86_389_248,
    "OpenGVLab/InternVL2-2B": 2_205_754_368,
    "OpenGVLab/InternVL2-8B": 8_075_365_376,
    "gustavokuklinski/aeon-smolvlm-256m-instruct": 256_484_928,
    "openbmb/MiniCPM-Llama3-V-2_5": 8_537_092_336,
    "openbmb/MiniCPM-V-2_6": 8_099_175_152,
    "openbmb/MiniCPM-V-4": 4_059_533_040,
    "allenai/Molmo-7B-D-0924": 8_021_025_280,
    "adept/fuyu-8b": 9_408_238_592,
    "microsoft/Florence-2-large-ft": 770_174_976,  # with a row for the image token, as transformers converts it
    "microsoft/Phi-3-vision-128k-instruct": 4_146_621_440,
    "microsoft/Phi-3.5-vision-instruct": 4_146_621_440,
    "microsoft/Phi-4-multimodal-instruct": 4_646_670_528,  # without speech: see test_phi4_multimodal
    "google/paligemma-3b-pt-224": 2_923_466_480,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
}
# Small enough to build in transformers too: the sparse configs, one for each family.
BUILT_IN_TRANSFORMERS = [
    "llava-hf/llava-1.5-7b-hf",
    "google/siglip-so400m-patch14-384",
    "openai/clip-vit-large-patch14",
    "facebook/dinov2-giant",
    "google/vit-base-patch16-224-in21k",
    "stabilityai/stable-diffusion-xl-base-1.0/text_encoder_2",
    "Salesforce/blip2-opt-2.7b",
    "llava-hf/llava-v1.6-mistral-7b-hf",
    "microsoft/phi-4",
    "mistralai/Devstral-Small-2-24B-Instruct",
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3.5-small",
    "Qwen/Qwen3.5-35B-A3B",
    "google/gemma-3-4b-it",
    "google/paligemma-3b-pt-224",
    "gustavokuklinski/aeon-smolvlm-256m-instruct",
    "google/gemma-4-26B-A4B-it",
    "google/gemma-4-31B-it",
    "adept/fuyu-8b",
    "deepseek-ai/DeepSeek-V3",
]


def write_files(name: str, folder: Path) -> Path:
    """Write the files of a released model."""
    for file, content in RELEASED[name].items():
        if file.endswith(".json"):
            (folder / file).write_text(json.dumps(content))
    return folder


def count_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name, tmp_path):
    found = find_checkpoint(write_files(name, tmp_path))
    with torch.device("meta"):
        model = found.model_class(found.config)
    assert count_parameters(model) == PARAMETERS[name]


@pytest.mark.parametrize("name", BUILT_IN_TRANSFORMERS)
def test_transformers_has_the_same_parameters(name, tmp_path):
    """transformers builds the same number of parameters from the same files."""
    config = transformers.AutoConfig.from_pretrained(write_files(name, tmp_path))
    with torch.device("meta"):
        reference = getattr(transformers, config.architectures[0])(config)
    assert count_parameters(reference) == PARAMETERS[name]


def test_index_files_agree():
    """Bytes of all tensors: two or four a parameter."""
    sizes = {name: row["total_size"] for name, row in RELEASED.items() if "total_size" in row}
    for name, size in sizes.items():
        if name in PARAMETERS:
            assert size in (2 * PARAMETERS[name], 4 * PARAMETERS[name]), name
