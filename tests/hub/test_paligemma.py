"""PaliGemma 1 and 2 match transformers on random checkpoints of unusual shapes."""

import json

import pytest
import torch
import transformers as T

from helpers import randomize, relative
from hub.test_llava import pictures
from hub.vlm_parity import VALUES, check_exports, check_parity, compute_reference
from vitrail.errors import VitrailError
from vitrail.hub import from_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.nn import KVCache
from vitrail.stream import build_stream, pack_streams, text_part

TEXT = {"hidden_size": 24, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 10}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 99}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 17, "patch_size": 5, "vision_use_head": False}


def paligemma(text=T.GemmaConfig, vision=(), tied=True, **more):
    config = T.PaliGemmaConfig(
        text_config=text(**TEXT | more, tie_word_embeddings=tied),
        vision_config=T.SiglipVisionConfig(**TOWER | dict(vision)),
        image_token_index=98,
        projection_dim=24,
        tie_word_embeddings=tied,
    )
    model = T.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="eager")  # others do not cap
    if cap := getattr(config.text_config, "final_logit_softcapping", None):  # transformers caps none: see hub.paligemma
        model.lm_head.register_forward_hook(lambda head, given, logits: cap * torch.tanh(logits / cap))
    return randomize(model.eval(), spread=0.1)


CASES = {
    "PaliGemma": lambda: paligemma(),
    "PaliGemma, untied": lambda: paligemma(tied=False, num_key_value_heads=1, vision={"vision_use_head": True}),
    "PaliGemma 2": lambda: paligemma(T.Gemma2Config, query_pre_attn_scalar=7, attn_logit_softcapping=3.0),
    "PaliGemma 2, narrow window": lambda: paligemma(T.Gemma2Config, sliding_window=4, final_logit_softcapping=2.0),
}


def inputs(sample, mask, views):
    given = {"token_type_ids": (sample.spans == 0).long()[None]}  # 0: prompt, 1: answer
    return given | ({"pixel_values": torch.cat(views)} if views else {})


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    check_parity(CASES[case](), tmp_path, inputs)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_causal(case, tmp_path):
    """Targets after a bidirectional prompt, in one pass and token by token from a cache."""
    reference = CASES[case]()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    shown, question, answer = ours.prepare_images(pictures((30, 40))), text_part([4, 6, 7]), [9, 11, 5]
    image = ours.config.make_part(shown.layouts[0])
    sample = build_stream([image, question, text_part(answer, loss_mask=True)], ours.config.rules)
    prompt = build_stream([image, question], ours.config.rules)
    assert sample.spans.tolist() == [1] * len(prompt) + [0] * 3 and prompt.spans.all()
    [expected] = compute_reference(reference, [sample], [shown], inputs)
    with torch.no_grad():
        assert relative(ours(pack_streams([sample], len(sample)), shown)[0], expected) <= VALUES
        cache = ours.decoder.make_cache(1)
        assert isinstance(cache, KVCache)
        hidden = [ours.forward_hidden(pack_streams([prompt], len(prompt)), shown, cache=cache)]
        hidden += [ours.decoder.forward_hidden(torch.tensor([[id]]), cache=cache) for id in answer]
        logits = ours.decoder.compute_logits(torch.cat(hidden, 1))[0]
    assert relative(logits, expected) <= VALUES


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    check_exports(CASES[case](), tmp_path, normalize_llava_config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projection_dim": 48}, "projection_dim is 48, but text_config.hidden_size is 24"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type 'clip_vision_model'"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama'"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    paligemma().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)
