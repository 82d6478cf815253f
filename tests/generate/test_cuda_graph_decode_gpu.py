"""CUDA graph decoding steps against the model without graphs, on a GPU."""

import gc
import weakref

import pytest
import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError
from vitrail.generate import GREEDY, generate_texts
from vitrail.generate.cuda_graph_decode import CompiledStepper, CUDAGraphDecodeStep, FusedStep, can_capture
from vitrail.generate.text_generation import EagerStepper
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, LatentConfig, MoEConfig, RotaryConfig

pytestmark = pytest.mark.gpu

BLOCKS = {
    "llama": BlockConfig(
        width=256,
        attention=AttentionConfig(heads=8, kv_heads=2, head_dim=64),
        mlp=GatedMLPConfig(intermediate_size=300),
        norm="rms",
    ),
    "qwen2": BlockConfig(
        width=192,
        attention=AttentionConfig(heads=6, kv_heads=6, bias="qkv"),
        mlp=GatedMLPConfig(intermediate_size=512),
        norm="rms",
    ),
    "qwen3": BlockConfig(
        width=256,
        attention=AttentionConfig(heads=4, kv_heads=1, head_dim=128, qk_norm="rms"),
        mlp=GatedMLPConfig(intermediate_size=320),
        norm="rms",
    ),
}


def make(block: BlockConfig, dtype=torch.bfloat16, pairing="half") -> Decoder:
    rotary = RotaryConfig(head_dim=block.attention.resolve_rotary_dim(block.width), pairing=pairing)
    model = Decoder(DecoderConfig(vocab_size=500, layers=3, block=block, rotary=rotary))
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_step_agrees_with_the_model(name, pairing, batch):
    model = make(BLOCKS[name], pairing=pairing)
    assert FusedStep.supports(model, batch) == (batch == 1)
    float32_model = make(BLOCKS[name], torch.float32, pairing)
    float32_model.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    ids = torch.randint(0, 500, (batch, 150), device="cuda")
    cache = model.make_cache(batch, 200)
    model.forward_hidden(ids[:, :100], cache=cache)
    step = CUDAGraphDecodeStep(model, cache)
    reference, bfloat16_logits = float32_model(ids), model(ids).float()
    for t in range(100, 150):
        logits = step(ids[:, t]).float()
        scale = reference[:, t].abs().max()
        # The error is at most 1.5 times that of the bfloat16 model without graphs.
        model_error = (bfloat16_logits[:, t] - reference[:, t]).abs().max() / scale
        assert (logits - reference[:, t]).abs().max() / scale <= max(1.5 * model_error, 1e-2), t
    assert cache.lengths.tolist() == [150] * batch


@torch.no_grad()
def test_rows_of_unequal_length():
    model = make(BLOCKS["llama"], torch.float32)
    ids = torch.randint(0, 500, (2, 40), device="cuda")
    counts = torch.tensor([10, 30], device="cuda")
    cache = model.make_cache(2, 64)
    model.forward_hidden(ids[:, :30], cache=cache, counts=counts)
    step = CUDAGraphDecodeStep(model, cache)
    for i in range(5):
        logits = step(ids[torch.arange(2, device="cuda"), counts + i])
        for row, n in enumerate(counts.tolist()):
            expected = model(ids[row : row + 1, : n + i + 1])[0, -1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_greedy_step_feeds_its_own_tokens():
    model = make(BLOCKS["llama"], torch.float32)
    ids = torch.randint(0, 500, (1, 20), device="cuda")
    cache = model.make_cache(1, 64)
    first = model.compute_logits(model.forward_hidden(ids, cache=cache)[:, -1]).argmax(-1)
    step = CUDAGraphDecodeStep(model, cache, greedy=True)
    step(first)
    ours = torch.cat([step.ids.clone(), step.generate_greedy(10)[0]])
    for _ in range(12):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert ours.tolist() == ids[0, 21:32].tolist()


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_latent_attention_is_captured(batch):
    latent = LatentConfig(kv_lora_rank=96, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
    attention, mlp = AttentionConfig(heads=4, latent=latent), GatedMLPConfig(intermediate_size=256)
    model = make(BlockConfig(width=128, attention=attention, mlp=mlp, norm="rms"), torch.float32, "adjacent")
    assert not FusedStep.supports(model, batch)
    ids, cache = torch.randint(0, 500, (batch, 60), device="cuda"), model.make_cache(batch, 80)
    model.forward_hidden(ids[:, :50], cache=cache)
    step, reference = CUDAGraphDecodeStep(model, cache), model(ids)
    for t in range(50, 60):
        torch.testing.assert_close(step(ids[:, t]), reference[:, t], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_experts_are_captured():
    block = BlockConfig(
        width=128,
        attention=AttentionConfig(heads=2),
        mlp=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=64),
        norm="rms",
    )
    model = make(block)
    assert not FusedStep.supports(model, 1)
    cache = model.make_cache(1, 32)
    ids = torch.randint(0, 500, (1, 9), device="cuda")
    model.forward_hidden(ids[:, :8], cache=cache)
    logits = CUDAGraphDecodeStep(model, cache)(ids[:, 8])
    reference = model(ids)[:, -1]
    assert (logits - reference).abs().max() / reference.abs().max() <= 5e-2


def test_generate_texts_uses_graphs_and_returns_equal_tokens():
    model = make(BLOCKS["llama"], torch.float32)
    prompts = [torch.randint(0, 500, (n,)).tolist() for n in (3, 40, 17)]
    assert can_capture(model, 3, 64)
    graphs = generate_texts(model, prompts, max_new_tokens=20, sampling=GREEDY)
    eager = generate_texts(model, prompts, max_new_tokens=20, sampling=GREEDY, stepper_factory=EagerStepper)
    compiled = generate_texts(
        model, prompts, max_new_tokens=20, sampling=GREEDY, stepper_factory=CompiledStepper.get_or_create
    )
    assert [w.ids for w in graphs] == [w.ids for w in eager] == [w.ids for w in compiled]
    # The graph is reused by the next call, and captured again if the weights have moved.
    other = [torch.randint(0, 500, (n,)).tolist() for n in (9, 2, 30)]
    model.load_state_dict(make(BLOCKS["llama"], torch.float32).state_dict(), assign=True)
    for prompts in (other, other[::-1]):
        graphs = generate_texts(model, prompts, max_new_tokens=20, sampling=GREEDY)
        eager = generate_texts(model, prompts, max_new_tokens=20, sampling=GREEDY, stepper_factory=EagerStepper)
        assert [w.ids for w in graphs] == [w.ids for w in eager]
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_growing_or_full_cache_is_refused():
    model = make(BLOCKS["llama"])
    with pytest.raises(ConfigError, match="fixed capacity"):
        CUDAGraphDecodeStep(model, model.make_cache(1))
    cache = model.make_cache(1, 2)
    step = CUDAGraphDecodeStep(model, cache)
    step(torch.zeros(1, dtype=torch.long, device="cuda"))
    step(torch.zeros(1, dtype=torch.long, device="cuda"))
    with pytest.raises(ConfigError, match="a capacity of 2 tokens"):
        step(torch.zeros(1, dtype=torch.long, device="cuda"))
