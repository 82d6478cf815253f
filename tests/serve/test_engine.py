"""An answer of the engine equals the same request alone, whatever else runs."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from generate.test_vlm_generation import CASES, VOCAB, laid_out
from helpers import randomize
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError, TextError
from vitrail.generate import GREEDY, SamplingConfig, generate_texts
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, MoEConfig, RotaryConfig
from vitrail.serve.captured_decode import CapturedDecode, batch_sizes, choose_splits, select_most_likely
from vitrail.serve.client_fairness import QueueFullError
from vitrail.serve.engine import Engine, EngineFailedError
from vitrail.serve.engine_request import EnginePrompt, SamplingParams, collect_output
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.model_runner import build_engine_prompt
from vitrail.stream import build_stream, text_part

V, CONTEXT = 61, 96


def block(**more) -> BlockConfig:
    attention = AttentionConfig(heads=4, kv_heads=2, **more.pop("attention", {}))
    return BlockConfig(
        **{"width": 32, "attention": attention, "mlp": GatedMLPConfig(intermediate_size=40), "norm": "rms", **more}
    )


def decoder(config: BlockConfig, **more) -> Decoder:
    made = DecoderConfig(
        vocab_size=V, layers=3, block=config, rotary=RotaryConfig(head_dim=8), context_length=CONTEXT, **more
    )
    return randomize(Decoder(made), spread=0.3).eval()


DECODERS = {
    "llama": lambda: decoder(block()),
    "qwen3": lambda: decoder(block(attention={"qk_norm": "rms"})),
    "gemma2": lambda: decoder(
        block(norm_position="both", attention={"logit_softcap": 20.0}),
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=7,
        logit_softcap=10.0,
    ),
    "experts": lambda: decoder(block(mlp=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=24))),
    "opt": lambda: decoder(block(norm="layer"), learned_positions=CONTEXT + 2),
}
SAMPLINGS = (
    GREEDY,
    SamplingConfig(temperature=0.9, seed=3),
    SamplingConfig(temperature=1.3, top_k=9, top_p=0.8, seed=11),
    SamplingConfig(temperature=0.7, min_p=0.05, repetition_penalty=1.3, seed=0),
    GREEDY.replace(repetition_penalty=1.4),
)


def simulate(engine: Engine, requests, rng: random.Random, cancelled: set[int]) -> list:
    """Submit requests at random steps, cancel some, and return the output of each."""
    events = [[] for _ in requests]
    waiting, sequences = list(range(len(requests))), {}
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                number = waiting.pop(0)
                prompt, params = requests[number]
                sequences[number] = engine.submit(
                    prompt, params, events[number].extend, client=rng.choice(["a", "b", "c"])
                )
        engine.step()
        for number, sequence in sequences.items():
            if number in cancelled and rng.random() < 0.3:
                engine.cancel(sequence)
    engine.step()
    return [collect_output(own) for own in events]


def check_clean(engine: Engine) -> None:
    """Nothing is left of the requests: no pages, no slots, no clients."""
    assert engine.allocator.num_used == 0
    assert len(engine.scheduler.free_slots) == engine.config.max_num_seqs
    assert not engine.scheduler.clients and not engine.has_work


class UncapturedDecode(CapturedDecode):
    """The static buffers of captured steps on a CPU, without graphs."""

    def _get_graph(self, size):
        return SimpleNamespace(replay=lambda: self.run_step(size))


def overlap(engine: Engine) -> None:
    """Let the engine run as on a GPU: captured steps, and tokens that are delivered one step later."""
    runner = engine.runner
    runner.captured = UncapturedDecode(
        lambda rows, slots, positions, splits: runner.run_decode(rows, slots, positions, CONTEXT, splits),
        runner.last_ids,
        max_num_seqs=engine.config.max_num_seqs,
        num_known_ids=V,
        logits_width=V,
        dtype=torch.float32,
        kv_heads=2,
    )
    engine._overlaps = True


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_answers_equal_those_of_requests_alone(kind, seed):
    rng, model = random.Random(seed), DECODERS[kind]()
    config = EngineConfig(
        max_num_seqs=rng.choice([2, 4, 7]),
        max_batched_tokens=rng.choice([3, 8, 33]),
        num_pages=rng.choice([14, 17, 30]),
        page_size=rng.choice([4, 5]),
        prefix_caching=rng.random() < 0.8,
    )
    engine = Engine(model, config)
    if seed % 2:
        overlap(engine)
    shared = [[rng.randrange(V) for _ in range(rng.randint(1, 14))] for _ in range(3)]
    requests = []
    for _ in range(14):
        ids = rng.choice(shared) + [rng.randrange(V) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 22), sampling=rng.choice(SAMPLINGS), stop_ids=(rng.randrange(V),)
        )
        requests.append((EnginePrompt(ids), params))
    cancelled = {number for number in range(len(requests)) if rng.random() < 0.25}
    outputs = simulate(engine, requests, rng, cancelled)
    for number, ((prompt, params), output) in enumerate(zip(requests, outputs, strict=True)):
        alone = generate_texts(
            model,
            [prompt.ids],
            max_new_tokens=params.max_new_tokens,
            sampling=params.sampling,
            stop_ids=params.stop_ids,
        )[0]
        assert output.ids == alone.ids[: len(output.ids)]
        assert output.end == alone.finish_reason or (output.end == "cancelled" and number in cancelled)
        assert output.end == "cancelled" or output.ids == alone.ids
    check_clean(engine)


def test_full_pages_preempt_and_shared_prefixes_are_computed_once():
    model = DECODERS["llama"]()
    engine = Engine(model, EngineConfig(max_num_seqs=6, max_batched_tokens=64, num_pages=13, page_size=4))
    prompts = [[7] * 9 + [number] for number in range(6)]
    outputs = engine.generate([EnginePrompt(ids) for ids in prompts], SamplingParams(max_new_tokens=20))
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.ids == generate_texts(model, [ids], max_new_tokens=20, sampling=GREEDY)[0].ids
    assert engine.stats.preemptions > 0 and engine.stats.prefix_hit_tokens > 0
    before = engine.stats.prompt_tokens
    engine.generate([EnginePrompt([7] * 9 + [5])], SamplingParams(max_new_tokens=1))
    assert engine.stats.prompt_tokens - before == 2  # two pages of four tokens are cached
    check_clean(engine)


def stream_requests(model: VLM):
    """Prompts with images, and the reference's arguments of each."""
    parts, inputs = laid_out(model)
    split = model.split_inputs(inputs)

    def join(items):
        return inputs._replace(
            pixels=torch.cat([one.pixels for one in items]), layouts=tuple(x for one in items for x in one.layouts)
        )

    streams = [build_stream(own, model.config.rules) for own in parts]
    return list(zip(streams, (join(split[:2]), None, split[2]), strict=True))


