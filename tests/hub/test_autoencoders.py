"""Codec checkpoints: native format, diffusers' AutoencoderKL and VQModel, and QLIP against its equations."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from helpers import randomize, relative
from vitrail.codecs.codec import Codec, CodecConfig, compute_codec_identity
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.codecs.quantizers import FSQConfig, KLConfig, VQConfig
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.qlip_checkpoint import QLIP, QLIP_TOWERS, load_contrastive_towers

diffusers = pytest.importorskip("diffusers")
AutoencoderKL = diffusers.AutoencoderKL  # the import takes seconds: here, not in the first test

NET = {"widths": (8, 16), "layers": 1, "norm_groups": 4, "image_size": (16, 16)}


# ---- our own format ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantizer", [VQConfig(codebook_size=30, dim=6), FSQConfig(levels=(8, 5, 5)), KLConfig(width=4)]
)
def test_save_and_load(tmp_path, quantizer):
    torch.manual_seed(1)
    codec = randomize(Codec(CodecConfig(net=ConvAutoencoderConfig(**NET), quantizer=quantizer))).eval()
    save(codec, tmp_path)
    again = load(tmp_path)
    assert compute_codec_identity(again) == compute_codec_identity(codec)
    pixels = torch.rand(1, 3, 8, 8)
    found, other = codec.encode(pixels), again.encode(pixels)
    assert torch.equal(found.codes, other.codes)
    assert found.ids is None or torch.equal(found.ids, other.ids)
    assert torch.equal(codec.decode(found.codes), again.decode(other.codes))


# ---- AutoencoderKL ----------------------------------------------------------------------------------------------


def autoencoder(**more) -> Codec:
    net = ConvAutoencoderConfig(**{**NET, "latent_channels": 3, **more.pop("net", {})})
    return randomize(Codec(CodecConfig(net=net, quantizer=KLConfig(width=3), scaling_factor=0.13025, **more))).eval()


def test_exchange_with_diffusers(tmp_path):
    codec = autoencoder(shift_factor=0.5)
    to_hf(codec, tmp_path / "ours")
    theirs = AutoencoderKL.from_pretrained(tmp_path / "ours").eval()
    assert (theirs.config.scaling_factor, theirs.config.shift_factor) == (0.13025, 0.5)
    pixels = torch.rand(1, 3, 8, 12) * 2 - 1
    with torch.no_grad():
        mean = theirs.encode(pixels).latent_dist.mean
        assert relative(codec.encode(pixels).codes.movedim(-1, 1), mean) < 1e-5
        assert relative(codec.decode(mean.movedim(1, -1)), theirs.decode(mean).sample) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    again = from_hf(tmp_path / "theirs")
    assert again.config == codec.config
    assert compute_codec_identity(again) == compute_codec_identity(codec)


def test_diffusers_shards_in_half_precision(tmp_path):
    codec = autoencoder()
    to_hf(codec, tmp_path / "one")
    theirs = AutoencoderKL.from_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("diffusion_pytorch_model-*.safetensors"))) > 1
    assert compute_codec_identity(load(tmp_path / "many")) == compute_codec_identity(codec)
    theirs.half().save_pretrained(tmp_path / "one", variant="fp16")  # beside the other, as on the hub
    assert compute_codec_identity(load(tmp_path / "one")) == compute_codec_identity(codec)


def test_legacy_attention_names(tmp_path):
    codec = autoencoder()
    to_hf(codec, tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = {}
    for name, tensor in load_file(file).items():
        for now, then in older.items():
            name = name.replace(f".{now}.", f".{then}.")
        tensors[name] = tensor
    assert any(".query." in name for name in tensors)
    save_file(tensors, file)
    assert compute_codec_identity(load(tmp_path)) == compute_codec_identity(codec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "relu"}, "relu"),
        ({"out_channels": 4}, "out_channels 4"),
        ({"latents_mean": [0.1]}, "latents_mean"),
        ({"down_block_types": ["DownBlock2D", "DownEncoderBlock2D"]}, "DownBlock2D"),
        ({"up_block_types": ["AttnUpDecoderBlock2D", "UpDecoderBlock2D"]}, "attention"),
        ({"block_out_channels": [8, 10**9]}, "block_out_channels"),
        ({"block_out_channels": []}, "block_out_channels"),
        ({"layers_per_block": 10**9}, "layers_per_block"),
        ({"layers_per_block": "two"}, "layers_per_block"),
        ({"latent_channels": 5}, "shape"),
        ({"norm_num_groups": 3}, "groups"),
        ({"sample_size": -1}, "size"),
        ({"layers_per_block": 3}, "no tensor"),
        ({"_class_name": "AsymmetricAutoencoderKL"}, "not supported"),
    ],
)
def test_unsupported_settings_raise(tmp_path, change, message):
    to_hf(autoencoder(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VitrailError, match=message):
        load(tmp_path)


def test_other_codec_is_not_exported(tmp_path):
    net = ConvAutoencoderConfig(**NET)
    for quantizer in (FSQConfig(levels=(8, 5)), VQConfig(codebook_size=8, dim=4, metric="cosine")):
        with pytest.raises(CheckpointError, match="no Hugging Face family"):
            to_hf(Codec(CodecConfig(net=net, quantizer=quantizer)), tmp_path)
    modulated = CodecConfig(
        net=net.replace(spatial_norm=True), quantizer=VQConfig(codebook_size=8, dim=4)
    )  # of 4 groups
    with pytest.raises(CheckpointError, match="no Hugging Face family"):
        to_hf(Codec(modulated), tmp_path)


# ---- VQModel ----------------------------------------------------------------------------------------------------

WIDE = {"widths": (32, 64), "layers": 1, "latent_channels": 5, "attention_levels": (1,), "image_size": (16, 16)}


def booked(learn="gradient", modulated=True) -> Codec:
    net = ConvAutoencoderConfig(**WIDE, spatial_norm=modulated)
    book = VQConfig(codebook_size=30, dim=5, codebook_update=learn, kmeans_iters=0)
    return randomize(Codec(CodecConfig(net=net, quantizer=book, scaling_factor=0.5))).eval()


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("learn", ["ema", "gradient"])
@torch.no_grad()
def test_codebook_exchange_with_diffusers(tmp_path, learn, modulated):
    codec = booked(learn, modulated)
    to_hf(codec, tmp_path / "ours")
    theirs = diffusers.VQModel.from_pretrained(tmp_path / "ours").eval()
    pixels = torch.rand(2, 3, 8, 12) * 2 - 1
    found, features = codec.encode(pixels), theirs.encode(pixels).latents
    assert torch.equal(found.ids.flatten(), theirs.quantize(features)[2][2])
    assert relative(codec.decode(found.codes), theirs.decode(features).sample) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    again = from_hf(tmp_path / "theirs")
    assert again.config.replace(quantizer=codec.config.quantizer) == codec.config
    assert torch.equal(again.quantizer.get_codebook(), codec.quantizer.get_codebook())
    assert torch.equal(again.reconstruct(pixels), codec.reconstruct(pixels))


def test_loaded_codebook_is_not_reinitialized(tmp_path):
    to_hf(booked(), tmp_path)
    codec = load(tmp_path).train()
    before = codec.quantizer.get_codebook().clone()
    assert bool(codec.quantizer.started) and (codec.quantizer.counts == 1).all()
    codec(torch.rand(1, 3, 8, 8) * 2 - 1)[0].square().sum().backward()
    assert torch.equal(codec.quantizer.get_codebook(), before)
    assert codec.decoder.norm.scale.weight.grad.abs().sum() > 0


def test_codebook_keeps_its_dtype(tmp_path):
    to_hf(booked(), tmp_path)
    theirs = diffusers.VQModel.from_pretrained(tmp_path).half()
    theirs.save_pretrained(tmp_path)
    codec = load(tmp_path)
    assert codec.quantizer.codebook.dtype == torch.float32 and codec.device.type == "cpu"
    assert torch.equal(codec.quantizer.get_codebook(), theirs.quantize.embedding.weight.float())
    codec = load(tmp_path, dtype=torch.float32)
    assert codec.reconstruct(torch.rand(1, 3, 8, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_num_groups": 8}, "32 groups"),
        ({"vq_embed_dim": 3}, "equal to latent_channels"),
        ({"norm_type": "layer"}, "norm_type"),
        ({"num_vq_embeddings": 0}, "num_vq_embeddings"),
        ({"num_vq_embeddings": 31}, "shape"),
        ({"norm_type": "group"}, "no tensor"),
    ],
)
def test_unsupported_codebooks_raise(tmp_path, change, message):
    to_hf(booked(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VitrailError, match=message):
        load(tmp_path)


# ---- QLIP: the published forward pass, on the names of the published file ---------------------------------------


def qlip_settings(seed: int) -> dict:
    """Unusual settings that the published classes accept."""
    draw = random.Random(seed)
    patch, side, channels = draw.choice([2, 3]), draw.choice([2, 3, 5]), 3

    def tower(**more) -> dict:
        heads = draw.choice([1, 2, 3])
        gated = draw.random() < 0.6
        return {
            "hidden_size": heads * draw.choice([4, 8]),
            "intermediate_size": draw.choice([10, 24]),
            "num_hidden_layers": draw.randint(1, 3),
            "num_attention_heads": heads,
            "num_channels": channels,
            "image_size": patch * side,
            "patch_size": patch,
            "hidden_act": draw.choice(["gelu", "quick_gelu"]),
            "layer_norm_eps": draw.choice([1e-5, 1e-6]),
            "k_bias": draw.random() < 0.5,
            "swiglu": gated,
            "subln": gated and draw.random() < 0.7,
            "rope": draw.random() < 0.7,
            **more,
        }

    decoder = tower()
    vision = tower(
        quantizer="bsq",
        quantizer_embed_type="mlp",
        quantizer_l2_norm=True,
        quantizer_cfg={"embed_dim": 12, "group_size": 3, "input_format": "blc"},
        hidden_size_post_q=decoder["hidden_size"],
    )
    text = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 6, "eos_token_id": 19, "hidden_act": "gelu"}
    return {
        "architectures": ["QLIPModel"],
        "model_type": "clip",
        "vision_config": vision,
        "decoder_config": decoder,
        "text_config": text,
        "projection_dim": 7,
        "vision_projection_bias": True,
        "text_projection_bias": False,
    }


def linear(name: str, out: int, into: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def blocks(about: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    W, H, found = about["hidden_size"], about["intermediate_size"], {}
    for i in range(about["num_hidden_layers"]):
        p = f"{prefix}encoder.layers.{i}."
        found |= {**norm(f"{p}layer_norm1", W), **norm(f"{p}layer_norm2", W)}
        for x in "qkv":
            found |= linear(f"{p}self_attn.{x}_proj", W, W, x != "k" or about.get("k_bias", True))
        found |= linear(f"{p}self_attn.out_proj", W, W)
        if about.get("swiglu"):
            found |= {**linear(f"{p}mlp.w1", H, W), **linear(f"{p}mlp.w2", H, W), **linear(f"{p}mlp.w3", W, H)}
        else:
            found |= {**linear(f"{p}mlp.fc1", H, W), **linear(f"{p}mlp.fc2", W, H)}
        if about.get("subln"):
            found |= {**norm(f"{p}self_attn.inner_attn_ln", W), **norm(f"{p}mlp.ffn_ln", H)}
    return found


def shapes(about: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a published file."""
    seen, drawn, words, E = (about[k] for k in ("vision_config", "decoder_config", "text_config", "projection_dim"))
    W, D, T, P = seen["hidden_size"], drawn["hidden_size"], words["hidden_size"], seen["patch_size"]
    N, bits = (seen["image_size"] // P) ** 2, seen["quantizer_cfg"]["embed_dim"]
    return {
        "vision_model.embeddings.class_embedding": (W,),
        "vision_model.embeddings.patch_embedding.weight": (W, 3, P, P),
        "vision_model.embeddings.patch_embedding.bias": (W,),
        "vision_model.embeddings.position_embedding.weight": (N + 1, W),
        **norm("vision_model.post_layernorm", W),
        **blocks(seen, "vision_model."),
        **linear("vision_model.quant_embed.c_fc", W, W),
        **linear("vision_model.quant_embed.c_proj", bits, W),
        **linear("vision_model.quant_embed_post.c_fc", D, bits),
        **linear("vision_model.quant_embed_post.c_proj", D, D),
        "vision_decoder.position_embeddings": (1, N, D),
        **blocks(drawn, "vision_decoder."),
        **norm("vision_decoder.norm", D),
        **linear("vision_decoder.ffn.0", drawn["intermediate_size"], D),
        **linear("vision_decoder.conv_out", 3 * P * P, drawn["intermediate_size"]),
        "text_model.embeddings.token_embedding.weight": (words["vocab_size"], T),
        "text_model.embeddings.position_embedding.weight": (words["max_position_embeddings"], T),
        **blocks(words, "text_model."),
        **norm("text_model.final_layer_norm", T),
        **linear("visual_projection", E, W),
        **linear("text_projection", E, T, bias=False),
        "logit_scale": (),
    }


class Published:
    """Reference forward pass from the equations, in float64, with published tensor names."""

    def __init__(self, about: dict, tensors: dict[str, torch.Tensor]):
        self.about, self.t = about, {name: tensor.double() for name, tensor in tensors.items()}

    def linear(self, x, name):
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, x, name, eps):
        return F.layer_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], eps)

    def turn(self, x, side):
        """x (B, heads, side², D): the first half of a head's channels by the row, the second by the column; neighbours
        make a pair; the picture spans 16 however many patches it has."""
        D = x.shape[-1]
        slow = 10_000 ** (-torch.arange(0, D // 2, 2).double() / (D // 2))
        place = torch.arange(side).double() / side * 16
        row, column = torch.meshgrid(place, place, indexing="ij")
        angle = torch.cat([row.reshape(-1, 1) * slow, column.reshape(-1, 1) * slow], 1)  # (N, D / 2)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], D // 2, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def blocks(self, x, about, prefix, side=None, lead=0, causal=False):
        B, L, W = x.shape
        heads, eps = about["num_attention_heads"], about.get("layer_norm_eps", 1e-5)
        for i in range(about["num_hidden_layers"]):
            p = f"{prefix}encoder.layers.{i}."
            y = self.norm(x, f"{p}layer_norm1", eps)
            q, k, v = (
                self.linear(y, f"{p}self_attn.{n}_proj").view(B, L, heads, W // heads).transpose(1, 2) for n in "qkv"
            )
            if about.get("rope"):
                q, k = (torch.cat([a[:, :, :lead], self.turn(a[:, :, lead:], side)], 2) for a in (q, k))
            scores = q @ k.transpose(-1, -2) / (W // heads) ** 0.5
            if causal:
                scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, L, W)
            if about.get("subln"):
                y = self.norm(y, f"{p}self_attn.inner_attn_ln", eps)
            x = x + self.linear(y, f"{p}self_attn.out_proj")
            y = self.norm(x, f"{p}layer_norm2", eps)
            if about.get("swiglu"):
                y = F.silu(self.linear(y, f"{p}mlp.w1")) * self.linear(y, f"{p}mlp.w2")
                y = self.norm(y, f"{p}mlp.ffn_ln", eps) if about.get("subln") else y
                x = x + self.linear(y, f"{p}mlp.w3")
            else:
                y = self.linear(y, f"{p}mlp.fc1")
                y = F.gelu(y) if about["hidden_act"] == "gelu" else y * torch.sigmoid(1.702 * y)
                x = x + self.linear(y, f"{p}mlp.fc2")
        return x

    def see(self, pixels):
        """Encode normalized pixels as quantizer inputs and image embedding."""
        about, v = self.about["vision_config"], "vision_model."
        e, P = f"{v}embeddings.", about["patch_size"]
        patches = F.conv2d(pixels, self.t[f"{e}patch_embedding.weight"], self.t[f"{e}patch_embedding.bias"], stride=P)
        cls = self.t[f"{e}class_embedding"].expand(len(pixels), 1, -1)
        x = torch.cat([cls, patches.flatten(2).transpose(1, 2)], 1) + self.t[f"{e}position_embedding.weight"]
        x = self.blocks(x, about, v, about["image_size"] // P, lead=1)
        pooled = self.norm(x[:, 0], f"{v}post_layernorm", about["layer_norm_eps"])
        h = self.linear(F.gelu(self.linear(x[:, 1:], f"{v}quant_embed.c_fc")), f"{v}quant_embed.c_proj")
        return F.normalize(h, dim=-1), self.linear(pooled, "visual_projection")

    def draw(self, signs):
        """Decode signs (B, N, bits) of ±1 to normalized pixels."""
        about, v, d = self.about["decoder_config"], "vision_model.", "vision_decoder."
        x = self.linear(signs / signs.shape[-1] ** 0.5, f"{v}quant_embed_post.c_fc")
        x = self.linear(F.gelu(x), f"{v}quant_embed_post.c_proj") + self.t[f"{d}position_embeddings"]
        P = about["patch_size"]
        side = about["image_size"] // P
        x = self.norm(self.blocks(x, about, d, side), f"{d}norm", about["layer_norm_eps"])
        x = self.linear(torch.tanh(self.linear(x, f"{d}ffn.0")), f"{d}conv_out")
        return F.fold(x.transpose(1, 2), (side * P, side * P), P, stride=P)

    def read(self, ids):
        about, t = self.about["text_config"], "text_model."
        x = self.t[f"{t}embeddings.token_embedding.weight"][ids]
        x = x + self.t[f"{t}embeddings.position_embedding.weight"][: ids.shape[1]]
        x = self.norm(self.blocks(x, about, t, causal=True), f"{t}final_layer_norm", 1e-5)
        ends = (ids == about["eos_token_id"]).int().argmax(1)
        return self.linear(x[torch.arange(len(ids)), ends], "text_projection")


def published(seed: int, folder) -> tuple[dict, dict[str, torch.Tensor]]:
    about = qlip_settings(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes(about).items()}
    rope = {"vision_model.rope.freqs_cos": torch.ones(4, 4), "vision_model.rope.freqs_sin": torch.zeros(4, 4)}
    folder.mkdir(exist_ok=True)
    save_file(tensors | (rope if about["vision_config"]["rope"] else {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))
    return about, tensors


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_qlip_matches_its_equations(tmp_path, seed):
    about, tensors = published(seed, tmp_path)
    reference, codec = Published(about, tensors), load(tmp_path).double()
    pixels = torch.rand(2, 3, *codec.image_size, dtype=torch.float64)
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (codec.config.mean, codec.config.std))
    h, embedding = reference.see((pixels - mean) / std)

    found = codec.encode(pixels * 2 - 1)
    side = codec.image_size[0] // codec.downsample_factor
    assert found.ids.shape == (2, side, side)
    places = 2 ** torch.arange(h.shape[-1] - 1, -1, -1)
    assert torch.equal(found.ids.flatten(1), ((h > 0).long() * places).sum(-1))  # the first dimension highest
    read = codec.pre_quant_proj(codec.forward_features(pixels * 2 - 1)).flatten(1, 2)
    assert relative(F.normalize(read, dim=-1), h) < 1e-5  # rotary angles are float32
    again = reference.draw(torch.where(h > 0, 1.0, -1.0).double())
    assert relative((codec.decode(found.codes) + 1) / 2, again * std + mean) < 1e-5

    towers = load_contrastive_towers(tmp_path).double()
    assert relative(towers.encode_image((pixels - mean) / std), embedding) < 1e-5
    words = torch.tensor([[1, 4, 19, 0, 0], [3, 2, 7, 9, 19]])
    assert relative(towers.encode_text(words), reference.read(words)) < 1e-5
    assert torch.equal(towers.log_scale, tensors["logit_scale"].double().view(1))
    assert relative(codec.encoder.forward_pooled((pixels - mean) / std), embedding) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_qlip_round_trip(tmp_path, seed):
    _, tensors = published(seed, tmp_path / "theirs")
    codec, towers = load(tmp_path / "theirs"), load_contrastive_towers(tmp_path / "theirs")
    to_hf(codec, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    left = set(tensors) - set(written)
    assert all(torch.equal(written[name], tensors[name]) for name in written)
    assert {name.partition(".")[0] for name in left} == {"text_model", "text_projection", "logit_scale"}
    assert compute_codec_identity(load(tmp_path / "ours")) == compute_codec_identity(codec)
    state, names = towers.state_dict(), set(written)
    for move in QLIP_TOWERS.tensor_rules(towers.config):
        for name, tensor in zip(move.hf, move.export([state[ours] for ours in move.native]), strict=True):
            assert torch.equal(tensor, tensors[name])
            names.add(name)
    assert names == set(tensors)  # between them, the two models have all of it
    assert QLIP_TOWERS.supports(towers.config)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_config", {"quantizer": "none"}, "quantizer"),
        ("vision_config", {"quantizer_embed_type": "identity"}, "identity"),
        ("vision_config", {"quantizer_l2_norm": False}, "l2_norm"),
        ("vision_config", {"q_bias": False}, "q_bias"),
        ("vision_config", {"hidden_size_post_q": 5}, "hidden_size_post_q"),
        ("vision_config", {"quantizer_cfg": {"embed_dim": 64}}, "64 bits"),
        ("vision_config", {"quantizer_cfg": {"embed_dim": 11}}, "shape"),
        ("vision_config", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("decoder_config", {"num_hidden_layers": "all"}, "num_hidden_layers"),
        ("decoder_config", {"patch_size": 1}, "differ"),
    ],
)
def test_unsupported_qlip_settings_raise(tmp_path, part, change, message):
    about, _ = published(0, tmp_path)
    about[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(VitrailError, match=message):
        load(tmp_path)


def test_released_qlips_can_be_exported():
    for name in ("qlip-b16-256", "qlip-b8-256", "qlip-l14-392"):
        assert QLIP.supports(CODEC_PRESETS[name])
