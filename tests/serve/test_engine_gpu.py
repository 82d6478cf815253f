"""The engine on a GPU, with CUDA graphs and Triton kernels, generates the tokens of the model without it."""

import json
import random

import pytest
import torch

from generate.test_vlm_generation import CASES
from helpers import randomize, relative
from serve.constrained_steps import CITY, PIPELINE, compare_overlapping_steps
from serve.test_engine import DECODERS, SAMPLINGS, V, check_clean, simulate, stream_requests
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.generate import generate_texts
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vlm import VLM
from vitrail.nn import AttentionPlan, PagedKVCache, PagedPass
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.model_runner import build_engine_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@torch.no_grad()
def test_answers_equal_those_on_the_cpu(kind):
    cpu_model, rng = DECODERS[kind](), random.Random(0)
    model = DECODERS[kind]().cuda()
    engine = Engine(model, EngineConfig(max_num_seqs=6, max_batched_tokens=33, num_pages=40, page_size=4))
    requests = [
        (
            EnginePrompt([rng.randrange(V) for _ in range(rng.randint(1, 30))]),
            SamplingParams(max_new_tokens=rng.randint(1, 20), sampling=rng.choice(SAMPLINGS)),
        )
        for _ in range(20)
    ]
    for (prompt, params), output in zip(requests, simulate(engine, requests, rng, set()), strict=True):
        options = {"max_new_tokens": params.max_new_tokens, "sampling": params.sampling}
        assert output.ids == generate_texts(cpu_model, [prompt.ids], **options)[0].ids
    check_clean(engine)


@torch.no_grad()
def test_answers_about_images_equal_those_on_the_cpu():
    cpu_model = randomize(VLM(CASES["qwen3"]), spread=0.3).eval()
    model = randomize(VLM(CASES["qwen3"]), spread=0.3).eval().cuda()
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_batched_tokens=11, num_pages=60, page_size=4))
    pairs = zip(stream_requests(cpu_model), stream_requests(model), strict=True)
    for (stream, images), (_, gpu_images) in pairs:
        (output,) = engine.generate([build_engine_prompt(model, stream, gpu_images)], SamplingParams(max_new_tokens=8))
        options = {"max_new_tokens": 8, "sampling": SAMPLINGS[0]}
        assert output.ids == generate_from_streams(cpu_model, [stream], images, **options)[0].ids


def test_answers_of_a_schema_equal_those_on_the_cpu():
    pytest.importorskip("llguidance")
    for output in compare_overlapping_steps("cuda"):
        assert json.loads(PIPELINE.tokenizer.decode(output.ids)).keys() == CITY["properties"].keys()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 64), (16, 8, 128), (8, 8, 256), (12, 2, 32)])
@pytest.mark.parametrize("splits", [1, 8])
@torch.no_grad()
def test_paged_attention_in_bfloat16(heads, kv_heads, width, splits):
    lengths = [1, 700, 64, 65, 1000]
    cache = PagedKVCache([(kv_heads, width)], 200, 16, dtype=torch.bfloat16, device="cuda")
    cache.k[0].normal_()
    cache.v[0].normal_()
    tables = (torch.randperm(199, device="cuda")[:189] + 1).int()
    tables = torch.stack([tables[row * 37 : row * 37 + 37].repeat(2)[:63] for row in range(5)])
    slots, rows = torch.tensor(lengths, device="cuda") - 1, torch.arange(5, device="cuda")
    batch = PagedPass(cache, slots, rows, tables, max(lengths), splits=splits)
    q = torch.randn(1, 5, heads, width, device="cuda", dtype=torch.bfloat16)
    plan, layer = AttentionPlan(causal=True), batch.layer(0)
    assert relative(layer._attend_by_kernel(q[0], plan, None).float(), layer.attend_plain(q, plan)[0].float()) < 0.02


@torch.no_grad()
def test_large_decoder_in_bfloat16_agrees_with_a_full_pass():
    config = DECODER_PRESETS["perf-1.1b"].replace(layers=4)
    with torch.device("cuda"):
        model = Decoder(config).bfloat16().eval()
    prompts = [[(3 * row + i) % 900 for i in range(20 + 30 * row)] for row in range(9)]
    for max_num_seqs in (1, 9):
        engine = Engine(model, EngineConfig(max_num_seqs=max_num_seqs, num_pages=400, max_batched_tokens=256))
        logits = []
        decode = engine.runner.decode

        def keep_logits(sequences, decode=decode, logits=logits, **options):
            result = decode(sequences, **options)
            logits += [
                (sequence, sequence.num_computed, row.float().clone())
                for sequence, row in zip(sequences, result.logits, strict=True)
            ]
            return result

        engine.runner.decode = keep_logits
        outputs = engine.generate([EnginePrompt(ids) for ids in prompts], SamplingParams(max_new_tokens=5))
        full_logits = {
            tuple(ids): model(torch.tensor([ids + output.ids], device="cuda"))[0].float()
            for ids, output in zip(prompts, outputs, strict=True)
        }
        for sequence, slot, row in logits:
            assert relative(row, full_logits[tuple(sequence.prompt.ids)][slot]) < 0.05