@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_answers_about_images_equal_those_of_requests_alone(kind, monkeypatch):
    torch.manual_seed(0)
    model = randomize(VLM(CASES[kind]), spread=0.3).eval()
    encoded = []
    encode = VLM.encode_images
    monkeypatch.setattr(VLM, "encode_images", lambda self, inputs: encoded.append(1) or encode(self, inputs))
    rng = random.Random(0)
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_batched_tokens=11, num_pages=40, page_size=4))
    given = stream_requests(model)
    requests = [
        (build_engine_prompt(model, stream, images), SamplingParams(max_new_tokens=rng.randint(2, 9), sampling=how))
        for stream, images in given * 3
        for how in SAMPLINGS[:3]
    ]
    outputs = simulate(engine, requests, rng, set())
    assert len(encoded) == 3  # each image once
    references = [(stream, images) for stream, images in given * 3 for _ in SAMPLINGS[:3]]
    for (stream, images), (_, params), output in zip(references, requests, outputs, strict=True):
        alone = generate_from_streams(
            model, [stream], images, max_new_tokens=params.max_new_tokens, sampling=params.sampling
        )[0]
        assert output.ids == alone.ids
    check_clean(engine)


@torch.no_grad()
def test_equal_ids_with_another_image_share_nothing():
    model = randomize(VLM(CASES["llava"]), spread=0.3).eval()
    engine = Engine(model, EngineConfig(page_size=4))
    for colour in (0, 90, 255):
        inputs = model.prepare_images([Image.new("RGB", (28, 28), (colour, 20, 200))])
        stream = build_stream([text_part([3]), model.config.make_part(inputs.layouts[0])], model.config.rules)
        output = engine.generate([build_engine_prompt(model, stream, inputs)], SamplingParams(max_new_tokens=6))[0]
        alone = generate_from_streams(model, [stream], inputs, max_new_tokens=6, sampling=GREEDY)[0]
        assert output.ids == alone.ids
    assert engine.stats.prefix_hit_tokens == 0


