"""Captured prompts and steps of a VLM on the CPU: everything but the graph itself, which is replaced by its calls."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from generate.test_vlm_generation import CASES, laid_out, pictures
from helpers import randomize, relative
from vitrail.errors import ConfigError
from vitrail.generate import GREEDY, cuda_graph_decode, cuda_graph_prefill, text_generation, vlm_generation
from vitrail.generate.cuda_graph_decode import CUDAGraphDecodeStep, CUDAGraphStepper
from vitrail.generate.vlm_generation import VLMStepper, generate_from_streams, stream_tokens_from_streams
from vitrail.models.vlm import VLM
from vitrail.stream import build_stream, text_part
from vitrail.stream.packing import pad_streams

GRAPHED = ["llava", "next", "added", "qwen2", "qwen3"]


class Graph:
    """What a CUDA graph does, on any device."""

    def __init__(self, call, rehearse=None):
        self.replay = torch.no_grad()(call)
        (rehearse or call)()


@pytest.fixture
def graphs(monkeypatch):
    """Steps and prompts are captured on the CPU too; gives the graphs that were made."""
    made: list[Graph] = []

    def graph_of(call, rehearse=None):
        made.append(Graph(call, rehearse))
        return made[-1]

    monkeypatch.setattr(cuda_graph_decode, "_explain_unsupported", lambda model: None)
    for module in (cuda_graph_decode, cuda_graph_prefill):
        monkeypatch.setattr(module, "capture_graph", graph_of)
    return made


def make_prompt(model: VLM, seed: int):
    """The same kind of prompt, with other words and pixels."""
    generator = torch.Generator().manual_seed(seed)
    parts, shown = laid_out(model)
    streams = [build_stream(one, model.config.rules) for one in parts]
    for i, one in enumerate(streams):
        other = torch.randint(1, 59, one.ids.shape, generator=generator)
        streams[i] = replace(one, ids=torch.where(one.kinds == 0, other, one.ids))
    return streams, shown._replace(pixels=torch.rand(shown.pixels.shape, generator=generator))


@pytest.mark.parametrize("name", CASES)
def test_captured_words_are_the_plain_ones(name, graphs, monkeypatch):
    model = randomize(VLM(CASES[name]), 3, 0.3).eval()
    prompts = [make_prompt(model, seed) for seed in range(4)]
    fast = [generate_from_streams(model, *prompt, max_new_tokens=9, sampling=GREEDY) for prompt in prompts]
    assert len(graphs) == 1 + 2 * (name in GRAPHED)  # the step, and the second of these prompts: looking, and reading
    monkeypatch.undo()
    plain = [generate_from_streams(model, *prompt, max_new_tokens=9, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]
    assert len({tuple(one.ids) for row in plain for one in row}) > 4


@torch.no_grad()
def test_logits_and_positions_are_the_plain_ones(graphs, monkeypatch):
    model = randomize(VLM(CASES["qwen3"]), 4, 0.3).eval()
    streams, shown = make_prompt(model, 7)
    counts = torch.tensor(list(map(len, streams)))
    found = []
    for _ in range(3):
        fast = VLMStepper(model, streams, shown, None, 64)
        ids = (torch.tensor([11, 12, 13]), torch.tensor([30, 31, 32]))
        found.append([fast.prefill(torch.empty(0), counts).clone(), *(fast.step(one).clone() for one in ids)])
    plain = VLMStepper(model, streams, shown, None)
    wanted = [plain.prefill(torch.empty(0), counts), *(plain.step(one) for one in ids)]
    for run in found:
        assert all(relative(a, b) < 1e-5 for a, b in zip(run, wanted, strict=True))
    assert (
        min(fast.graph_stepper.graph_step.position_shift.tolist())
        < 0
        == max(fast.graph_stepper.graph_step.position_shift.tolist())
    )
    # Words alone use the same steps afterwards, and stand where they lie.
    assert CUDAGraphStepper.get_or_create(model.decoder, 3, 64).graph_step.position_shift.tolist() == [0, 0, 0]


def test_another_kind_of_prompt_or_moved_weights_are_no_graph_of_this_one(graphs):
    model = randomize(VLM(CASES["qwen2"]), 3, 0.3).eval()
    streams, shown = make_prompt(model, 0)
    generate_from_streams(model, streams, shown, max_new_tokens=2, sampling=GREEDY)
    longer = [build_stream([text_part([5])], model.config.rules), *streams[1:]]
    generate_from_streams(model, longer, model.prepare_images(pictures()[2:]), max_new_tokens=2, sampling=GREEDY)
    assert len(graphs) == 1
    generate_from_streams(model, streams, shown, max_new_tokens=2, sampling=GREEDY)
    assert len(graphs) == 3
    fresh = {name: weight.clone() for name, weight in model.tower.state_dict().items()}
    model.tower.load_state_dict(fresh, assign=True)
    for _ in range(2 * cuda_graph_prefill.MAX_CACHED_GRAPHS):
        generate_from_streams(model, streams, shown, max_new_tokens=2, sampling=GREEDY)
    assert len(graphs) == 5


def test_graphs_do_not_keep_a_model_alive(graphs, monkeypatch):
    class Nothing:
        def replay(self):
            """A graph does not keep the call that it was captured from."""

    for module in (cuda_graph_decode, cuda_graph_prefill):
        monkeypatch.setattr(module, "capture_graph", lambda call, rehearse=None: Nothing())
    model = VLM(CASES["qwen3"]).eval()
    for seed in range(3):
        generate_from_streams(model, *make_prompt(model, seed), max_new_tokens=2, sampling=GREEDY)
    gone = weakref.ref(model.decoder)
    assert any(cuda_graph_decode._CACHED_STEPPERS[model.decoder].prefill_graphs.values())
    del model
    gc.collect()
    assert gone() is None


class Still(TorchDispatchMode):
    """Refuse transfers to the device, as a capture does. Reads from the device fail on meta tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim]
        if isinstance(made, torch.Tensor) and made.is_meta:
            assert all(x.is_meta for x in given), f"{func} brings {[tuple(x.shape) for x in given]} to the device"
        return made


