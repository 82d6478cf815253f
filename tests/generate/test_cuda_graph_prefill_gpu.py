"""CUDA graphs of prefill and decoding of a VLM against the model without graphs, on a GPU."""

import gc
import weakref

import pytest
import torch

from generate.test_cuda_graph_prefill import GRAPHED, make_prompt
from generate.test_vlm_generation import CASES
from helpers import randomize
from vitrail.generate import GREEDY, text_generation, vlm_generation
from vitrail.generate.cuda_graph_decode import _CACHED_STEPPERS, FusedStep
from vitrail.generate.vlm_generation import VLMStepper, generate_from_streams
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.grid import Grid

pytestmark = pytest.mark.gpu


def build_model(config, dtype=torch.float32) -> VLM:
    return randomize(VLM(config), 3, 0.3).to("cuda", dtype).eval()


def make_gpu_prompt(model: VLM, seed: int):
    streams, images = make_prompt(model, seed)
    return streams, images._replace(pixels=images.pixels.to(model.decoder.embed.weight))


def take_last_image(images: VisionInputs) -> VisionInputs:
    """Return the last image, which belongs to the last row."""
    layout = images.layouts[-1]
    count = layout.num_patches if isinstance(layout, Grid) else len(layout.views)
    return VisionInputs(images.pixels[-count:], (layout,))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_tokens_with_graphs_equal_those_without(name, rows, monkeypatch):
    """The first of four prompts runs without a prefill graph, the others with one."""
    model = build_model(CASES[name])
    prompts = [make_gpu_prompt(model, seed) for seed in range(4)]
    if rows == 1:
        prompts = [(streams[2:], take_last_image(images)) for streams, images in prompts]
    fast = [generate_from_streams(model, *prompt, max_new_tokens=12, sampling=GREEDY) for prompt in prompts]
    graphs = [graph for graph in _CACHED_STEPPERS[model.decoder].prefill_graphs.values() if graph is not None]
    assert len(graphs) == (name in GRAPHED)
    monkeypatch.setattr(vlm_generation, "can_capture", lambda *_: False)
    plain = [generate_from_streams(model, *prompt, max_new_tokens=12, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]


@pytest.mark.parametrize("name", GRAPHED)
def test_host_does_not_wait_for_the_gpu_before_the_first_token(name, monkeypatch):
    """There is no synchronization between the start of vision encoding and the choice of the first token."""
    model = build_model(CASES[name])
    prompts = [make_gpu_prompt(model, seed) for seed in range(4)]
    expected = [generate_from_streams(model, *prompt, max_new_tokens=1, sampling=GREEDY) for prompt in prompts]
    start_vision_encoding, sample_tokens = vlm_generation.start_vision_encoding, text_generation.sample_tokens
    sampled = []

    def start_and_forbid_synchronization(*args):
        ticket = start_vision_encoding(*args)
        assert ticket is not None
        torch.cuda.set_sync_debug_mode("error")
        return ticket

    def allow_synchronization_and_sample(*args):
        torch.cuda.set_sync_debug_mode("default")
        sampled.append(1)
        return sample_tokens(*args)

    monkeypatch.setattr(vlm_generation, "start_vision_encoding", start_and_forbid_synchronization)
    monkeypatch.setattr(text_generation, "sample_tokens", allow_synchronization_and_sample)
    try:
        found = [generate_from_streams(model, *prompt, max_new_tokens=1, sampling=GREEDY) for prompt in prompts]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(sampled) == 4 and found == expected


@torch.no_grad()
def test_fused_steps_after_an_image():
    """In bfloat16 at batch size 1, the error is at most 1.5 times that of the model without graphs."""
    block = BlockConfig(
        width=32,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=64, qk_norm="rms"),
        mlp=GatedMLPConfig(intermediate_size=40),
        norm="rms",
    )
    rotary = RotaryConfig(head_dim=64, layout="mrope_interleaved", sections=(12, 10, 10))
    config = CASES["qwen3"].replace(decoder=CASES["qwen3"].decoder.replace(block=block, rotary=rotary))
    model = build_model(config, torch.bfloat16)
    assert FusedStep.supports(model.decoder, 1)
    float32_model = VLM(config).cuda().eval()
    float32_model.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    streams, images = make_gpu_prompt(model, 5)
    streams, images = streams[2:], take_last_image(images)
    counts = torch.tensor([len(streams[0])])

    def run(stepper: VLMStepper) -> torch.Tensor:
        found = [stepper.prefill(torch.empty(0), counts).float().clone()]
        for token_id in range(10, 40):
            found.append(stepper.step(torch.tensor([token_id], device="cuda")).float().clone())
        return torch.cat(found)

    reference = run(VLMStepper(float32_model, streams, images._replace(pixels=images.pixels.float()), None))
    bfloat16_logits = run(VLMStepper(model, streams, images, None))
    scale = reference.abs().max()
    allowed = max(1.5 * float((bfloat16_logits - reference).abs().max() / scale), 1e-2)
    for _ in range(3):
        fast = VLMStepper(model, streams, images, None, 128)
        assert float((run(fast) - reference).abs().max() / scale) <= allowed
    assert fast.graph_stepper is not None and int(fast.graph_stepper.graph_step.position_shift) < 0


def test_tokens_with_compiled_prefill_equal_those_without():
    model = build_model(CASES["qwen3"])
    prompts = [make_gpu_prompt(model, seed) for seed in range(3)]
    fast = [
        generate_from_streams(model, *prompt, max_new_tokens=8, sampling=GREEDY, compiled=True) for prompt in prompts
    ]
    plain = [generate_from_streams(model, *prompt, max_new_tokens=8, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]


def test_graphs_do_not_keep_a_model_alive():
    model = build_model(CASES["qwen2"])
    for seed in range(3):
        generate_from_streams(model, *make_gpu_prompt(model, seed), max_new_tokens=2, sampling=GREEDY)
    reference = weakref.ref(model.decoder)
    del model
    gc.collect()
    assert reference() is None
