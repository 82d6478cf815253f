"""EVA-02 matches its equations, and timm where it is installed."""

import importlib.util
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from helpers import relative
from vitrail.encoders import ViT
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.eva02 import ARCHITECTURES
from vitrail.registry import FAMILIES

CASES = 24


def odd(seed: int) -> dict:
    """Draw unusual settings that timm's Eva accepts."""
    draw = random.Random(seed)
    heads, patch, norms = draw.choice([1, 2, 3]), draw.choice([2, 3, 5]), draw.choice(["none", "mlp", "both"])
    return {
        "img_size": patch * draw.randint(2, 5),
        "patch_size": patch,
        "in_chans": draw.choice([1, 3]),
        "embed_dim": heads * draw.choice([4, 8, 12]),
        "depth": draw.randint(1, 4),
        "num_heads": heads,
        "mlp_ratio": draw.choice([4 * 2 / 3, 1.3]),
        "swiglu_mlp": True,
        "scale_mlp": norms != "none",
        "qkv_fused": norms == "none",
        "scale_attn_inner": norms == "both",
        "use_rot_pos_emb": True,
        "ref_feat_shape": draw.choice([[3, 3], [4, 4], [16, 16]]),
        "global_pool": draw.choice(["avg", "token"]),
    }


def shapes(args: dict, classes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a timm file."""
    W, P, C, hidden = (
        args["embed_dim"],
        args["patch_size"],
        args["in_chans"],
        int(args["embed_dim"] * args["mlp_ratio"]),
    )
    names = {
        "cls_token": (1, 1, W),
        "pos_embed": (1, 1 + (args["img_size"] // P) ** 2, W),
        **linear("patch_embed.proj", W, C, P, P),
        **linear("fc_norm" if args["global_pool"] == "avg" else "norm", W),
        **(linear("head", classes, W) if classes else {}),
    }
    for i in range(args["depth"]):
        block = {
            **linear("norm1", W),
            **linear("norm2", W),
            **linear("attn.proj", W, W),
            **linear("mlp.fc2", W, hidden),
        }
        if args["qkv_fused"]:
            block |= {"attn.qkv.weight": (3 * W, W), "attn.q_bias": (W,), "attn.v_bias": (W,)}
            block |= linear("mlp.fc1", 2 * hidden, W)
        else:
            block |= {**linear("attn.q_proj", W, W), "attn.k_proj.weight": (W, W), **linear("attn.v_proj", W, W)}
            block |= {**linear("mlp.fc1_g", hidden, W), **linear("mlp.fc1_x", hidden, W), **linear("mlp.norm", hidden)}
        if args["scale_attn_inner"]:
            block |= linear("attn.norm", W)
        names |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return names


def linear(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def folder(path, seed: int, classes: int = 0):
    """Write a timm folder with random weights; return its settings and tensors."""
    args = odd(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes(args, classes).items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    about = {"architecture": "eva02_base_patch14_224", "num_classes": classes, "model_args": args, "pretrained_cfg": {}}
    (path / "config.json").write_text(json.dumps(about))
    return args, tensors


# ---- the equations ----------------------------------------------------------------------------------------------


def plain(args: dict, w: dict, pixels) -> tuple[list, torch.Tensor]:
    """Reference forward pass: states between blocks and the pooled vector."""

    def dense(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    P, heads = args["patch_size"], args["num_heads"]
    x = F.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=P)  # (B, W, h, w)
    h, width = x.shape[2:]
    side = args["img_size"] // P
    table = w["pos_embed"][:, 1:].view(1, side, side, -1).permute(0, 3, 1, 2).contiguous()
    if (h, width) != (side, side):
        table = F.interpolate(table, size=(h, width), mode="bicubic", antialias=True)
    x = (x + table).flatten(2).transpose(1, 2)
    x = torch.cat([(w["cls_token"] + w["pos_embed"][:, :1]).expand(len(x), -1, -1), x], dim=1)

    def turned(q):
        """Channels 2i and 2i + 1 of a patch turn together; the first half of the pairs by its row, the rest by its
        column; CLS stands still."""
        D = q.shape[-1]
        row, column = torch.meshgrid(torch.arange(h) / h, torch.arange(width) / width, indexing="ij")
        rates = 10_000.0 ** (-torch.arange(D // 4) / (D // 4))
        down, across = args["ref_feat_shape"]
        angles = [(place.flatten()[:, None] * times * rates) for place, times in ((row, down), (column, across))]
        angle = torch.cat(angles, dim=1)  # (patches, D / 2)
        cos, sin = angle.cos().to(q), angle.sin().to(q)
        a, b = q[:, :, 1:, 0::2], q[:, :, 1:, 1::2]
        out = q.clone()
        out[:, :, 1:, 0::2] = a * cos - b * sin
        out[:, :, 1:, 1::2] = b * cos + a * sin
        return out

    states = [x]
    for i in range(args["depth"]):
        at = f"blocks.{i}"
        y = norm(x, f"{at}.norm1")
        if args["qkv_fused"]:
            q, k, v = F.linear(y, w[f"{at}.attn.qkv.weight"]).chunk(3, dim=-1)
            q, v = q + w[f"{at}.attn.q_bias"], v + w[f"{at}.attn.v_bias"]
        else:
            q, k, v = (dense(y, f"{at}.attn.{name}_proj") for name in "qkv")
        q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in (q, k, v))
        q, k = turned(q), turned(k)
        seen = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        seen = seen.transpose(1, 2).flatten(2)
        if args["scale_attn_inner"]:
            seen = norm(seen, f"{at}.attn.norm")
        x = x + dense(seen, f"{at}.attn.proj")
        y = norm(x, f"{at}.norm2")
        if args["qkv_fused"]:
            gate, up = dense(y, f"{at}.mlp.fc1").chunk(2, dim=-1)
        else:
            gate, up = dense(y, f"{at}.mlp.fc1_g"), dense(y, f"{at}.mlp.fc1_x")
        y = F.silu(gate) * up
        if args["scale_mlp"]:
            y = norm(y, f"{at}.mlp.norm")
        x = x + dense(y, f"{at}.mlp.fc2")
        states.append(x)
    pooled = norm(x[:, 1:].mean(1), "fc_norm") if args["global_pool"] == "avg" else norm(x, "norm")[:, 0]
    return states, pooled


@pytest.mark.parametrize("seed", range(CASES))
def test_matches_equations(seed, tmp_path):
    args, tensors = folder(tmp_path / "timm", seed)
    ours, draw = from_hf(tmp_path / "timm"), random.Random(seed)
    P, C = args["patch_size"], args["in_chans"]
    sizes = [(args["img_size"], args["img_size"]), (P * draw.randint(1, 5), P * draw.randint(1, 5))]
    for h, w in sizes:
        pixels = torch.randn(2, C, h, w, requires_grad=True)
        states, pooled = plain(args, tensors, pixels)
        for layer in {0, 1, -1, -2}:
            assert relative(ours.forward_tokens(pixels, layer=layer), states[layer]) <= 1e-4
        mine = ours.forward_pooled(pixels)
        assert relative(mine, pooled) <= 1e-4
        weight = torch.randn_like(mine)
        a, b = (torch.autograd.grad((x * weight).sum(), pixels)[0] for x in (mine, pooled))
        assert relative(a, b) <= 1e-3
    if seed % 4 == 0:
        to_hf(ours, tmp_path / "back")
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert back.keys() == tensors.keys() and all(torch.equal(back[n], tensors[n]) for n in back)
        assert from_hf(tmp_path / "back").config == ours.config
        save(ours, tmp_path / "own")
        assert torch.equal(load(tmp_path / "own").forward_pooled(pixels), ours.forward_pooled(pixels))


def test_classification_head(tmp_path):
    args, tensors = folder(tmp_path / "timm", 2, classes=11)
    ours = from_hf(tmp_path / "timm")
    assert torch.equal(ours.head.weight, tensors["head.weight"])
    pixels = torch.randn(2, args["in_chans"], args["img_size"], args["img_size"])
    pooled = plain(args, tensors, pixels)[1]
    assert relative(ours.forward_pooled(pixels), F.linear(pooled, tensors["head.weight"], tensors["head.bias"])) <= 1e-4
    to_hf(ours, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_classes"] == 11


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_released_shapes(name):
    row = FAMILIES["eva02"]
    config = row.from_hf_config({"architecture": name, "num_classes": 1000})
    assert row.to_hf_config(config)["architecture"] == name and row.from_hf_config(row.to_hf_config(config)) == config
    with torch.device("meta"):
        ours = ViT(config).state_dict()
        theirs = {n: torch.empty(s) for n, s in shapes(ARCHITECTURES[name], 1000).items()}
    pulled, pushed = {}, {}
    for move in row.tensor_rules(config):
        pulled |= zip(move.native, move.load([theirs[x] for x in move.hf]), strict=True)
        pushed |= zip(move.hf, move.export([ours[x] for x in move.native]), strict=True)
    assert {k: v.shape for k, v in pulled.items()} == {k: v.shape for k, v in ours.items()}
    assert {k: v.shape for k, v in pushed.items()} == {k: v.shape for k, v in theirs.items()}


def test_presets_match_timm():
    read = FAMILIES["eva02"].from_hf_config
    assert read({"architecture": "eva02_large_patch14_224"}) == VIT_PRESETS["eva02-l14"]
    assert read({"architecture": "eva02_tiny_patch14_336.mim_in22k_ft_in1k"}) == VIT_PRESETS["eva02-ti14-336"]
    clip = read({"architecture": "eva02_large_patch14_clip_224", "pretrained_cfg": {"num_classes": 768}})
    assert clip == VIT_PRESETS["eva02-l14-clip"]


@pytest.mark.parametrize(
    "about, why",
    [
        ({"architecture": "eva02_enormous_patch14_clip_224"}, "eva02_enormous"),
        ({"architecture": "eva02_base_patch14_224", "model_args": {"num_reg_tokens": 2}}, "num_reg_tokens"),
        ({"architecture": "eva02_base_patch14_224", "model_args": {"swiglu_mlp": False}}, "SwiGLU"),
        ({"architecture": "eva02_base_patch14_224", "model_args": {"global_pool": "max"}}, "max"),
    ],
)
def test_unsupported_settings_raise(about, why):
    with pytest.raises(CheckpointError, match=why):
        FAMILIES["eva02"].from_hf_config(about)


def test_unknown_architecture_raises(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet50", "pretrained_cfg": {}}))
    with pytest.raises(CheckpointError, match="unknown architecture 'resnet50'"):
        from_hf(tmp_path)


# ---- timm itself ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm():
    """Import timm with two stub operators for torchvision, which may not load on CPU builds of torch."""
    if not all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        pytest.skip("timm is not installed")
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm

        yield timm


@pytest.mark.parametrize("seed", range(CASES))
def test_matches_timm(timm, seed, tmp_path):
    classes = random.Random(seed).choice([0, 7])
    args, tensors = folder(tmp_path / "timm", seed, classes)
    for dynamic in (False, True):
        reference = timm.create_model(
            "eva02_base_patch14_224", **args, num_classes=classes, dynamic_img_size=dynamic
        ).eval()
        reference.load_state_dict(tensors)
        ours = from_hf(tmp_path / "timm")
        h, w = (args["img_size"],) * 2 if not dynamic else (args["patch_size"] * 3, args["patch_size"] * 4)
        pixels = torch.randn(2, args["in_chans"], h, w, requires_grad=True)
        features = reference.forward_features(pixels)
        assert relative(ours.forward_tokens(pixels), features) <= 1e-4
        mine = ours.forward_pooled(pixels)
        pooled = reference.forward_head(features)
        assert relative(mine, pooled) <= 1e-4
        weight = torch.randn_like(mine)
        a, b = (torch.autograd.grad((x * weight).sum(), pixels, retain_graph=True)[0] for x in (mine, pooled))
        assert relative(a, b) <= 1e-3
    to_hf(ours, tmp_path / "back")
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True, dynamic_img_size=True).eval()
    assert torch.equal(again(pixels), reference(pixels))
