"""Molmo 1 matches the published computation: transformers' CLIP, adapter of Molmo 2, Qwen2 and OLMo 2."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.molmo2.configuration_molmo2 import Molmo2AdapterConfig
from transformers.models.molmo2.image_processing_molmo2 import arange_for_pooling, compute_crop_geometry
from transformers.models.molmo2.modeling_molmo2 import Molmo2Adapter

import vitrail
from helpers import randomize, relative
from hub.test_llava import pictures
from hub.vlm_parity import GRADIENTS, VALUES, build_samples
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.models.vision_inputs import VisionInputs
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.overlapping_tiles import OverlapPolicy, find_padding
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import pack_streams, split_by_sample

VOCAB, EXTRA, WIDTH, TOWER_WIDTH, BLOCKS, SIDE, PATCH, MAX_TILES, MARGINS = 90, 128, 48, 24, 9, 40, 5, 4, (2, 2)
TEXT = {"hidden_size": WIDTH, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
TOWER = {"hidden_size": TOWER_WIDTH, "intermediate_size": 33, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
ADAPTER = {"hidden_size": TOWER_WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
ADAPTER |= {"intermediate_size": 35, "text_hidden_size": WIDTH, "vision_feature_layer": [-2, -9]}
LANGUAGE_MODELS = {
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**TEXT, rope_theta=5e3)),
    "olmo2": lambda: T.Olmo2ForCausalLM(T.Olmo2Config(**TEXT, rope_theta=5e3)),
}


def measure_padding(height: int, width: int) -> Tensor:
    """Share of image pixels in each patch: for each tile (N,), one tile too early, and −1 for the last (V, N)."""
    rows, columns, *canvas = compute_crop_geometry(height, width, MAX_TILES, list(MARGINS), SIDE, PATCH)
    scale = min(np.float32(canvas[0]) / np.float32(height), np.float32(canvas[1]) / np.float32(width))
    tall, wide = int(np.float32(height) * scale), int(np.float32(width) * scale)
    mask = np.zeros(canvas, dtype=np.float32)
    top, left = (canvas[0] - tall) // 2, (canvas[1] - wide) // 2
    mask[top : top + tall, left : left + wide] = 1
    step = SIDE - sum(MARGINS) * PATCH
    tiles = torch.tensor(mask).unfold(0, SIDE, step).unfold(1, SIDE, step).flatten(0, 1)  # (tiles, S, S)
    assert len(tiles) == rows * columns
    shares = F.avg_pool2d(tiles[:, None], PATCH).flatten(1)
    return torch.cat([shares, torch.full_like(shares[:1], -1)])


def number_patches(height: int, width: int) -> list[Tensor]:
    """Numbers of the patches behind each token, (M, 4): of the whole image, and of the tiles without overlap."""
    rows, columns, *canvas = compute_crop_geometry(height, width, MAX_TILES, list(MARGINS), SIDE, PATCH)
    side, (before, after) = SIDE // PATCH, MARGINS
    numbers = torch.arange(rows * columns * side**2).view(rows, columns, side, side) + side**2
    tiles = [
        [
            numbers[r, c][before * (r > 0) : side - after * (r < rows - 1), before * (c > 0) :][
                :, : side - before * (c > 0) - after * (c < columns - 1)
            ]
            for c in range(columns)
        ]
        for r in range(rows)
    ]
    mosaic = torch.cat([torch.cat(row, 1) for row in tiles])
    assert mosaic.shape == (canvas[0] // PATCH, canvas[1] // PATCH)
    return [arange_for_pooling(grid, 2, 2)[0] for grid in (torch.arange(side**2).view(side, side), mosaic)]


class Reference(nn.Module):
    """The published computation, image by image."""

    def __init__(self, kind: str):
        super().__init__()
        self.tower = T.CLIPVisionModel(T.CLIPVisionConfig(**TOWER))
        self.pad_embed = nn.Parameter(torch.zeros(2, 2 * TOWER_WIDTH))
        self.adapter = Molmo2Adapter(Molmo2AdapterConfig(**ADAPTER))
        self.llm = LANGUAGE_MODELS[kind]()
        self.llm.set_input_embeddings(nn.Embedding(VOCAB + EXTRA, WIDTH))

    def encode_image(self, pixels: Tensor, height: int, width: int) -> Tensor:
        states = self.tower(pixels, output_hidden_states=True).hidden_states
        features = torch.cat([states[-2], states[-9]], dim=-1)[:, 1:]  # without CLS
        shares = measure_padding(height, width)[..., None]
        features = features + self.pad_embed[0] * (shares == 0) + self.pad_embed[1] * ((shares < 1) & (shares != 0))
        return self.adapter(features, torch.cat(number_patches(height, width))).last_hidden_state

    def forward(self, ids: Tensor, mask: Tensor, images: VisionInputs | None) -> Tensor:
        embeds = self.llm.get_input_embeddings()(ids)
        if images is not None:
            views = images.pixels.split([len(layout.views) for layout in images.layouts])
            tokens = [self.encode_image(x, y.height, y.width) for x, y in zip(views, images.layouts, strict=True)]
            embeds = embeds + torch.zeros_like(embeds).masked_scatter(mask[:, None], torch.cat(tokens))
        return self.llm(inputs_embeds=embeds[None]).logits[0]


def list_tensors(reference: Reference) -> dict[str, Tensor]:
    """The tensors with their published names."""
    clip, adapter, llm = (dict(part.state_dict()) for part in (reference.tower, reference.adapter, reference.llm))
    vision, pool, mlp = "model.vision_backbone.", "image_pooling_2d.", "image_projector."
    embed = llm["model.embed_tokens.weight"]
    made = {
        f"{vision}pad_embed": reference.pad_embed,
        f"{vision}image_vit.class_embedding": clip["embeddings.class_embedding"],
        f"{vision}image_vit.positional_embedding": clip["embeddings.position_embedding.weight"],
        f"{vision}image_vit.patch_embedding.weight": clip["embeddings.patch_embedding.weight"]
        .movedim(1, -1)
        .flatten(1),
        f"{vision}{mlp}w1.weight": adapter[f"{mlp}gate_proj.weight"],
        f"{vision}{mlp}w2.weight": adapter[f"{mlp}down_proj.weight"],
        f"{vision}{mlp}w3.weight": adapter[f"{mlp}up_proj.weight"],
        "model.transformer.wte.embedding": embed[:VOCAB],
        "model.transformer.wte.new_embedding": embed[VOCAB:],
        "model.transformer.ln_f.weight": llm["model.norm.weight"],
        "model.transformer.ff_out.weight": llm["lm_head.weight"],
    }
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "out_proj": "wo"}
    block = {f"self_attn.{old}": f"attention.{new}" for old, new in names.items()}
    block |= {"layer_norm1": "attention_norm", "layer_norm2": "ffn_norm"}
    block |= {"mlp.fc1": "feed_forward.w1", "mlp.fc2": "feed_forward.w2"}
    for part in ("weight", "bias"):
        made[f"{vision}image_vit.pre_ln.{part}"] = clip[f"pre_layrnorm.{part}"]
        for old, new in names.items():
            made[f"{vision}{pool}{new}.{part}"] = adapter[f"{pool}{old.replace('out', 'o')}.{part}"]
        for i in range(BLOCKS):
            for old, new in block.items():
                name = f"{vision}image_vit.transformer.resblocks.{i}.{new}.{part}"
                made[name] = clip[f"encoder.layers.{i}.{old}.{part}"]
    for i in range(TEXT["num_hidden_layers"]):
        own = {name.split(".", 3)[3]: x for name, x in llm.items() if name.startswith(f"model.layers.{i}.")}
        to = f"model.transformer.blocks.{i}."
        norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        first, second = norms if norms[1] + ".weight" in own else ("input_layernorm", norms[0])
        made[f"{to}attn_norm.weight"], made[f"{to}ff_norm.weight"] = own[f"{first}.weight"], own[f"{second}.weight"]
        made[f"{to}attn_out.weight"] = own["self_attn.o_proj.weight"]
        made[f"{to}ff_proj.weight"] = torch.cat([own["mlp.up_proj.weight"], own["mlp.gate_proj.weight"]])
        made[f"{to}ff_out.weight"] = own["mlp.down_proj.weight"]
        for part in ("weight", "bias"):
            if f"self_attn.q_proj.{part}" in own:
                made[f"{to}att_proj.{part}"] = torch.cat([own[f"self_attn.{x}_proj.{part}"] for x in "qkv"])
        for norm in ("q_norm", "k_norm"):
            if f"self_attn.{norm}.weight" in own:
                made[f"{to}{norm}.weight"] = own[f"self_attn.{norm}.weight"]
    return made


def write(reference: Reference, folder: Path, kind: str, **more) -> None:
    json_config = {
        "architectures": ["MolmoForCausalLM"],
        "model_type": "molmo",
        **{key: TEXT[key] for key in TEXT if key not in ("rms_norm_eps", "intermediate_size")},
        "intermediate_size": 2 * TEXT["intermediate_size"],
        "embedding_size": VOCAB,
        "layer_norm_eps": TEXT["rms_norm_eps"],
        "rope_theta": 5e3,
        "qkv_bias": kind == "qwen2",
        "attention_layer_norm": kind == "olmo2",
        "norm_after": kind == "olmo2",
        "vision_backbone": {
            "image_default_input_size": [SIDE, SIDE],
            "image_patch_size": PATCH,
            "image_emb_dim": TOWER_WIDTH,
            "image_num_heads": 2,
            "image_num_layers": BLOCKS,
            "image_mlp_dim": 33,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json_config | more))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"max_crops": MAX_TILES, "overlap_margins": list(MARGINS)})
    )
    tensors = {name: x.detach().contiguous() for name, x in list_tensors(reference).items()}
    save_file(tensors, folder / "model.safetensors")


def make(kind: str) -> Reference:
    return randomize(Reference(kind).eval(), spread=0.2)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_matches_the_published_computation(kind, tmp_path):
    reference = make(kind)
    write(reference, tmp_path / "hf", kind)
    ours = from_hf(tmp_path / "hf").eval()
    samples, inputs = build_samples(ours)
    assert max(len(layout.views) for images in inputs if images for layout in images.layouts) == 1 + MAX_TILES
    present = [images for images in inputs if images is not None]
    pixels, layouts = torch.cat([one.pixels for one in present]), tuple(x for one in present for x in one.layouts)
    batch = pack_streams(samples, sum(map(len, samples)))
    logits = split_by_sample(batch, ours(batch, VisionInputs(pixels, layouts)))
    expected = [reference(one.ids, one.source >= 0, images) for one, images in zip(samples, inputs, strict=True)]
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    write(reference, tmp_path / "gradients", kind)
    wanted = dict(from_hf(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= GRADIENTS * wanted[name].abs().max().clamp_min(1e-2), name
    for name in ("padding_embedding", "decoder.embed.weight"):
        assert wanted[name].abs().amax(-1)[[0, 1] if name[0] == "p" else [VOCAB + 2, VOCAB + 3]].min() > 0


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_round_trip(kind, tmp_path):
    write(make(kind), tmp_path / "hf", kind)
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back/config.json").read_text())["architectures"] == ["MolmoForCausalLM"]
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


# ---- tiles and prompts -------------------------------------------------------------------------------------------

POLICY = OverlapPolicy(tile_size=SIDE, patch_size=PATCH, max_tiles=MAX_TILES, margins=MARGINS)
SIZES = [(40, 90), (33, 31), (64, 20), (100, 7), (20, 21), (300, 200), (20, 200), (60, 60), (5, 5)]


def resize_exactly(image: Image.Image, canvas: tuple[int, int]) -> Tensor:
    """Resize in float32 to fit into a canvas and pad with black, as the published processor: (3, H, W) in 0…255."""
    pixels = torch.tensor(np.array(image)).movedim(-1, 0)[None].float()
    scale = min(np.float32(canvas[0]) / np.float32(image.height), np.float32(canvas[1]) / np.float32(image.width))
    size = int(np.float32(image.height) * scale), int(np.float32(image.width) * scale)
    top, left = (canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2
    resized = F.interpolate(pixels, size, mode="bilinear", antialias=True)[0]
    return F.pad(resized, (left, canvas[1] - size[1] - left, top, canvas[0] - size[0] - top))


@pytest.mark.parametrize("size", SIZES)
def test_tiles_match_the_published_processor(size):
    """Resized pixels differ by the rounding to 8 bits of both passes only."""
    [image] = pictures(size)
    views, layout = POLICY.apply(image), POLICY.layout(*size)
    rows, columns, *canvas = compute_crop_geometry(*size, MAX_TILES, list(MARGINS), SIDE, PATCH)
    assert layout.spans[1].view_grid == (rows, columns)
    assert layout.spans[1].size == (canvas[0] // PATCH // 2, canvas[1] // PATCH // 2)
    step = SIDE - sum(MARGINS) * PATCH
    tiles = resize_exactly(image, tuple(canvas)).unfold(1, SIDE, step).unfold(2, SIDE, step)  # (3, r, c, S, S)
    expected = torch.cat([resize_exactly(image, (SIDE, SIDE))[None], tiles.movedim(0, 2).flatten(0, 1)])
    ours = torch.stack([torch.tensor(np.array(view)).movedim(-1, 0) for view in views]).float()
    assert ours.shape == expected.shape and (ours - expected).abs().max() <= 1.01


@pytest.mark.parametrize("size", SIZES)
def test_padding_of_patches(size):
    shares, kinds = measure_padding(*size), torch.tensor(find_padding(POLICY.layout(*size), PATCH))
    assert kinds.tolist() == torch.where(shares == 0, 1, torch.where(shares < 1, 2, 0)).tolist()


def test_released_tiles_and_token_counts():
    """Facts of the released processor: 12 tiles, margins of four patches, columns after every row."""
    layout = OverlapPolicy().layout(480, 640)
    assert [span.size for span in layout.spans] == [(12, 12), (20, 28)] and len(layout.views) == 7
    assert layout.num_tokens == 12 * 13 + 20 * 29


@pytest.mark.parametrize("change", [{"margins": (3, 2)}, {"margins": (4, 4)}, {"max_tiles": 0}, {"tile_size": 41}])
def test_invalid_policies_raise(change):
    with pytest.raises(VitrailError):
        POLICY.replace(**change)


SPECIALS = ["<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>"]


@pytest.fixture
def folder(tmp_path) -> Path:
    words = Tokenizer.train(["User: What is this? Assistant: a cube"] * 3, 300, eos="<|endoftext|>")
    words.add_special_tokens(SPECIALS)
    reference = make("qwen2")
    rows = words.vocab_size - EXTRA + 3  # the special tokens are among the extra embeddings
    reference.llm.lm_head = nn.Linear(WIDTH, rows, bias=False)
    embed = randomize(nn.Embedding(rows + EXTRA, WIDTH), 1)
    reference.llm.set_input_embeddings(embed)
    write(reference, tmp_path, "qwen2", vocab_size=rows, embedding_size=rows)
    tensors = list_tensors(reference)
    tensors |= {"model.transformer.wte.embedding": embed.weight[:rows]}
    tensors |= {"model.transformer.wte.new_embedding": embed.weight[rows:]}
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    words.chat_template = "{{ messages[0].content }}"  # of the language model alone
    words.save(tmp_path)
    return tmp_path


def write_image(layout: ImageLayout) -> str:
    return "".join(
        f"<im_start>{('<im_patch>' * columns + '<im_col>') * rows}<im_end>"
        for rows, columns in (span.size for span in layout.spans)
    )


def test_prompt_and_answer(folder):
    """The text starts with the end token and all images, as the published processor writes it."""
    pipeline = vitrail.load(folder, device="cpu")
    images = [Image.new("RGB", (90, 40)), Image.new("RGB", (20, 30))]
    prompt = pipeline.build_prompt([pipeline.build_message(images, "What is this?")])
    text = pipeline.tokenizer.decode(prompt.stream.ids.tolist())
    image_text = "".join(write_image(pipeline.model.config.policy.layout(x.height, x.width)) for x in images)
    assert text == f"<|endoftext|>{image_text} User: What is this? Assistant:"
    assert isinstance(pipeline.ask(images, "What is this?", max_new_tokens=3), str)
    assert pipeline.stop_ids == (pipeline.tokenizer.token_to_id("<|endoftext|>"),)
    config = pipeline.model.config
    assert config.rules.fill_id == pipeline.tokenizer.token_to_id("<im_patch>") >= config.decoder.vocab_size


def test_conversations_are_trained_on_as_published(folder):
    pipeline = vitrail.load(folder, device="cpu")
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "a cube"},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "this"},
    ]
    text, spans = pipeline.chat_template.render_spans(messages)
    end = "<|endoftext|>"
    assert text == f"{end}<im_patch> User: What is this? Assistant: a cube{end} User: What? Assistant: this{end}"
    assert [text[slice(*span)] for span in spans] == [f" a cube{end}", f" this{end}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_type": "default"}, "layer_norm_type is 'default'"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"weight_tying": True}, "weight_tying"),
        ({"moe_num_experts": 64}, "MolmoE"),
        ({"vision_backbone": {"image_mlp_activations": "mish"}}, "mish"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    write(make("qwen2"), tmp_path, "qwen2", **change)
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_rows_of_one_shape_raise(tmp_path):
    kind = next(iter(LANGUAGE_MODELS))
    write(make(kind), tmp_path, kind)
    with pytest.raises(VitrailError, match="do not support newline tokens"):
        from_hf(tmp_path).make_row_template([3], 5, image_shape=(SIDE, 2 * SIDE))


def test_processor_of_another_tower_raises(tmp_path):
    write(make("qwen2"), tmp_path, "qwen2")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"base_image_input_size": [336, 336]}))
    with pytest.raises(VitrailError, match="base_image_input_size"):
        from_hf(tmp_path)
