"""MiniCPM-V matches the published computation: transformers' tower and decoders, and a resampler of torch's layers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_llava import pictures
from hub.vlm_parity import GRADIENTS, PICTURES, VALUES, build_samples, is_image
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.minicpmv import write_nested_slice_text, write_slice_text
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.models.vision_inputs import VisionInputs
from vitrail.processing.slices import SlicePolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams, split_by_sample

QUERIES, HEAD_DIM, WIDTH = 5, 128, 256
TEXT = {"hidden_size": WIDTH, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 99, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 35, "patch_size": 5}
SLICES = {"max_slice_nums": 4, "scale_resolution": 40}


def place_embedding(rows: int, columns: int, width: int) -> Tensor:
    """Sines and cosines of the column, then of the row, one angle at a time."""
    table = np.zeros((rows, columns, width), dtype=np.float32)
    quarter = width // 4
    for row in range(rows):
        for column in range(columns):
            for k in range(quarter):
                for half, place in enumerate((column, row)):
                    angle = place / 10000 ** (k / quarter)
                    table[row, column, 2 * half * quarter + k] = math.sin(angle)
                    table[row, column, (2 * half + 1) * quarter + k] = math.cos(angle)
    return torch.tensor(table).flatten(0, 1)


class Reference(nn.Module):
    """The published computation, one view at a time."""

    def __init__(self, language_model: nn.Module, width: int = TOWER["hidden_size"]):
        super().__init__()
        self.vpm = Idefics2VisionTransformer(Idefics2VisionConfig(**TOWER | {"hidden_size": width}))
        self.resampler = nn.Module()
        self.resampler.query = nn.Parameter(torch.zeros(QUERIES, WIDTH))
        self.resampler.proj = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        if width != WIDTH:
            self.resampler.kv_proj = nn.Linear(width, WIDTH, bias=False)
        self.resampler.attn = nn.MultiheadAttention(WIDTH, WIDTH // HEAD_DIM)
        for name in ("q", "kv", "post"):
            setattr(self.resampler, f"ln_{name}", nn.LayerNorm(WIDTH, eps=1e-6))
        self.llm = language_model

    def encode_view(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        size = TOWER["patch_size"]
        pixels = patches.view(rows, columns, 3, size, size).permute(2, 0, 3, 1, 4).reshape(1, 3, rows * size, -1)
        features = self.vpm(pixels, torch.ones(1, rows, columns, dtype=torch.bool)).last_hidden_state[0]
        sampler = self.resampler
        context = sampler.ln_kv(sampler.kv_proj(features) if hasattr(sampler, "kv_proj") else features)
        keys = context + place_embedding(rows, columns, WIDTH)
        return sampler.ln_post(sampler.attn(sampler.ln_q(sampler.query), keys, context)[0]) @ sampler.proj

    def forward(self, ids: Tensor, mask: Tensor, images: VisionInputs | None) -> Tensor:
        embeds = self.llm.get_input_embeddings()(ids)
        if images is not None:
            grids = [view.grid for layout in images.layouts for view in layout.views]
            views = images.pixels.split([grid.num_patches for grid in grids])
            tokens = [self.encode_view(view, grid.h, grid.w) for view, grid in zip(views, grids, strict=True)]
            embeds = embeds.masked_scatter(mask[:, None], torch.cat(tokens))
        return self.llm(inputs_embeds=embeds[None]).logits[0]


def write(reference: Reference, folder: Path, version, tower: str, **more) -> None:
    text = json.loads(reference.llm.config.to_json_string())
    about = {**text, "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": version, "unk_token_id": 98}
    vision = {**TOWER, "hidden_size": reference.vpm.config.hidden_size, "model_type": tower}
    about |= {"query_num": QUERIES, "drop_vision_last_layer": False, "slice_config": SLICES, "vision_config": vision}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about | more))
    save_file({name: x.contiguous() for name, x in reference.state_dict().items()}, folder / "model.safetensors")


CASES = {
    "2.5": (lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT)), "2.5", "idefics2", 22),
    "2.6": (lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**TEXT)), 2.6, "siglip", 22),
    "4, widths alike": (lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT)), 4.0, "siglip_vision_model", WIDTH),
    "4.5": (lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**TEXT, head_dim=16)), 4.5, "siglip_vision_model", 22),
}


def make(case: str) -> tuple[Reference, dict]:
    language_model, version, tower, width = CASES[case]
    reference = randomize(Reference(language_model(), width).eval(), spread=0.1)
    return reference, {"version": version, "tower": tower}


@pytest.mark.parametrize("case", CASES)
def test_matches_the_published_computation(case, tmp_path):
    reference, settings = make(case)
    write(reference, tmp_path / "hf", **settings)
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    assert max(len(layout.views) for images in shown if images for layout in images.layouts) >= 3
    given = [images for images in shown if images is not None]
    pixels, layouts = torch.cat([one.pixels for one in given]), tuple(x for one in given for x in one.layouts)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, VisionInputs(pixels, layouts)))
    expected = [reference(one.ids, is_image(one), images) for one, images in zip(samples, shown, strict=True)]
    for a, b in zip(logits, expected, strict=True):
        assert relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    write(reference, tmp_path / "gradients", **settings)
    wanted = dict(from_hf(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= GRADIENTS * wanted[name].abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    reference, settings = make(case)
    write(reference, tmp_path / "hf", **settings)
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (about["model_type"], str(about["version"])) == ("minicpmv", str(settings["version"]))
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


# ---- slices and prompts ------------------------------------------------------------------------------------------

SIZES = [*(size for sizes in PICTURES for size in sizes), (39, 41), (200, 30), (161, 160), (7, 5), (80, 80), (300, 410)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_slices", [1, 4, 9])
def test_slices_match_transformers(size, max_slices):
    """The processor of MiniCPM-V 4.6 has the same slices, with larger units."""
    policy = SlicePolicy(slice_size=60, patch_size=3, merge_size=4, max_slices=max_slices)
    [image] = pictures(size)
    processor = MiniCPMV4_6ImageProcessorPil(
        scale_resolution=60, patch_size=3, max_slice_nums=max_slices, do_normalize=False
    )
    found, layout = processor(image, return_tensors="pt"), policy.layout(*size)
    assert [[view.grid.h, view.grid.w] for view in layout.views] == found["target_sizes"].tolist()
    patches = [
        torch.tensor(np.array(view)).movedim(-1, 0).unfold(1, 3, 3).unfold(2, 3, 3) for view in policy.apply(image)
    ]
    ours = torch.cat([view.permute(0, 3, 1, 2, 4).flatten(2) for view in patches], dim=-1)
    torch.testing.assert_close(ours / 255, found["pixel_values"][0], rtol=0, atol=1e-6)


def test_texts_around_slices():
    image, tall = SlicePolicy(max_slices=6).layout(448, 448), SlicePolicy(max_slices=6).layout(1344, 896)
    assert [len(layout.views) for layout in (image, tall)] == [1, 7]
    join = "_".join
    assert join(write_slice_text(image, 3)) == "<image_id>3</image_id><image>_</image>"
    row = "<slice>_</slice><slice>_</slice>"
    assert join(write_slice_text(tall, 0)) == f"<image_id>0</image_id><image>_</image>{row}\n{row}\n{row}"
    assert join(write_nested_slice_text(image, 3)) == "<image>_</image>"
    row = "<image>_</image><image>_</image>"
    assert join(write_nested_slice_text(tall, 0)) == f"<image>_</image><slice>{row}\n{row}\n{row}</slice>"


PROMPTS = {
    "2.5": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nIs\n{image}\nthis?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "2.6": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nIs\n{image}\nthis?<|im_end|>\n<|im_start|>assistant\n",
    "4, widths alike": "<|im_start|>user\nIs\n{image}\nthis?<|im_end|>\n<|im_start|>assistant\n",
}
SPECIALS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|im_start|>", "<|im_end|>"]
SPECIALS += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<unk>"]


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_and_answers(case, tmp_path):
    """A prompt is the published one; a template of the language model alone is not used."""
    words = Tokenizer.train(["Is this a helpful assistant?"] * 3, 400, special_tokens=SPECIALS, eos="<|eot_id|>")
    language_model, version, tower, width = CASES[case]
    model = language_model()
    model.resize_token_embeddings(words.vocab_size)
    write(randomize(Reference(model, width), spread=0.3), tmp_path, version, tower)
    words.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content + '' }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pipeline = vitrail.load(tmp_path, device="cpu")
    content = [{"type": "text", "text": "Is"}, {"type": "image", "image": Image.new("RGB", (90, 30))}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "this?"}]}]
    prompt = pipeline.build_prompt(messages)
    unknown, slices = "<unk>" * QUERIES, 3
    image = (
        f"<image>{unknown}</image><slice>{f'<image>{unknown}</image>' * slices}</slice>"
        if case == "2.5"
        else f"<image_id>0</image_id><image>{unknown}</image>{f'<slice>{unknown}</slice>' * slices}"
    )
    assert words.decode(prompt.stream.ids.tolist()) == PROMPTS[case].format(image=image)
    assert isinstance(pipeline.chat(messages, max_new_tokens=3), str)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3.0}, "version 3.0 of MiniCPM-V"),
        ({"version": None}, "version None"),
        ({"slice_mode": False}, "slice_mode is false"),
        ({"vision_config": {**TOWER, "hidden_act": "mish"}}, "mish"),
        ({"init_audio": True}, "audio"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    reference, settings = make("2.6")
    write(reference, tmp_path, **settings)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_dropped_layer_and_released_processor(tmp_path):
    """A checkpoint without the last layer of its tower, and the settings of the released processor files."""
    reference, settings = make("2.6")
    reference.vpm.encoder.layers = reference.vpm.encoder.layers[:-1]
    write(reference, tmp_path, **settings, drop_vision_last_layer=True)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"max_slice_nums": 2, "scale_resolution": 40, "patch_size": 5, "norm_mean": [0.1, 0.2, 0.3]})
    )
    ours = from_hf(tmp_path)
    assert (ours.config.tower.layers, ours.config.policy.max_slices, ours.config.mean) == (1, 2, (0.1, 0.2, 0.3))
    assert FAMILIES["minicpmv"].supports(ours.config) and not FAMILIES["minicpmv-2.5"].supports(ours.config)