def test_log_probabilities_are_those_of_the_model():
    model = DECODERS["llama"]()
    engine = Engine(model, EngineConfig(page_size=4))
    params = SamplingParams(max_new_tokens=5, logprobs=3, sampling=SamplingConfig(temperature=0.5, top_k=4, seed=1))
    plain = SamplingParams(max_new_tokens=7)
    output, other = engine.generate([EnginePrompt([1, 2, 3]), EnginePrompt([4])], [params, plain])
    assert not other.logprobs and len(output.logprobs) == 5
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *output.ids]]))[0, 2:-1].log_softmax(-1)
    for row, id, found in zip(logits, output.ids, output.logprobs, strict=True):
        assert found.logprob == pytest.approx(row[id].item(), abs=1e-4)
        assert found.top_ids == row.topk(3).indices.tolist()
        assert found.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_a_client_with_many_requests_does_not_delay_others():
    engine = Engine(DECODERS["llama"](), EngineConfig(max_num_seqs=2, max_batched_tokens=8, page_size=4))
    order = []

    def ask(client):
        engine.submit(
            EnginePrompt([1, 2]),
            SamplingParams(max_new_tokens=6),
            lambda events: order.append(client) if events[-1].end else None,
            client=client,
        )

    for _ in range(12):
        ask("greedy")
    for _ in range(3):
        engine.step()
    for client in ("b", "c"):
        ask(client)
    while engine.step():
        pass
    assert sorted(order) == ["b", "c"] + ["greedy"] * 12
    assert order.index("b") < 6 and order.index("c") < 6
    check_clean(engine)


def test_cancelled_requests_end_within_a_step():
    engine = Engine(DECODERS["llama"](), EngineConfig(max_num_seqs=1, page_size=4))
    events = {name: [] for name in "ab"}
    running, waiting = (
        engine.submit(EnginePrompt([1]), SamplingParams(max_new_tokens=50), events[name].extend) for name in "ab"
    )
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.step()
    assert [own[-1].end for own in events.values()] == ["cancelled", "cancelled"]
    assert len(events["a"]) == 2
    engine.cancel(running)  # again, without effect
    engine.step()
    check_clean(engine)


def test_impossible_requests_are_refused():
    engine = Engine(DECODERS["llama"](), EngineConfig(num_pages=4, page_size=4, max_waiting=1))
    for ids, params, error, match in (
        ([], {}, TextError, "empty"),
        ([V], {}, TextError, "outside of 0 … 60"),
        ([1] * CONTEXT, {"max_new_tokens": 1}, ConfigError, "context length 96"),
        ([1] * 9, {"max_new_tokens": 3}, ConfigError, "KV cache of 12"),
        ([1], {"max_new_tokens": 1, "adapter": "x"}, ConfigError, "adapter"),
    ):
        with pytest.raises(error, match=match):
            engine.submit(EnginePrompt(ids), SamplingParams(**params))
    engine.submit(EnginePrompt([1]), SamplingParams(max_new_tokens=1))
    with pytest.raises(QueueFullError):
        engine.submit(EnginePrompt([1]), SamplingParams(max_new_tokens=1))


