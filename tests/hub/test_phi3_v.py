"""Phi-3-vision matches the published computation: CLIP and Phi-3 of transformers, and a projection of torch layers."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from helpers import randomize
from hub.vlm_parity import PICTURES, check_parity
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, llava_original, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.processing.hd_tiles import HDTransformPolicy
from vitrail.processing.tokenizer import Tokenizer

CLIP = "openai/clip-vit-large-patch14-336"
TEXT = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 4, "vocab_size": 99, "max_position_embeddings": 8192}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": 24, "patch_size": 4}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}


class ImageEmbedding(nn.Module):
    """The published computation, one cell of one image at a time."""

    def __init__(self, tower: dict, width: int, layer: int):
        super().__init__()
        self.img_processor, self.layer = T.CLIPVisionModel(T.CLIPVisionConfig(**tower)), layer
        merged = 4 * tower["hidden_size"]
        self.glb_GN, self.sub_GN = (nn.Parameter(torch.zeros(1, *ones, merged)) for ones in ((1,), (1, 1)))
        self.img_projection = nn.Sequential(nn.Linear(merged, width), nn.GELU(), nn.Linear(width, width))

    def read_cells(self, features: Tensor) -> list[list[Tensor]]:
        """Concatenate 2 × 2 patches of a view (N, D)."""
        side = int(len(features) ** 0.5)
        rows = features.view(side, side, -1)
        return [
            [torch.cat([*rows[y, x : x + 2], *rows[y + 1, x : x + 2]]) for x in range(0, side, 2)]
            for y in range(0, side, 2)
        ]

    def forward(self, views: Tensor, rows: int, columns: int) -> Tensor:
        states = self.img_processor(views, output_hidden_states=True).hidden_states[self.layer]
        *tiles, whole = [self.read_cells(view[1:]) for view in states]
        tokens = []
        for row in range(rows):
            band = tiles[row * columns : (row + 1) * columns]
            for y in range(len(whole)):
                tokens += [cell for tile in band for cell in tile[y]] + [self.sub_GN[0, 0, 0]]
        tokens.append(self.glb_GN[0, 0])
        for line in whole:
            tokens += [*line, self.sub_GN[0, 0, 0]]
        return self.img_projection(torch.stack(tokens))


class Reference(nn.Module):
    def __init__(self, tower=(), layer=-2, **text):
        super().__init__()
        self.tower, self.layer = TOWER | dict(tower), layer
        language = T.Phi3ForCausalLM(T.Phi3Config(**TEXT | {"pad_token_id": 0} | text))
        self.config, self.model, self.lm_head = language.config, language.model, language.lm_head
        self.language = [language]  # not a module, because its parts are
        self.vision_embed_tokens = ImageEmbedding(self.tower, self.config.hidden_size, layer)

    def forward(self, input_ids: Tensor, mask: Tensor, views: list[Tensor]):
        embeds = self.model.embed_tokens(input_ids)
        [sizes] = [sizes for sizes in PICTURES if len(sizes) == len(views)]
        policy = HDTransformPolicy(tile_size=self.tower["image_size"], patch_size=self.tower["patch_size"])
        grids = [policy.place(*size).tiles for size in sizes]
        tokens = [self.vision_embed_tokens(one, *grid) for one, grid in zip(views, grids, strict=True)]
        if tokens:
            embeds = embeds.masked_scatter(mask[None, :, None], torch.cat(tokens))
        return self.language[0](inputs_embeds=embeds)


def write(reference: Reference, folder: Path, **more) -> None:
    folder.mkdir(exist_ok=True)
    about = {**TEXT, "model_type": "phi3_v", "architectures": ["Phi3VForCausalLM"], "image_token_id": 98}
    about |= {"num_key_value_heads": reference.config.num_key_value_heads, "tie_word_embeddings": False}
    about["original_max_position_embeddings"] = reference.config.original_max_position_embeddings
    about["sliding_window"] = reference.config.sliding_window
    if reference.config.rope_parameters["rope_type"] == "longrope":
        about["rope_scaling"] = {"type": "su", **FACTORS}
    names = {"name": "clip_vision_model", "model_name": CLIP, "layer_idx": reference.layer, "num_img_tokens": 144}
    about["img_processor"] = names | {"image_dim_out": reference.tower["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(about | more))
    tensors = {}
    for name, tensor in reference.state_dict().items():
        name = re.sub(r"^vision_embed_tokens\.(img_processor\.)?", r"model.vision_embed_tokens.\1", name)
        name = name.replace("img_processor.vision_model.", "img_processor.")
        tensors[name.replace("img_processor.", "img_processor.vision_model.")] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


LONG = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}}
CASES = {
    "plain": Reference,
    "long samples, window": lambda: Reference(original_max_position_embeddings=60, sliding_window=33, **LONG),
    "last layer, other tiles": lambda: Reference({"image_size": 40, "patch_size": 5}, -1),
    "first layer, grouped queries": lambda: Reference({"patch_size": 6}, 1, num_key_value_heads=2),
}


@pytest.fixture
def make(monkeypatch):
    """Make a reference. The published config names its tower, which then has other sizes."""

    def make_reference(case: str) -> Reference:
        reference = randomize(CASES[case]().eval(), spread=0.1)
        monkeypatch.setitem(llava_original.TOWERS, CLIP, reference.tower)
        return reference

    return make_reference


@pytest.mark.parametrize("case", CASES)
def test_matches_the_published_computation(case, tmp_path, make):
    check_parity(make(case), tmp_path, lambda sample, mask, views: {"mask": mask, "views": views}, write)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path, make):
    write(make(case), tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "phi3_v"
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


SPECIALS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|image|>", "<|endoftext|>"]
ASK = "What is shown in this image?"


def test_prompts_are_those_of_the_published_processor(tmp_path, make):
    """The processor encodes the texts between images one by one, each with a BOS token."""
    words = Tokenizer.train([ASK] * 3, 400, special_tokens=SPECIALS, bos="<s>", eos="<|endoftext|>")
    reference = make("plain")
    reference.language[0].resize_token_embeddings(words.vocab_size)
    reference.lm_head = reference.language[0].lm_head
    image_id = words.token_to_id("<|image|>")
    write(reference, tmp_path, vocab_size=words.vocab_size)
    words.chat_template = (  # as released: for texts with numbered images
        "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{- '<|assistant|>\\n' -}}"
        "{% endif %}"
    )
    words.save(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"num_crops": 4, "num_img_tokens": 9}))
    pipeline = vitrail.load(tmp_path, device="cpu")
    assert pipeline.model.config.rules.fill_id == image_id and pipeline.model.config.policy.max_tiles == 4
    images = [Image.new("RGB", (90, 30)), Image.new("RGB", (30, 70))]
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": ASK}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Why?"},
    ]
    prompt = f"<|user|>\n<|image_1|>\n<|image_2|>\n{ASK}<|end|>\n<|assistant|>\nA cat.<|end|>\n"
    chunks = re.split(r"<\|image_\d+\|>", prompt + "<|user|>\nWhy?<|end|>\n<|assistant|>\n")
    expected = words.encode(chunks[0], add_special_tokens=True)
    for image, chunk in zip(images, chunks[1:], strict=True):
        rows, columns = HDTransformPolicy(tile_size=24, patch_size=4, max_tiles=4).place(*image.size[::-1]).tiles
        expected += [image_id] * ((rows * columns + 1) * 9 + 1 + (rows + 1) * 3)
        expected += words.encode(chunk, add_special_tokens=True)
    assert pipeline.build_prompt(messages).stream.ids.tolist() == expected
    assert words.token_to_id("<|end|>") in pipeline.stop_ids
    assert isinstance(pipeline.chat(messages, max_new_tokens=3), str)
    text = pipeline.build_prompt([{"role": "user", "content": "Why?"}]).stream.ids.tolist()
    assert words.decode(text) == "<s><|user|>\nWhy?<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"img_processor": {"name": "siglip"}}, "img_processor.name is 'siglip'"),
        ({"img_processor": {"model_name": "openai/clip"}}, "img_processor.model_name 'openai/clip'"),
        ({"img_processor": {"model_name": CLIP, "image_dim_out": 7}}, "img_processor.image_dim_out is 7"),
        ({"embd_layer": {"use_hd_transform": False}}, "embd_layer.use_hd_transform is False"),
        ({"vocab_size": 90}, "fill_id is 98"),
        ({"num_hidden_layers": 4}, "no tensor 'model.layers.3"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path, make):
    write(make("plain"), tmp_path, **change)
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_crops": 0}, "num_crops is 0"),
        ({"num_crops": "many"}, "num_crops is 'many'"),
        ({"num_img_tokens": 144}, "num_img_tokens is 144, and a view has 9 tokens"),
        ({"resample": 2}, "resample is 2"),
    ],
)
def test_processor_files_that_do_not_match_raise(change, message, tmp_path, make):
    write(make("plain"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)
