"""DeepSeek-VL2 matches the published computation, composed of transformers' SigLIP and DeepSeek-V2, V3 or Llama."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as T
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

import vitrail
from helpers import randomize, relative
from hub.test_decoder_families import on_disk
from hub.test_llava import pictures
from hub.test_released_vlms import train_one_step
from hub.vlm_parity import GRADIENTS, VALUES, compute_logits, is_image
from vitrail.cli.ask_command import ask_questions
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.models.vision_inputs import VisionInputs
from vitrail.processing.padded_tiles import PaddedTilesPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, text_part

SIDE, PATCH, WIDTH, TOKEN = 37, 5, 30, 90  # 7 × 7 patches, so that blocks of 2 × 2 are padded; 2 pixels are not read
TOWER = {"width": 24, "layers": 2, "heads": 2, "mlp_ratio": 1.7, "image_size": SIDE, "patch_size": PATCH}
GRIDS = ((1, 1), (2, 1), (1, 2), (1, 3), (2, 2))  # rows, columns
RESOLUTIONS = [[SIDE * columns, SIDE * rows] for rows, columns in GRIDS]
SAMPLES = ((), ((40, 90),), ((120, 50), (60, 70)), ((33, 31), (64, 120), (100, 7)))  # sizes of pictures
SIZES = {
    "vocab_size": 99,
    "hidden_size": WIDTH,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def tiny() -> tuple[nn.Module, dict]:
    """Ordinary attention, as in Llama, and experts."""
    text = SIZES | EXPERTS | {"topk_method": "greedy", "use_mla": False, "q_lora_rank": None, "kv_lora_rank": None}
    text |= {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    config = T.DeepseekV2Config(**SIZES, **EXPERTS)
    config._experts_implementation = "eager"
    model = T.LlamaForCausalLM(T.LlamaConfig(**SIZES))
    for layer in model.model.layers[1:]:
        layer.mlp = DeepseekV2Moe(config)
    return model, text


def small() -> tuple[nn.Module, dict]:
    text = SIZES | EXPERTS | LATENT | {"topk_method": "greedy"}
    return T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**text, experts_implementation="eager")), text


def base() -> tuple[nn.Module, dict]:
    text = SIZES | EXPERTS | LATENT | {"norm_topk_prob": True, "routed_scaling_factor": 2.0}
    model = T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**text, experts_implementation="eager"))
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))
    return model, text | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "use_mla": True}


LANGUAGE_MODELS = {"tiny": tiny, "small": small, "base": base}


class Reference(nn.Module):
    """The published computation, one picture at a time."""

    def __init__(self, language: nn.Module):
        super().__init__()
        width, hidden = TOWER["width"], int(TOWER["width"] * TOWER["mlp_ratio"])
        self.vision = T.SiglipVisionModel(
            T.SiglipVisionConfig(
                hidden_size=width,
                intermediate_size=hidden,
                num_hidden_layers=TOWER["layers"],
                num_attention_heads=TOWER["heads"],
                image_size=SIDE,
                patch_size=PATCH,
            )
        )
        self.projector = nn.Sequential(nn.Linear(4 * width, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.image_newline, self.view_seperator = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.language = language

    def encode_view(self, pixels: Tensor) -> Tensor:
        """Encode pixels (C, H, W) to tokens (rows, columns, W): blocks of channels × rows × columns."""
        features = self.vision(pixels[None]).last_hidden_state[0]
        side = math.isqrt(len(features))
        padded = F.pad(features.view(side, side, -1), (0, 0, 0, side % 2, 0, side % 2))
        rows = [
            [padded[i : i + 2, j : j + 2].permute(2, 0, 1).flatten() for j in range(0, len(padded), 2)]
            for i in range(0, len(padded), 2)
        ]
        return self.projector(torch.stack([torch.stack(row) for row in rows]))

    def encode_picture(self, views: Tensor, rows: int, columns: int) -> Tensor:
        whole, *tiles = (self.encode_view(view) for view in views)
        lines = [torch.cat([row, self.image_newline[None]]) for row in whole] + [self.view_seperator[None]]
        for i in range(rows):
            band = torch.cat(tiles[i * columns : (i + 1) * columns], dim=1)
            lines += [torch.cat([row, self.image_newline[None]]) for row in band]
        return torch.cat(lines)

    def forward(self, ids: Tensor, mask: Tensor, images: VisionInputs | None) -> Tensor:
        embeds = self.language.get_input_embeddings()(ids)
        if images is not None:
            views = images.pixels.split([len(layout.views) for layout in images.layouts])
            grids = [layout.spans[1].view_grid for layout in images.layouts]
            tokens = [self.encode_picture(one, *grid) for one, grid in zip(views, grids, strict=True)]
            embeds = embeds.masked_scatter(mask[:, None], torch.cat(tokens))
        return self.language(inputs_embeds=embeds[None]).logits[0]


def list_published_tensors(reference: Reference) -> dict[str, Tensor]:
    """Return the tensors with their published names: a tower of timm, and experts one by one."""
    state = {name: tensor.detach() for name, tensor in reference.vision.state_dict().items()}
    names = {
        "embeddings.patch_embedding": "patch_embed.proj",
        "post_layernorm": "norm",
        "head.layernorm": "attn_pool.norm",
    }
    names |= {"head.attention.out_proj": "attn_pool.proj", "head.mlp": "attn_pool.mlp"}
    names |= {"encoder.layers": "blocks", "layer_norm": "norm", "self_attn.out_proj": "attn.proj"}
    tensors = {"pos_embed": state.pop("embeddings.position_embedding.weight")[None]}
    tensors["attn_pool.latent"] = state.pop("head.probe")
    for part in ("weight", "bias"):
        q, k, v = state.pop(f"head.attention.in_proj_{part}").chunk(3)
        tensors |= {f"attn_pool.q.{part}": q, f"attn_pool.kv.{part}": torch.cat([k, v])}
        for i in range(TOWER["layers"]):
            qkv = [state.pop(f"encoder.layers.{i}.self_attn.{x}_proj.{part}") for x in "qkv"]
            tensors[f"blocks.{i}.attn.qkv.{part}"] = torch.cat(qkv)
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    language = on_disk("deepseek", {name: x.detach() for name, x in reference.language.state_dict().items()}, False)
    return (
        {f"vision.{name}": x for name, x in tensors.items()}
        | {f"projector.layers.{name}": x for name, x in reference.projector.state_dict().items()}
        | {f"language.{name}": x for name, x in language.items()}
        | {name: getattr(reference, name).detach() for name in ("image_newline", "view_seperator")}
    )


def write(reference: Reference, text: dict, folder: Path, **more) -> None:
    about = {
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": RESOLUTIONS,
        "vision_config": TOWER | {"model_type": "vision", "model_name": "siglip_so400m_patch14_384"},
        "projector_config": {"input_dim": TOWER["width"], "n_embed": text["hidden_size"], "mlp_ratio": 2},
        "language_config": text,
        "tile_tag": "2D",
        "global_view_pos": "head",
        "image_token_id": TOKEN,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about | more))
    save_file(
        {name: x.contiguous() for name, x in list_published_tensors(reference).items()}, folder / "model.safetensors"
    )


def make(size: str, spread: float = 0.1) -> tuple[Reference, dict]:
    language, text = LANGUAGE_MODELS[size]()
    return randomize(Reference(language).eval(), spread=spread), text


@pytest.mark.parametrize("size", LANGUAGE_MODELS)
def test_matches_the_published_computation(size, tmp_path):
    """Values and gradients with no, one, two and three pictures; with three, each has one tile."""
    reference, text = make(size)
    write(reference, text, tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = [], []
    for sizes in SAMPLES:
        images = ours.prepare_images(pictures(*sizes)) if sizes else None
        parts = [text_part([1, 5])]
        for layout in () if images is None else images.layouts:
            parts += [*ours.config.make_parts(layout), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3, 2])], ours.config.rules))
        shown.append(images)
    assert [[len(layout.views) for layout in images.layouts] for images in shown[1:]] == [[4], [3, 5], [2, 2, 2]]
    logits = compute_logits(ours, samples, shown)
    expected = [reference(one.ids, is_image(one), images) for one, images in zip(samples, shown, strict=True)]
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    write(reference, text, tmp_path / "gradients")
    wanted = dict(from_hf(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= GRADIENTS * wanted[name].abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("size", LANGUAGE_MODELS)
def test_round_trip(size, tmp_path):
    reference, text = make(size)
    write(reference, text, tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert about["model_type"] == "deepseek_vl_v2" and about["candidate_resolutions"] == RESOLUTIONS
    kept = {key: about["language_config"][key] for key in text}
    assert kept == text
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


def test_released_sizes():
    """The parameters of the released models, to the digits of their model cards, from what their configs state."""
    vision = {"width": 1152, "layers": 27, "mlp_ratio": 3.7362, "patch_size": 14}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
    common = {"max_position_embeddings": 4096, "topk_method": "greedy", "q_lora_rank": None}
    models = {
        3.37: {"hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10}
        | {"num_key_value_heads": 10, "vocab_size": 129_280, "moe_intermediate_size": 896, "use_mla": False},
        16.1: {"hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"vocab_size": 102_400, "moe_intermediate_size": 1408},
        27.5: {"hidden_size": 2560, "intermediate_size": 12_288, "vocab_size": 129_280, "moe_intermediate_size": 1536}
        | {"n_routed_experts": 72, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.0},
    }
    for billions, text in models.items():
        hf_config = {"vision_config": vision, "projector_config": {"n_embed": text["hidden_size"]}}
        config = FAMILIES["deepseek_vl_v2"].from_hf_config(hf_config | {"language_config": common | experts | text})
        assert FAMILIES["deepseek_vl_v2"].supports(config)
        with torch.device("meta"):
            model = FAMILIES["deepseek_vl_v2"].model_class(config)
        assert float(f"{sum(p.numel() for p in model.parameters()) / 1e9:.3g}") == billions


# ---- tiles and prompts --------------------------------------------------------------------------------------------


def choose_resolution(width: int, height: int, resolutions: list[list[int]]) -> tuple[int, int]:
    """The published rule: the most useful pixels, then the fewest others, then the first."""
    found, most, least = (0, 0), 0, math.inf
    for w, h in resolutions:
        scale = min(w / width, h / height)
        useful = min(int(width * scale) * int(height * scale), width * height)
        if useful > most or (useful == most and w * h - useful < least):
            found, most, least = (w, h), useful, w * h - useful
    return found


@pytest.mark.parametrize(
    "size", [(384, 384), (768, 700), (100, 900), (900, 41), (1, 700), (500, 500), (383, 770), (7, 5)]
)
def test_views_are_those_of_the_published_processor(size):
    """Pixels of the views of PIL's pad and crop, and numbers of tokens."""
    policy, (image,) = PaddedTilesPolicy(), pictures(size)
    resolutions = [[columns * 384, rows * 384] for rows, columns in policy.grids]
    layout, views = policy.layout(*size), policy.apply(image)
    width, height = choose_resolution(size[1], size[0], resolutions)
    local = ImageOps.pad(image, (width, height), color=(127, 127, 127))
    boxes = [(x, y, x + 384, y + 384) for y in range(0, height, 384) for x in range(0, width, 384)]
    expected = [ImageOps.pad(image, (384, 384), color=(127, 127, 127)), *(local.crop(box) for box in boxes)]
    assert len(views) == len(expected)
    for ours, theirs in zip(views, expected, strict=True):
        assert np.array_equal(np.array(ours), np.array(theirs))
    assert layout.num_tokens == 14 * 15 + 1 + (height // 384 * 14) * (width // 384 * 14 + 1)
    assert [len(policy.for_images(count).layout(*size).views) for count in (2, 3)] == [len(views), 2]


SPECIALS = ["<image>", "<|User|>", "<|Assistant|>", "<｜▁pad▁｜>"]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def write_chat_checkpoint(size: str, folder: Path) -> Tokenizer:
    """Write a checkpoint whose image token is that of the tokenizer's files."""
    words = Tokenizer.train(["What is this? A red cube."] * 3, 400, special_tokens=SPECIALS, bos=BOS, eos=EOS)
    language, text = LANGUAGE_MODELS[size]()
    language.resize_token_embeddings(words.vocab_size)
    text = text | {"vocab_size": words.vocab_size, "eos_token_id": words.eos_token_id}
    reference = randomize(Reference(language).eval(), spread=0.3)
    write(reference, text, folder, image_token_id=None)
    processor = {
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.5, 0.5, 0.25],
        "processor_class": "DeepseekVLV2Processor",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor | {"candidate_resolutions": RESOLUTIONS}))
    words.save(folder)
    return words