@pytest.mark.parametrize("name", GRAPHED)
@torch.no_grad()
def test_the_pass_leaves_the_host_alone(name):
    """On the meta device there is nothing to ask, and whatever comes from the CPU is seen coming."""
    model = VLM(CASES[name])
    streams, shown = make_prompt(model, 0)
    model = model.to("meta")
    spot = cuda_graph_prefill._build_inputs(model, pad_streams(streams), [shown, None], torch.device("meta"))
    cache = model.decoder.make_cache(3, 128)
    with Still():
        cuda_graph_prefill._encode_into(model, spot, seen := {})
        assert cuda_graph_prefill._compute_logits(model, spot, seen, cache).shape == (3, 61)
    with pytest.raises(AssertionError, match="to the device"), Still():
        torch.ones(3).to("meta")


class Waits(TorchFunctionMode):
    """Notes what makes the host wait for the device: all that brings something to it, but for what `send` sends."""

    def __init__(self):
        super().__init__()
        self.sent, self.waits = 0, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.is_meta:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
            if func is torch.tensor or not all(x.is_meta for x in given):
                free = func is torch.Tensor.copy_ and kwargs.get("non_blocking", False)
                self.sent += free
                self.waits += [] if free else [func]
        return made


@pytest.mark.parametrize("name", GRAPHED)
def test_host_does_not_wait_for_the_device_before_the_first_token(name, graphs, monkeypatch):
    """A prompt of a known kind is prefilled without synchronization and without packing a batch."""
    model = VLM(CASES[name])
    prompts = [make_prompt(model, seed) for seed in range(2)]
    model = model.to("meta").eval()
    prompts = [(streams, shown._replace(pixels=shown.pixels.to("meta"))) for streams, shown in prompts]

    class SamplingError(Exception):
        """Ends generation before the first token."""

    def raise_error(*_):
        raise SamplingError

    monkeypatch.setattr(text_generation, "sample_tokens", raise_error)
    streams, shown = prompts[0]
    CUDAGraphStepper.get_or_create(model.decoder, 3, 64).prefill_graphs[
        cuda_graph_prefill._prompt_kind(model, streams, (shown, None))
    ] = None  # met once
    with pytest.raises(SamplingError):
        generate_from_streams(model, streams, shown, max_new_tokens=1, sampling=GREEDY)
    assert len(graphs) == 3
    for graph in graphs:
        graph.replay = lambda: None
    for module in (cuda_graph_prefill, vlm_generation):
        monkeypatch.setattr(module, "pad_streams", None)
    with pytest.raises(SamplingError), Waits() as waits:
        generate_from_streams(model, *prompts[1], max_new_tokens=1, sampling=GREEDY)
    assert len(graphs) == 3 and waits.waits == [] and waits.sent == 1  # the ids
    for bring in (lambda: torch.tensor([1], device="meta"), lambda: torch.ones(1).to("meta")):
        with Waits() as waits:
            bring()
        assert waits.waits


def test_a_token_past_its_slot_is_refused(graphs):
    model = VLM(CASES["llava"]).decoder
    with pytest.raises(ConfigError, match="position shift 2 is positive"):
        CUDAGraphDecodeStep(model, model.make_cache(2, 8)).set_position_shift([0, 2])


