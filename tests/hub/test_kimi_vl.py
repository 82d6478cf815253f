"""Kimi-K2.5 matches transformers, and Kimi-VL, which it lacks, the same model without videos and with other names."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from helpers import randomize, relative
from hub.test_decoder_families import on_disk
from hub.test_llava import pictures
from hub.test_released_vlms import train_one_step
from hub.vlm_parity import GRADIENTS, VALUES, build_samples, compute_logits, is_image
from vitrail import hub
from vitrail.cli.ask_command import ask_questions
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.models.video_inputs import Video
from vitrail.models.vision_inputs import VisionInputs
from vitrail.processing.resolution_policies import PatchLimitPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams

PATCH, TOKEN = 5, 90
TEXT = {
    "vocab_size": 99,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rms_norm_eps": 1e-5,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
    "merge_kernel_size": [2, 2],
}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 16}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
CASES = {
    "plain": {},
    "queries without a latent, YaRN": {"text": {"q_lora_rank": None, "rope_parameters": YARN}},
    "blocks of 3 × 3": {"vision": {"merge_kernel_size": [3, 3], "pos_emb_height": 5, "pos_emb_width": 5}},
    "groups of experts": {"text": {"n_group": 3, "topk_group": 2}},
}
NAMES = {  # of the projector, by model type
    "kimi_k25": {
        "pre_norm": "mm_projector.pre_norm",
        "in_proj": "mm_projector.proj.0",
        "out_proj": "mm_projector.proj.2",
    },
    "kimi_vl": {
        "pre_norm": "multi_modal_projector.pre_norm",
        "in_proj": "multi_modal_projector.linear_1",
        "out_proj": "multi_modal_projector.linear_2",
    },
}


def make(case: str = "plain", vocab_size: int = TEXT["vocab_size"], spread: float = 0.1):
    settings = CASES[case]
    text = TEXT | settings.get("text", {}) | {"vocab_size": vocab_size, "model_type": "deepseek_v3"}
    vision = TOWER | settings.get("vision", {})
    config = T.Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=TOWER["hidden_size"],
        image_token_id=TOKEN,
        tie_word_embeddings=False,
        experts_implementation="eager",
    )
    config.text_config._experts_implementation = "eager"
    model = randomize(T.Kimi_K25ForConditionalGeneration(config).eval(), spread=spread)
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):
            bias.copy_(torch.linspace(-0.3, 0.3, len(bias)))
    return model


def pair_channels(rows: Tensor, heads: int) -> Tensor:
    """Move the channels of queries or keys from halves of a head, as transformers rotates them, to adjacent pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def list_released_tensors(model, kind: str) -> dict[str, Tensor]:
    """Return the tensors with the names of the released files."""
    state = on_disk("deepseek", {name: x.detach() for name, x in model.state_dict().items()}, False)
    heads, tower, found = TOWER["num_attention_heads"], "model.vision_tower.", {}
    for i in range(TOWER["num_hidden_layers"]):
        for part in ("weight", "bias"):
            q, k, v = (state.pop(f"{tower}layers.{i}.attn.{x}_proj.{part}") for x in "qkv")
            qkv = torch.cat([pair_channels(q, heads), pair_channels(k, heads), v])
            found[f"vision_tower.encoder.blocks.{i}.wqkv.{part}"] = qkv
    names = {f"model.mm_projector.{name}": new for name, new in NAMES[kind].items()}
    names |= {f"{tower}patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight"}
    names |= {f"{tower}layers": "vision_tower.encoder.blocks", f"{tower}final": "vision_tower.encoder.final"}
    names |= {
        tower: "vision_tower.",
        "model.language_model": "language_model.model",
        "lm_head": "language_model.lm_head",
    }
    for name, tensor in state.items():
        old = next(old for old in names if name.startswith(old))
        name = names[old] + name.removeprefix(old)
        if name.startswith("vision_tower.encoder"):  # counted from zero
            for a, b in {"norm1": "norm0", "norm2": "norm1", "fc1": "fc0", "fc2": "fc1", "attn.proj": "wo"}.items():
                if f".{a}." in name:
                    name = name.replace(f".{a}.", f".{b}.")
                    break
        found[name] = tensor
    return found


def write(model, folder: Path, kind: str = "kimi_k25", **more) -> None:
    """Write the model with the keys and names of the released files."""
    config = model.config
    text = {key: value for key, value in config.text_config.to_dict().items() if key not in ("head_dim", "qk_head_dim")}
    vision = {key: getattr(config.vision_config, key) for key in TOWER}
    if kind == "kimi_k25":
        vision = {("init_" if "pos_emb" in key else "vt_") * (key in VT) + key: value for key, value in vision.items()}
        vision |= {"mm_hidden_size": TOWER["hidden_size"], "projector_ln_eps": 1e-5, "projector_hidden_act": "gelu"}
        text |= {"model_type": "kimi_k2"}
    else:
        vision = {("init_" if "pos_emb" in key else "") + key: value for key, value in vision.items()}
        vision |= {"model_type": "moonvit"}
    about = {"model_type": kind, "text_config": text, "vision_config": vision, "media_placeholder_token_id": TOKEN}
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": False} | more))
    tensors = {name: x.contiguous() for name, x in list_released_tensors(model, kind).items()}
    save_file(tensors, folder / "model.safetensors")


