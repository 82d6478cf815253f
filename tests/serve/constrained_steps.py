"""A tiny text model, and its answers of a schema with and without overlapping steps. Needs no dev extra."""

import copy

from helpers import randomize
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.generate import SamplingConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.pipelines import TextPipeline
from vitrail.processing.tokenizer import Tokenizer
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EngineOutput, EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.token_constraints import ConstraintCompiler, build_json_grammar

SAID = ["the red cube is behind the blue ball", "how many balls are there?", "a dog and a cat and a lamp"]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def text_pipeline(context: int = 128) -> TextPipeline:
    tokenizer = Tokenizer.train(SAID * 3, 300, bos="<s>", eos="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{{ ' ' }}{% endfor %}a:"
    )
    block = BlockConfig(
        width=32, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=40), norm="rms"
    )
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, layers=2, block=block, rotary=RotaryConfig(head_dim=8), context_length=context
    )
    return TextPipeline(randomize(Decoder(config), spread=0.3), tokenizer)


PIPELINE = text_pipeline(context=2000)


def compare_overlapping_steps(device: str) -> list[EngineOutput]:
    """Run requests with and without a schema beside each other, on the CPU and with overlapping steps on the device.

    On a GPU, the host reads the tokens of a step after it launched the next one. Both runs give the same answers.
    Returns those of the schema `CITY`.
    """
    tokenizer = PIPELINE.tokenizer
    compiler = ConstraintCompiler(tokenizer, tokenizer.stop_ids)
    prompt, schema = EnginePrompt(tokenizer.encode("a dog")), build_json_grammar(CITY)
    stop_ids = tuple(tokenizer.stop_ids)
    samplings = [SamplingConfig(temperature=1.0, seed=seed) for seed in range(3)]
    params = [
        SamplingParams(max_new_tokens=120, stop_ids=stop_ids if i % 2 else (), sampling=samplings[i // 2])
        for i in range(6)
    ]
    outputs: dict[bool, list[EngineOutput]] = {}
    for overlaps in (False, True):
        model = copy.deepcopy(PIPELINE.model).to(device if overlaps else "cpu")
        config = EngineConfig(max_num_seqs=3, page_size=4, num_pages=33, max_batched_tokens=9)
        engine = Engine(model, config, num_known_ids=tokenizer.vocab_size)
        engine._overlaps = overlaps
        constraints = [compiler.compile(schema) if i % 2 else None for i in range(6)]
        outputs[overlaps] = engine.generate([prompt] * 6, params, constraints)
        assert engine.stats.preemptions and engine.stats.pages_used == 0
    assert [(one.ids, one.end) for one in outputs[False]] == [(one.ids, one.end) for one in outputs[True]]
    return outputs[True][1::2]