@pytest.fixture
def compilations(monkeypatch):
    """Replace compilation by the identity, and return the list of compiled modules."""
    made = []

    def backend(module, inputs):
        made.append(module)
        return module.forward

    monkeypatch.setattr(cuda_graph_decode, "COMPILE_OPTIONS", {"dynamic": False, "backend": backend, "fullgraph": True})
    compile = torch.compile  # which leaves the step itself as it is
    monkeypatch.setattr(torch, "compile", lambda call, **how: compile(call, **how) if "backend" in how else call)
    return made


@pytest.mark.parametrize("name", ["llava", "qwen3"])
def test_blocks_of_a_kind_are_compiled_once(name, graphs, compilations):
    model = randomize(VLM(CASES[name]), 3, 0.3).eval()
    prompts = [make_prompt(model, seed) for seed in range(3)]
    fast = [
        generate_from_streams(model, *prompt, max_new_tokens=5, sampling=GREEDY, compiled=True) for prompt in prompts
    ]
    assert len(compilations) == 3  # a block of the tower, one of the decoder, and its last
    assert len(graphs) == 3
    plain = [generate_from_streams(model, *prompt, max_new_tokens=5, sampling=GREEDY) for prompt in prompts]
    assert [[one.ids for one in row] for row in fast] == [[one.ids for one in row] for row in plain]
    assert len(compilations) == 3


@torch._dynamo.config.patch(recompile_limit=1)
def test_every_kind_of_prompt_is_compiled(graphs, compilations):
    """Not only as many as torch would compile of one function."""
    model = VLM(CASES["llava"]).eval()
    shown = model.prepare_images(pictures(1))
    for kind in (1, 2):
        one = build_stream([text_part([5] * kind), model.config.make_part(shown.layouts[0])], model.config.rules)
        for _ in range(2):
            generate_from_streams(model, [one], shown, max_new_tokens=1, sampling=GREEDY, compiled=True)
        assert len(compilations) == 1 + 2 * kind  # of the tower once, of the decoder two for each length


def test_what_moved_is_noticed():
    model = VLM(CASES["qwen3"]).eval()
    held = cuda_graph_decode.WeightPointers(model.tower, model.connector)
    assert held.are_unchanged()
    first = next(model.tower.parameters())
    with torch.no_grad():
        first.mul_(2)
    assert held.are_unchanged()  # another value in the same place
    before, first.data = first.data, first.data.clone()
    assert not held.are_unchanged()
    first.data = before
    assert held.are_unchanged()
    for change in (
        lambda: model.tower.load_state_dict({k: v.clone() for k, v in model.tower.state_dict().items()}, assign=True),
        lambda: setattr(model.tower, "beside", torch.nn.Identity()),
        lambda: setattr(model.tower.blocks[0], "mlp", torch.nn.Identity()),
        lambda: setattr(model.tower.blocks[0], "mlp", None),
        lambda: model.connector.register_parameter("more", torch.nn.Parameter(torch.ones(1))),
        lambda: setattr(model.connector, "more", None),
        lambda: model.tower.blocks.register_parameter("more", torch.nn.Parameter(torch.ones(1))),  # which had none
        lambda: delattr(model.tower.blocks, "more"),
    ):
        held = cuda_graph_decode.WeightPointers(model.tower, model.connector)
        assert held.are_unchanged()
        change()
        assert not held.are_unchanged()


def test_started_encoding_is_used_once(graphs):
    """Two prompts start to encode their images before either is read: each reads its own features."""
    model = randomize(VLM(CASES["llava"]), 3, 0.3).eval()
    prompts = [make_prompt(model, seed) for seed in range(4)]
    wanted = [
        [one.ids for one in generate_from_streams(model, *prompt, max_new_tokens=6, sampling=GREEDY)]
        for prompt in prompts
    ]
    _, cross_vlm, _ = graphs  # the step, and what reads
    looks = []
    replay = cross_vlm.replay
    cross_vlm.replay = lambda: (looks.append(1), replay())
    again = [
        [one.ids for one in generate_from_streams(model, *prompt, max_new_tokens=6, sampling=GREEDY)]
        for prompt in prompts
    ]
    assert again == wanted and len(looks) == 4
    begun = [stream_tokens_from_streams(model, *prompt, max_new_tokens=6, sampling=GREEDY) for prompt in prompts[:2]]
    result = list(map(list, begun))
    for pieces, ids in zip(result, wanted[:2], strict=True):
        assert [[piece.id for piece in pieces if piece.row == row] for row in range(len(ids))] == ids
    assert len(looks) == 4 + 4  # the first was overtaken and looked again, and so overtook the second
