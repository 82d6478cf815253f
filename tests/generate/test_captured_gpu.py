"""The captured step against the model itself, on a GPU."""

import gc
import weakref

import pytest
import torch

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError
from vitrail.generate import GREEDY, generate
from vitrail.generate.captured import CapturedStep, Compiled, Fused, capturable
from vitrail.generate.text import Eager
from vitrail.nn import AttentionConfig, BlockConfig, ExpertsConfig, GatedConfig, RotaryConfig

pytestmark = pytest.mark.gpu

BLOCKS = {
    "llama": BlockConfig(
        width=256, attention=AttentionConfig(heads=8, kv_heads=2, head_dim=64), mlp=GatedConfig(hidden=300), norm="rms"
    ),
    "qwen2": BlockConfig(
        width=192, attention=AttentionConfig(heads=6, kv_heads=6, bias="qkv"), mlp=GatedConfig(hidden=512), norm="rms"
    ),
    "qwen3": BlockConfig(
        width=256,
        attention=AttentionConfig(heads=4, kv_heads=1, head_dim=128, qk_norm="rms"),
        mlp=GatedConfig(hidden=320),
        norm="rms",
    ),
}


def make(block: BlockConfig, dtype=torch.bfloat16, pairing="half") -> Decoder:
    rotary = RotaryConfig(head_dim=block.attention.channels(block.width), pairing=pairing)
    model = Decoder(DecoderConfig(vocab=500, layers=3, block=block, rotary=rotary))
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_agrees_with_the_model(name, pairing, batch):
    model = make(BLOCKS[name], pairing=pairing)
    assert Fused.suits(model, batch) == (batch == 1)
    exact = make(BLOCKS[name], torch.float32, pairing)
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    ids = torch.randint(0, 500, (batch, 150), device="cuda")
    cache = model.cache(batch, 200)
    model.hidden(ids[:, :100], cache=cache)
    step = CapturedStep(model, cache)
    reference, rounded = exact(ids), model(ids).float()
    for t in range(100, 150):
        logits = step(ids[:, t]).float()
        scale = reference[:, t].abs().max()
        # As near to the exact model as the model itself is in half precision, give or take half.
        theirs = (rounded[:, t] - reference[:, t]).abs().max() / scale
        assert (logits - reference[:, t]).abs().max() / scale <= max(1.5 * theirs, 1e-2), t
    assert cache.lengths.tolist() == [150] * batch


@torch.no_grad()
def test_rows_of_unequal_length():
    model = make(BLOCKS["llama"], torch.float32)
    ids = torch.randint(0, 500, (2, 40), device="cuda")
    counts = torch.tensor([10, 30], device="cuda")
    cache = model.cache(2, 64)
    model.hidden(ids[:, :30], cache=cache, counts=counts)
    step = CapturedStep(model, cache)
    for i in range(5):
        logits = step(ids[torch.arange(2, device="cuda"), counts + i])
        for row, n in enumerate(counts.tolist()):
            alone = model(ids[row : row + 1, : n + i + 1])[0, -1]
            torch.testing.assert_close(logits[row], alone, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_greedy_follows_itself():
    model = make(BLOCKS["llama"], torch.float32)
    ids = torch.randint(0, 500, (1, 20), device="cuda")
    cache = model.cache(1, 64)
    first = model.logits(model.hidden(ids, cache=cache)[:, -1]).argmax(-1)
    step = CapturedStep(model, cache, greedy=True)
    step(first)
    ours = torch.cat([step.ids.clone(), step.follow(10)[0]])
    for _ in range(12):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert ours.tolist() == ids[0, 21:32].tolist()


@torch.no_grad()
def test_experts_are_captured_too():
    block = BlockConfig(
        width=128, attention=AttentionConfig(heads=2), mlp=ExpertsConfig(count=4, active=2, hidden=64), norm="rms"
    )
    model = make(block)
    assert not Fused.suits(model, 1)
    cache = model.cache(1, 32)
    ids = torch.randint(0, 500, (1, 9), device="cuda")
    model.hidden(ids[:, :8], cache=cache)
    logits = CapturedStep(model, cache)(ids[:, 8])
    reference = model(ids)[:, -1]
    assert (logits - reference).abs().max() / reference.abs().max() <= 5e-2


def test_generate_captures_by_itself_and_writes_the_same():
    model = make(BLOCKS["llama"], torch.float32)
    prompts = [torch.randint(0, 500, (n,)).tolist() for n in (3, 40, 17)]
    assert capturable(model, 3, 64)
    fast = generate(model, prompts, max_new=20, sampling=GREEDY)
    plain = generate(model, prompts, max_new=20, sampling=GREEDY, stepper=Eager)
    compiled = generate(model, prompts, max_new=20, sampling=GREEDY, stepper=Compiled.of)
    assert [w.ids for w in fast] == [w.ids for w in plain] == [w.ids for w in compiled]
    # The graph is kept for the next call, and made anew where the weights have moved.
    other = [torch.randint(0, 500, (n,)).tolist() for n in (9, 2, 30)]
    model.load_state_dict(make(BLOCKS["llama"], torch.float32).state_dict(), assign=True)
    for prompts in (other, other[::-1]):
        fast = generate(model, prompts, max_new=20, sampling=GREEDY)
        plain = generate(model, prompts, max_new=20, sampling=GREEDY, stepper=Eager)
        assert [w.ids for w in fast] == [w.ids for w in plain]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_growing_or_full_cache_is_refused():
    model = make(BLOCKS["llama"])
    with pytest.raises(ConfigError, match="fixed capacity"):
        CapturedStep(model, model.cache(1))
    cache = model.cache(1, 2)
    step = CapturedStep(model, cache)
    step(torch.zeros(1, dtype=torch.long, device="cuda"))
    step(torch.zeros(1, dtype=torch.long, device="cuda"))
    with pytest.raises(ConfigError, match="holds 2"):
        step(torch.zeros(1, dtype=torch.long, device="cuda"))
