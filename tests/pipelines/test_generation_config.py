"""Sampling settings of generation_config.json select the tokens that transformers selects."""

import json

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from vitrail.errors import CheckpointError, ConfigError
from vitrail.generate.sampling import GREEDY, SamplingConfig, process_logits
from vitrail.pipelines.generation_config import read_sampling

# Settings of released models, without ids and versions.
RELEASED = {
    "Qwen/Qwen2-VL-2B-Instruct": {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.001},
    "Qwen/Qwen2.5-VL-3B-Instruct": {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.000001},
    "Qwen/Qwen3-VL-2B-Instruct": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "google/gemma-3-4b-it": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
    "meta-llama/Llama-3.2-11B-Vision-Instruct": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    "llava-hf/llava-1.5-7b-hf": {"pad_token_id": 32001, "transformers_version": "4.46.0"},
    "microsoft/Florence-2-large-ft": {"num_beams": 3, "early_stopping": True},
    "sampling without further settings": {"do_sample": True},
    "all tokens": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "greedy with a penalty": {"repetition_penalty": 1.2, "temperature": 0.5},
    "null settings": {"do_sample": True, "temperature": None, "top_k": None, "top_p": None},
}


@pytest.mark.parametrize("name", RELEASED)
def test_processed_logits_match_transformers(name, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(RELEASED[name]))
    sampling = read_sampling(tmp_path)
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    theirs, _ = model._prepare_generation_config(GenerationConfig.from_pretrained(tmp_path))
    assert sampling.is_greedy == (not theirs.do_sample or theirs.temperature < 1e-3)
    processors = model._get_logits_processor(theirs, input_ids_seq_length=3)
    ids, logits = torch.tensor([[3, 5, 7]]), torch.randn(1, 100) * 3
    seen = torch.zeros(1, 100, dtype=torch.bool).index_fill(1, ids[0], True)
    ours, expected = process_logits(logits, sampling, seen), processors(ids, logits.clone())
    if sampling.is_greedy:
        assert ours.argmax() == expected.argmax()
    else:
        assert torch.equal(ours.isinf(), expected.isinf())
        torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1))


def test_folder_without_a_file_is_greedy(tmp_path):
    assert read_sampling(tmp_path) == GREEDY


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": "yes"}, "do_sample"),
        ({"do_sample": True, "temperature": "warm"}, "temperature"),
        ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "top_k": 1.5}, "top_k"),
        ([], "not a JSON object|object"),
    ],
)
def test_invalid_settings_name_file_and_key(settings, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        read_sampling(tmp_path)
    assert str(tmp_path / "generation_config.json") in error.value.problem and error.value.remedy


def test_settings_of_a_checkpoint_reach_the_pipelines(tmp_path):
    from vitrail import hub
    from vitrail.backbones.decoder import Decoder, DecoderConfig
    from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
    from vitrail.pipelines.text import TextPipeline
    from vitrail.processing.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(["a text"], 300)
    block = BlockConfig(
        width=8, attention=AttentionConfig(heads=1), mlp=GatedMLPConfig(intermediate_size=8), norm="rms"
    )
    config = DecoderConfig(vocab_size=300, layers=1, block=block, rotary=RotaryConfig(8), context_length=32)
    hub.to_hf(Decoder(config), tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_p": 0.8}')
    assert TextPipeline.load(tmp_path, device="cpu").checkpoint_sampling == SamplingConfig(
        temperature=0.7, top_k=50, top_p=0.8
    )