VT = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "pos_emb_height", "pos_emb_width")


def order_patches(images: VisionInputs) -> dict[str, Tensor]:
    """Return the patches row by row, with their grids."""
    patches, grids = [], []
    for one, grid in zip(images.pixels.split([g.num_patches for g in images.layouts]), images.layouts, strict=True):
        m = grid.merge_size
        blocks = one.view(grid.num_rows, grid.num_columns, m, m, 3, PATCH, PATCH)
        patches.append(blocks.transpose(1, 2).reshape(-1, 3, PATCH, PATCH))
        grids.append([1, grid.h, grid.w])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def run_reference(model, samples, shown) -> list[Tensor]:
    return [
        model(input_ids=one.ids[None], **({} if images is None else order_patches(images))).logits[0]
        for one, images in zip(samples, shown, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", NAMES)
def test_matches_transformers(case, kind, tmp_path):
    model = make(case)
    write(model, tmp_path / "hf", kind)
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    assert all(int(is_image(one).sum()) == int((one.ids == TOKEN).sum()) for one in samples)
    logits, expected = compute_logits(ours, samples, shown), run_reference(model, samples, shown)
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    write(model, tmp_path / "gradients", kind)
    wanted = dict(from_hf(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= GRADIENTS * wanted[name].abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("case", ["plain", "queries without a latent, YaRN"])
def test_round_trip(case, kind, tmp_path):
    """The export has the tensors of the file, bit by bit; transformers opens that of Kimi-K2.5."""
    model = make(case)
    write(model, tmp_path / "hf", kind)
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    about = json.loads((tmp_path / "back/config.json").read_text())
    assert about["model_type"] == kind
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config
    if kind == "kimi_k25":
        back = T.AutoModelForImageTextToText.from_pretrained(tmp_path / "back").eval()
        a, b = model.state_dict(), back.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.no_grad()
def test_cache_equals_no_cache(tmp_path):
    write(make(), tmp_path)
    ours = from_hf(tmp_path).eval()
    samples, shown = build_samples(ours)
    sample, images, rest = samples[2], shown[2], [4, 9, 11, 6]
    cache = ours.decoder.make_cache(1)
    hidden = ours.forward_hidden(pack_streams([sample], len(sample)), images, cache=cache)
    steps = [ours.decoder.compute_logits(hidden)[0]]
    steps += [ours.decoder(torch.tensor([[id]]), cache=cache)[0] for id in rest]
    expected = make()(input_ids=torch.cat([sample.ids, torch.tensor(rest)])[None], **order_patches(images)).logits[0]
    assert relative(torch.cat(steps), expected) <= VALUES


# ---- pictures and prompts -----------------------------------------------------------------------------------------


def resize_as_published(image: Image.Image, limit: int, side: int = 512, patch: int = 14) -> Image.Image:
    """Scale by whole patches, then fill up with black at the right and at the bottom."""
    width, height = image.size
    scale = math.sqrt(limit / (max(1, width // patch) * max(1, height // patch)))
    scale = min(1.0, scale, side * patch / width, side * patch / height)
    size = [min(max(1, int(n * scale)), side * patch) for n in (width, height)]
    canvas = Image.new("RGB", tuple(math.ceil(n / (2 * patch)) * 2 * patch for n in size))
    canvas.paste(image.resize(tuple(size), Image.Resampling.BICUBIC), (0, 0))
    return canvas


@pytest.mark.parametrize("size", [(28, 28), (1, 1), (13, 300), (560, 700), (701, 333), (2, 9000), (900, 29)])
def test_pictures_are_those_of_the_published_processor(size):
    policy, (image,) = PatchLimitPolicy(max_patches=900), pictures(size)
    (ours,), expected = policy.apply(image), resize_as_published(image, 900)
    assert np.array_equal(np.array(ours), np.array(expected))
    assert policy.layout(*size).num_tokens == expected.width * expected.height // 28**2


SPECIALS = [f"<|im_{role}|>" for role in ("system", "user", "assistant", "middle", "end")]
SPECIALS += [f"<|media_{name}|>" for name in ("start", "begin", "content", "pad", "end")]
PROMPTS = {
    "kimi_vl": "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|><|im_user|>user<|im_middle|>"
    "<|media_start|>image<|media_content|>{image}<|media_end|>What is this?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "kimi_k25": "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|>{image}<|media_end|>\n"
    "What is this?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
}
PROCESSORS = {
    "kimi_vl": {"in_token_limit": 60, "merge_kernel_size": [2, 2], "pad_input": True, "patch_size": PATCH},
    "kimi_k25": {
        "media_proc_cfg": {
            "in_patch_limit": 60,
            "patch_size": PATCH,
            "merge_kernel_size": 2,
            "patch_limit_on_one_side": 14,
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    },
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_answers_learns_and_exports(kind, tmp_path, capsys):
    words = Tokenizer.train(["What is this? A red cube. You are a helpful assistant"] * 3, 400, special_tokens=SPECIALS)
    folder, token = tmp_path / "released", words.token_to_id("<|media_pad|>")
    write(make(vocab_size=words.vocab_size, spread=0.3), folder, kind, media_placeholder_token_id=token)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": words.token_to_id("<|im_end|>")}))
    words.save(folder)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8))
    picture.save(tmp_path / "photo.png")
    ask_questions(str(tmp_path / "photo.png"), "What?", model=str(folder), max_new_tokens=4, device="cpu")
    pipeline = vitrail.load(folder, device="cpu")
    assert pipeline.ask(picture, "What?", max_new_tokens=4) in capsys.readouterr().out
    assert words.token_to_id("<|im_end|>") in pipeline.stop_ids
    policy = pipeline.model.config.policy
    assert (policy.max_patches, policy.max_side_patches) == (60, 14 if kind == "kimi_k25" else 512)
    prompt = pipeline.build_prompt([pipeline.build_message(picture, "What is this?")])
    count = policy.layout(50, 90).num_tokens
    assert words.decode(prompt.stream.ids.tolist()) == PROMPTS[kind].format(image="<|media_pad|>" * count)
    train_one_step(pipeline, tmp_path)
    to_hf(pipeline.model.eval(), tmp_path / "export", tokenizer=words)
    again = vitrail.load(tmp_path / "export", device="cpu")
    assert normalize_llava_config(again.model.config) == normalize_llava_config(pipeline.model.config)
    assert again.ask(picture, "What?", max_new_tokens=4) == pipeline.ask(picture, "What?", max_new_tokens=4)
    if kind == "kimi_k25":
        reference = T.AutoModelForImageTextToText.from_pretrained(tmp_path / "export", experts_implementation="eager")
        with torch.no_grad():
            (expected,) = run_reference(reference, [prompt.stream], [prompt.images])
            ours = pipeline.model(pack_streams([prompt.stream], len(prompt.stream)), prompt.images)[0]
        assert relative(ours, expected) <= VALUES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama'"),
        ({"vision_config": TOWER | {"pos_emb_width": 7}}, "pos_emb_width 7"),
        ({"vision_config": TOWER | {"merge_type": "mean"}}, "merge_type is 'mean'"),
        ({"vision_config": TOWER | {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"vision_config": TOWER | {"mm_hidden_size": 25}}, "projection_hidden_size is 25"),
        ({"vision_config": TOWER | {"merge_kernel_size": [1, 2]}}, "merge_kernel_size"),
        (
            {"text_config": TEXT | {"quantization_config": {"quant_method": "compressed-tensors"}}},
            "text_config.quantization_config has the quant_method 'compressed-tensors'",
        ),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    write(make(), tmp_path, **change)
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "processor", "message"),
    [
        ("kimi_vl", PROCESSORS["kimi_vl"] | {"pad_input": False}, "pad_input is False"),
        ("kimi_vl", PROCESSORS["kimi_vl"] | {"patch_size": 14}, "patch_size is 14"),
        ("kimi_k25", {"max_patches": 9, "merge_size": 3}, "merge_size is 3"),
        ("kimi_k25", {"size": {"max_height": 9, "max_width": 8}}, "max_height and max_width"),
    ],
)
def test_processor_that_contradicts_the_model_raises(kind, processor, message, tmp_path):
    write(make(), tmp_path, kind)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_videos_are_refused(tmp_path):
    words = Tokenizer.train(["What is this?"] * 3, 400, special_tokens=[*SPECIALS, "<|kimi_k25_video_placeholder|>"])
    write(make(vocab_size=words.vocab_size), tmp_path, media_placeholder_token_id=words.token_to_id("<|media_pad|>"))
    words.save(tmp_path)
    frames = [Image.new("RGB", (30, 30))] * 2
    video = {"type": "video", "video": Video(frames, timestamps=[0.0, 1.0])}
    with pytest.raises(VitrailError, match="takes images and no videos"):
        vitrail.load(tmp_path, device="cpu").build_prompt([{"role": "user", "content": [video]}])


def test_size_of_kimi_vl():
    """The parameters of Kimi-VL-A3B, to the digits of its model card, from what its config states."""
    text = {"vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 11_264, "moe_intermediate_size": 1408}
    text |= {"num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64}
    text |= {"q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    family = FAMILIES["kimi_vl"]
    config = family.from_hf_config({"text_config": text})
    with torch.device("meta"):
        model = family.model_class(config)
    assert float(f"{sum(p.numel() for p in model.parameters()) / 1e9:.3g}") == 16.4
    assert family.supports(config) and not FAMILIES["kimi_k25"].supports(config)
    assert hub.pretrained.find_family(type(model), config).name == "kimi_vl"