@pytest.mark.parametrize("size", LANGUAGE_MODELS)
def test_answers_learns_and_exports(size, tmp_path, capsys):
    words = write_chat_checkpoint(size, tmp_path / "released")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8))
    picture.save(tmp_path / "photo.png")
    ask_questions(
        str(tmp_path / "photo.png"), "What?", model=str(tmp_path / "released"), max_new_tokens=4, device="cpu"
    )
    pipeline = vitrail.load(tmp_path / "released", device="cpu")
    assert pipeline.ask(picture, "What?", max_new_tokens=4) in capsys.readouterr().out
    assert pipeline.model.config.mean == (0.4, 0.5, 0.6)
    prompt = pipeline.build_prompt([pipeline.build_message(picture, "What is this?")])
    text = words.decode(prompt.stream.ids.tolist())
    assert text == f"{BOS}<|User|>: {'<image>' * (4 * 5 + 1 + 8 * 9)}\nWhat is this?\n\n<|Assistant|>:"
    many = pipeline.build_prompt([pipeline.build_message([picture] * 3, "What?")])
    assert [len(layout.views) for layout in many.images.layouts] == [2] * 3
    train_one_step(pipeline, tmp_path)
    to_hf(pipeline.model.eval(), tmp_path / "export", tokenizer=words)
    again = vitrail.load(tmp_path / "export", device="cpu")
    assert normalize_llava_config(again.model.config) == normalize_llava_config(pipeline.model.config)
    assert again.ask(picture, "What?", max_new_tokens=4) == pipeline.ask(picture, "What?", max_new_tokens=4)
    processor = json.loads((tmp_path / "export/processor_config.json").read_text())
    assert processor["candidate_resolutions"] == RESOLUTIONS and processor["image_token"] == "<image>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DeepseekOCRForCausalLM"]}, "DeepseekOCRForCausalLM"),
        ({"tile_tag": "1D"}, "tile_tag is '1D'"),
        ({"global_view_pos": "tail"}, "global_view_pos is 'tail'"),
        ({"candidate_resolutions": [[40, 37]]}, "multiples of 37"),
        ({"candidate_resolutions": "all"}, "candidate_resolutions is 'all'"),
        ({"vision_config": TOWER | {"width": {"sam_vit_b": {}}}}, "vision_config.width is"),
        ({"vision_config": TOWER | {"class_token": True}}, "class_token is True"),
        ({"projector_config": {"projector_type": "linear"}}, "projector_type is 'linear'"),
        ({"projector_config": {"input_dim": 24, "n_embed": 7}}, "n_embed is 7"),
        ({"projector_config": {"token_pooling": True}}, "token_pooling"),
        ({"language_config": {"model_type": "qwen2"}}, "language_config.model_type is 'qwen2'"),
        ({"language_config": SIZES | EXPERTS | {"topk_method": "random"}}, "topk_method 'random'"),
        ({"language_config": SIZES | EXPERTS | {"norm_topk_prob": True}}, "norm_topk_prob is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    reference, text = make("small")
    write(reference, text, tmp_path, **change)
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)
