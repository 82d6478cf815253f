"""Captured prompts and steps of a VLM against the model itself, on a GPU."""

import gc
import weakref

import pytest
import torch

from generate.test_prefill import GRAPHED, asked
from generate.test_seen import CASES
from helpers import randomize
from vitrail.generate import GREEDY, seen, text
from vitrail.generate.captured import _KEPT, Fused
from vitrail.generate.seen import Seeing, write
from vitrail.models.vlm import VLM, Shown
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig
from vitrail.processing.grid import Grid

pytestmark = pytest.mark.gpu


def on_gpu(config, dtype=torch.float32) -> VLM:
    return randomize(VLM(config), 3, 0.3).to("cuda", dtype).eval()


def moved(model: VLM, seed: int):
    streams, shown = asked(model, seed)
    return streams, shown._replace(pixels=shown.pixels.to(model.decoder.embed.weight))


def last(shown: Shown) -> Shown:
    """The last picture, which is the last row's."""
    shape = shown.shapes[-1]
    count = shape.patches if isinstance(shape, Grid) else len(shape.views)
    return Shown(shown.pixels[-count:], (shape,))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_captured_words_are_the_plain_ones(name, rows, monkeypatch):
    """Token for token; of the four prompts the first is read by the model and the others by a graph."""
    model = on_gpu(CASES[name])
    prompts = [moved(model, seed) for seed in range(4)]
    if rows == 1:
        prompts = [(streams[2:], last(shown)) for streams, shown in prompts]
    fast = [write(model, *prompt, max_new=12, sampling=GREEDY) for prompt in prompts]
    graphs = [one for one in _KEPT[model.decoder].prefills.values() if one is not None]
    assert len(graphs) == (name in GRAPHED)
    monkeypatch.setattr(seen, "capturable", lambda *_: False)
    plain = [write(model, *prompt, max_new=12, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]


@pytest.mark.parametrize("name", GRAPHED)
def test_words_are_laid_out_while_the_gpu_looks(name, monkeypatch):
    """From the glance to the choice of the first token, nothing waits for the GPU."""
    model = on_gpu(CASES[name])
    prompts = [moved(model, seed) for seed in range(4)]
    wanted = [write(model, *prompt, max_new=1, sampling=GREEDY) for prompt in prompts]
    glance, choose, passed = seen.glance, text.choose, []

    def glanced(*given):
        looked = glance(*given)
        assert looked is not None
        torch.cuda.set_sync_debug_mode("error")
        return looked

    def chosen(*given):
        torch.cuda.set_sync_debug_mode("default")
        passed.append(1)
        return choose(*given)

    monkeypatch.setattr(seen, "glance", glanced)
    monkeypatch.setattr(text, "choose", chosen)
    try:
        found = [write(model, *prompt, max_new=1, sampling=GREEDY) for prompt in prompts]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(passed) == 4 and found == wanted


@torch.no_grad()
def test_fused_steps_behind_a_picture():
    """In half precision, at batch 1: as near to the exact model as the model itself is, give or take half."""
    block = BlockConfig(
        width=32,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=64, qk_norm="rms"),
        mlp=GatedConfig(hidden=40),
        norm="rms",
    )
    rotary = RotaryConfig(head_dim=64, layout="mrope_interleaved", sections=(12, 10, 10))
    config = CASES["qwen3"].with_(decoder=CASES["qwen3"].decoder.with_(block=block, rotary=rotary))
    model = on_gpu(config, torch.bfloat16)
    assert Fused.suits(model.decoder, 1)
    exact = VLM(config).cuda().eval()
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    streams, shown = moved(model, 5)
    streams, shown = streams[2:], last(shown)
    counts = torch.tensor([len(streams[0])])

    def run(steps: Seeing) -> torch.Tensor:
        found = [steps.prefill(torch.empty(0), counts).float().clone()]
        for id in range(10, 40):
            found.append(steps.step(torch.tensor([id], device="cuda")).float().clone())
        return torch.cat(found)

    reference = run(Seeing(exact, streams, shown._replace(pixels=shown.pixels.float()), None))
    rounded = run(Seeing(model, streams, shown, None))
    scale = reference.abs().max()
    allowed = max(1.5 * float((rounded - reference).abs().max() / scale), 1e-2)
    for _ in range(3):
        fast = Seeing(model, streams, shown, None, 128)
        assert float((run(fast) - reference).abs().max() / scale) <= allowed
    assert fast.captured is not None and int(fast.captured.captured.shift) < 0


def test_compiled_prompts_write_the_same():
    model = on_gpu(CASES["qwen3"])
    prompts = [moved(model, seed) for seed in range(3)]
    fast = [write(model, *prompt, max_new=8, sampling=GREEDY, compiled=True) for prompt in prompts]
    plain = [write(model, *prompt, max_new=8, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]


def test_graphs_do_not_keep_a_model_alive():
    model = on_gpu(CASES["qwen2"])
    for seed in range(3):
        write(model, *moved(model, seed), max_new=2, sampling=GREEDY)
    gone = weakref.ref(model.decoder)
    del model
    gc.collect()
    assert gone() is None
