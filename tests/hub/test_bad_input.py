"""Damaged, contradictory and unknown checkpoints: every error names the file, the key or tensor, and what to do."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from vitrail.cli.ask_command import ask_questions
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load
from vitrail.hub.checkpoint_info import read_config
from vitrail.processing.tokenizer import Tokenizer

TEXT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


@pytest.fixture
def folder(tmp_path):
    """A random LLaVA of transformers."""
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION), image_token_index=299
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, part: str | None, **changes) -> None:
    file = folder / "config.json"
    hf_config = json.loads(file.read_text())
    (hf_config if part is None else hf_config[part]).update(changes)
    file.write_text(json.dumps(hf_config))


def check_error(error: VitrailError, *words: str) -> None:
    assert error.remedy, error
    for word in words:
        assert word in f"{error.problem}\n{error.remedy}", (word, error)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("text_config", {"hidden_size": 32}, ["text_config.hidden_size (32; the tensor has 24)"]),
        ("text_config", {"vocab_size": 310}, ["embed_tokens", "(310, 24)", "text_config.vocab_size"]),
        ("text_config", {"intermediate_size": 48}, ["gate_proj", "text_config.intermediate_size (48"]),
        ("text_config", {"num_hidden_layers": 3}, ["layers.2", "text_config.num_hidden_layers"]),
        ("text_config", {"num_key_value_heads": 4}, ["k_proj", "num_key_value_heads × head_dim (24"]),
        ("vision_config", {"patch_size": 4}, ["patch_embedding", "vision_config.patch_size (4; the tensor has 7)"]),
        ("vision_config", {"image_size": 35}, ["position_embedding", "(26, 16)"]),
        ("vision_config", {"num_hidden_layers": 4}, ["encoder.layers.3", "vision_config.num_hidden_layers"]),
    ],
)
def test_config_that_contradicts_its_weights(part, changes, words, folder):
    change_config(folder, part, **changes)
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(error.value, str(folder), "config.json", *words)


def test_no_tensor_is_read_before_the_check(folder, monkeypatch):
    change_config(folder, "text_config", intermediate_size=48)
    monkeypatch.setattr("vitrail.hub.safetensors_files.SafetensorsWeights.__getitem__", None)
    with pytest.raises(VitrailError, match="requires"):
        load(folder)


def test_several_shards_name_the_one(folder):
    """The file of the wrong tensor is named."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    load(folder)
    wrong = next(name for name in weight_map if "embed_tokens" in name)
    change_config(folder, "text_config", vocab_size=310)
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(error.value, str(folder / weight_map[wrong]), wrong)
    # A shard that the index lists is not there.
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(
        error.value,
        str(folder / "model.safetensors.index.json"),
        "model-00002-of-00002.safetensors, which is missing",
        f"download {folder / 'model-00002-of-00002.safetensors'}",
    )
    # Neither the index nor the shard is there.
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(error.value, str(folder), "has no tensor", "more, which", "config.json")


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(error.value, str(folder), "contains no .safetensors file", "download the weights")


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        (None, {"model_type": "llavva"}, ["unknown model_type 'llavva'", "nearest supported family is llava"]),
        ("text_config", {"model_type": "lama"}, ["text_config.model_type 'lama'", "known: llama"]),
        ("vision_config", {"hidden_size": "wide"}, ["vision_config.hidden_size", "correct this key"]),
        (None, {"image_token_index": 400}, ["400", "300 ids", "below 300"]),
        (None, {"projector_hidden_act": "snake"}, ["projector_hidden_act 'snake'", "known: "]),
        (None, {"vision_feature_layer": -7}, ["no layer -7"]),
    ],
)
def test_config_with_a_wrong_value(part, changes, words, folder):
    change_config(folder, part, **changes)
    for read in (read_config, from_hf):
        with pytest.raises(VitrailError) as error:
            read(folder)
        check_error(error.value, str(folder / "config.json"), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["cannot be read as JSON", "download it again"]),
        ("[]", ["does not contain a JSON object"]),
        ('{"hidden_size": 3}', ["no model_type", "add the model_type"]),
    ],
)
def test_config_that_is_no_config(content, words, folder):
    (folder / "config.json").write_text(content)
    with pytest.raises(VitrailError) as error:
        load(folder)
    check_error(error.value, str(folder / "config.json"), *words)


def test_chat_template_that_is_not_jinja(folder):
    tokenizer = Tokenizer.train(["what is it? " * 3], 299, special_tokens=("<image>",), eos=None)
    tokenizer.save(folder)
    change_config(folder, None, image_token_index=tokenizer.token_to_id("<image>"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message['content'] }\n{% endfor %}")
    Image.new("RGB", (9, 9)).save(folder / "image.png")
    with pytest.raises(VitrailError) as error:
        ask_questions(str(folder / "image.png"), "what is it?", model=str(folder), device="cpu")
    check_error(error.value, str(folder / "chat_template.jinja"), "line 2", "fix the template at that line")


def test_diffusers_root_without_the_needed_subfolder(tmp_path):
    index = {"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(VitrailError) as error:
        load(tmp_path)
    check_error(
        error.value, str(tmp_path / "model_index.json"), "lists vae", "vae/config.json", "download the subfolder"
    )
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text('{"_class_name": "AutoencoderKL", "latent_channels": 4}')
    with pytest.raises(VitrailError) as error:
        load(tmp_path)
    check_error(error.value, str(tmp_path / "vae"), "no .safetensors file", "download the weights")


def test_code_of_a_checkpoint_does_not_run(folder):
    """A folder may name code of its own (auto_map); it is not read."""
    (folder / "modeling_evil.py").write_text("raise SystemExit('this code ran')")
    change_config(folder, None, auto_map={"AutoModel": "modeling_evil.Evil"})
    assert isinstance(load(folder), torch.nn.Module)
