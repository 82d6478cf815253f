"""Image LoRA equals merged weights for samples with an image, and the plain decoder for others."""

import pytest
import torch

from backbones.test_fusion import IDS, KINDS, WIDTH, config, count_torch_flops, make_fused, pictures, plain
from helpers import relative
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import ImageLoRAInputs, get_fusion_parameters
from vitrail.errors import ConfigError, StreamError
from vitrail.nn import AttentionPlan, MoEConfig, PlainMLPConfig, Workload, cost

LORA = KINDS["image_lora"]
LAYERS = {"qkv": "self.op.qkv", "out": "self.op.out", "gate_up": "mlp.op.gate_up", "down": "mlp.op.down"}
ROWS = torch.tensor([True, False, True])  # with an image


def merged() -> Decoder:
    """The decoder with all updates added to its weights."""
    model = make_fused(LORA)
    with torch.no_grad():
        for block, updates in zip(model.blocks, model.fusion.layers, strict=True):
            for name, path in LAYERS.items():
                update = updates[name]
                block.get_submodule(f"branches.{path}").weight += LORA.alpha / LORA.rank * update.b @ update.a
    model.fusion = None
    return model


def test_rows_with_an_image_have_merged_weights():
    found = make_fused(LORA)(IDS, fusion_inputs=pictures(LORA))
    assert torch.equal(found[~ROWS], plain()(IDS)[~ROWS])
    assert relative(found[ROWS], merged()(IDS)[ROWS]) <= 1e-5


def test_samples_of_one_row_are_separate():
    """An image marks the tokens of its sample, before and after it, and not those of other samples or of padding."""
    image = torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    segments = torch.tensor([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, -1, -1]])
    found = ImageLoRAInputs.from_image_mask(image, segments)
    assert found.sample_mask.tolist() == [[False, False, True, True, True, False], [False] * 6]


@torch.no_grad()
def test_cache_keeps_the_rows_with_an_image():
    model, inputs = make_fused(LORA), pictures(LORA)
    whole, cache = model(IDS, fusion_inputs=inputs), model.make_cache(3)
    first = model(IDS[:, :4], cache=cache, fusion_inputs=ImageLoRAInputs(inputs.sample_mask[:, :4]))
    pieces = [first, *(model(piece, cache=cache) for piece in IDS[:, 4:].split([1, 6], dim=1))]
    assert relative(torch.cat(pieces, 1), whole) <= 1e-5
    cache.clear()
    assert torch.equal(model(IDS, cache=cache), plain()(IDS))


def test_new_image_lora_has_no_effect_and_learns():
    model = plain()
    model.add_fusion(LORA)
    logits = model(IDS, fusion_inputs=pictures(LORA))
    assert relative(logits, plain()(IDS)) <= 1e-6
    (logits * torch.randn_like(logits)).sum().backward()
    b = [p for name, p in get_fusion_parameters(model).items() if name.endswith(".b")]
    assert len(b) == 4 * 3 and all(p.grad.abs().max() > 0 for p in b)


def test_cost_counts_the_updates_of_passes_with_images():
    model, full = make_fused(LORA), Workload.full_attention(11, 3)
    inputs = ImageLoRAInputs(torch.ones_like(IDS, dtype=torch.bool))
    assert cost.count_flops(model, full) == cost.count_flops(plain(), full)
    with_images = full.replace(context_tokens=9)
    assert cost.count_flops(model, with_images) == count_torch_flops(
        lambda: model(IDS, plan=AttentionPlan(), fusion_inputs=inputs)
    )
    added = sum(p.nbytes for p in get_fusion_parameters(model).values())
    bare = cost.count_bytes(plain(), full)
    assert cost.count_bytes(model, full) == bare._replace(weights=bare.weights + added)
    assert cost.count_bytes(model, with_images).read == bare.read + added


@pytest.mark.parametrize(
    ("fusion", "block", "message"),
    [
        (LORA.replace(rank=0), {}, "rank 0"),
        (LORA, {"mlp": PlainMLPConfig(intermediate_size=9)}, "PlainMLPConfig"),
        (LORA, {"mlp": MoEConfig(num_experts=2, experts_per_token=1, intermediate_size=9)}, "MoEConfig"),
    ],
)
def test_unsupported_decoders_are_refused(fusion, block, message):
    usual = config()
    with pytest.raises(ConfigError, match=message):
        usual.replace(fusion=fusion, block=usual.block.replace(**block))


def test_wrong_masks_are_refused():
    model = make_fused(LORA)
    with pytest.raises(StreamError, match="sample mask"):
        model(IDS, fusion_inputs=ImageLoRAInputs(torch.ones(3, 10, dtype=torch.bool)))
    with pytest.raises(ConfigError, match="ImageLoRAInputs"):
        model(IDS, fusion_inputs=pictures(KINDS["deepstack"]))
    assert model.config.block.width == WIDTH