def test_nan_logits_end_one_request_and_leave_the_others():
    model = DECODERS["llama"]()
    with torch.no_grad():
        model.embed.weight[5] = torch.nan
    engine = Engine(model, EngineConfig(page_size=4, max_num_seqs=2))
    bad, good = engine.generate([EnginePrompt([5]), EnginePrompt([1, 2])], SamplingParams(max_new_tokens=4))
    assert bad.end == "error" and "NaN" in str(bad.error)
    again = engine.generate([EnginePrompt([1, 2, 3])] * 3, SamplingParams(max_new_tokens=4))
    assert all(output.end != "error" for output in (good, *again))


def test_a_failed_pass_ends_its_requests_and_the_engine_continues(monkeypatch):
    engine = Engine(DECODERS["llama"](), EngineConfig(page_size=4))
    monkeypatch.setattr(engine.runner, "prefill", lambda chunks: (_ for _ in ()).throw(RuntimeError("out of memory")))
    (output,) = engine.generate([EnginePrompt([1])], SamplingParams(max_new_tokens=2))
    assert output.end == "error" and "RuntimeError" in str(output.error)
    monkeypatch.undo()
    (output,) = engine.generate([EnginePrompt([1])], SamplingParams(max_new_tokens=2))
    assert output.end == "length"
    check_clean(engine)


@pytest.mark.parametrize("part", ["decode", "delivery"])
def test_a_failed_device_ends_all_requests_and_refuses_new_ones(part, monkeypatch):
    """After a CUDA error every call fails, and the error may arrive when the host reads the tokens."""
    engine = Engine(DECODERS["llama"](), EngineConfig(page_size=4, max_num_seqs=1))

    def fail(*arguments, **options):
        raise RuntimeError("CUDA error")

    events = [[] for _ in range(3)]
    monkeypatch.setattr(engine.cache, "clear_pages", fail)
    monkeypatch.setattr(*((engine.runner, "decode", fail) if part == "decode" else (engine, "_deliver", fail)))
    for own in events:
        engine.submit(EnginePrompt([1]), SamplingParams(max_new_tokens=9), own.extend)
    engine.start()
    deadline = time.monotonic() + 30
    while not all(own and own[-1].end for own in events) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [own[-1].end for own in events] == ["error"] * 3
    params = SamplingParams(max_new_tokens=1)
    with pytest.raises(EngineFailedError, match="restart"):
        engine.submit(EnginePrompt([1]), params)
    with pytest.raises(EngineFailedError, match="restart"):
        engine.generate([EnginePrompt([1])], params)
    engine.close()


def test_the_thread_serves_and_drains():
    engine = Engine(DECODERS["llama"](), EngineConfig(page_size=4))
    engine.start()
    (output,) = engine.generate([EnginePrompt([1, 2])], SamplingParams(max_new_tokens=5))
    assert len(output.ids) == 5
    events = []
    engine.submit(EnginePrompt([3]), SamplingParams(max_new_tokens=20), events.extend)
    engine.close(drain_seconds=30)
    assert events[-1].end == "length"
    with pytest.raises(QueueFullError):
        engine.submit(EnginePrompt([3]), SamplingParams(max_new_tokens=20))


def test_models_that_need_whole_rows_are_refused():
    from vitrail.nn.rotary_embedding import DynamicNTKScaling

    rotary = RotaryConfig(head_dim=8, scaling=DynamicNTKScaling(factor=2.0, original_length=8))
    model = Decoder(DecoderConfig(vocab_size=V, layers=1, block=block(), rotary=rotary))
    with pytest.raises(ConfigError, match="length of a row"):
        Engine(model)
    assert VOCAB == V


def test_captured_steps_have_a_size_for_every_batch():
    for count in (1, 2, 5, 64, 65, 100, 256):
        sizes = batch_sizes(count)
        assert sizes == sorted(set(sizes)) and sizes[-1] == count
    assert [choose_splits(rows, 8) for rows in (1, 4, 16, 64, 256)] == [32, 16, 4, 1, 1]
    for width in (7, 512):
        logits = torch.randn(3, width)
        logits[1, 5] = torch.nan
        ids, finite = select_most_likely(logits)
        assert finite.tolist() == [True, False, True]
        assert ids[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
