"""Fuyu and Persimmon match transformers: logits, gradients, exports, patches and prompts."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers as T
from PIL import Image
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_llava import pictures
from hub.vlm_parity import PICTURES, VALUES, check_exports, check_parity
from vitrail.connectors import ProjectorConfig
from vitrail.encoders import PatchTowerConfig
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.processing.shrink_to_fit import ShrinkPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import build_stream, pack_streams, text_part

IMAGE, NEWLINE, PATCH = 96, 95, 5
TEXT = {"hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT |= {"vocab_size": 99, "max_position_embeddings": 1024, "layer_norm_eps": 1e-4}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}}


def fuyu(**more) -> T.FuyuForCausalLM:
    text = {"model_type": "persimmon", **TEXT, **HALF, **more.pop("text", {})}
    config = T.FuyuConfig(text_config=text, patch_size=PATCH, image_size=20, image_token_id=IMAGE, **more)
    config.image_newline_id = NEWLINE
    return randomize(T.FuyuForCausalLM(config).eval(), spread=0.15)


def inputs(sample, mask, views) -> dict:
    return {"pixel_values": torch.cat(views)} if views else {}


CASES = {
    "fuyu": dict,
    "no norm of queries and keys": lambda: {"text": {"qk_layernorm": False, "hidden_act": "gelu"}},
    "grey images": lambda: {"num_channels": 1},
}


@pytest.mark.parametrize("case", ["fuyu", "no norm of queries and keys"])
def test_matches_transformers(case, tmp_path):
    ours = check_parity(fuyu(**CASES[case]()), tmp_path, inputs)
    layouts = [ours.config.policy.layout(*size) for sizes in PICTURES for size in sizes]
    assert [(x.views[0].grid.h, x.views[0].grid.w) for x in layouts] == [(8, 18), (7, 7), (13, 4), (20, 2)]
    assert not list(ours.tower.parameters())


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    check_exports(fuyu(**CASES[case]()), tmp_path, normalize_llava_config)


def test_released_names_and_flat_config(tmp_path):
    """The released file lists the keys of the language model itself; exports have the released tensor names."""
    fuyu().save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    from safetensors import safe_open

    with safe_open(tmp_path / "back/model.safetensors", "pt") as stored:
        names = set(stored.keys())
    block = "language_model.model.layers.0."
    assert {"vision_embed_tokens.weight", "language_model.lm_head.weight", f"{block}self_attn.q_layernorm.bias"} < names
    json_config = json.loads((tmp_path / "back/config.json").read_text())
    assert json_config["hidden_size"] == json_config["text_config"]["hidden_size"] == 48
    flat = {key: value for key, value in json_config.items() if key != "text_config"} | {"text_config": {}}
    flat |= {"rope_theta": 5e3, "rope_parameters": None}
    (tmp_path / "back/config.json").write_text(json.dumps(flat))
    again = from_hf(tmp_path / "back")
    assert normalize_llava_config(again.config) == normalize_llava_config(ours.config)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


def test_persimmon_matches_transformers(tmp_path):
    reference = randomize(T.PersimmonForCausalLM(T.PersimmonConfig(**TEXT, **HALF)).eval(), spread=0.15)
    reference.save_pretrained(tmp_path / "hf")
    ours, ids = from_hf(tmp_path / "hf").eval(), torch.randint(0, 99, (2, 30))
    assert relative(ours(ids), reference(ids).logits) <= VALUES
    to_hf(ours, tmp_path / "back", family="persimmon")
    back = T.PersimmonForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in reference.state_dict().items())


# ---- processor ---------------------------------------------------------------------------------------------------

WORDS = ["|ENDOFTEXT|", "|SPEAKER|", "|NEWLINE|", "<0x04>", "▁"]
SIZE, SIDE = {"height": 60, "width": 80}, 20
SIZES = [(40, 90), (33, 31), (64, 20), (60, 80), (5, 3), (61, 79), (300, 410), (3, 900)]
ASK = "What is this?"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A random checkpoint; the words of its tokenizer are pieces, not special tokens, as in the released one."""
    letters = sorted(set(ASK + "a red cube,\n") - {" "})
    pieces = [("<unk>", 0.0), ("<s>", -1.0), *((word, -1.0) for word in WORDS), *((x, -2.0) for x in letters)]
    rust = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    rust.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    rust.add_special_tokens(["<unk>", "|ENDOFTEXT|"])
    rust.save(str(tmp_path / "tokenizer.json"))
    roles = {"bos_token": "|ENDOFTEXT|", "eos_token": "|ENDOFTEXT|", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))
    ids = {"image_token_id": rust.token_to_id("|SPEAKER|"), "image_newline_id": rust.token_to_id("|NEWLINE|")}
    text = {"model_type": "persimmon", **TEXT, **HALF, "vocab_size": rust.get_vocab_size()}
    config = T.FuyuConfig(text_config=text, patch_size=SIDE, image_token_id=ids["image_token_id"])
    config.image_newline_id = ids["image_newline_id"]
    randomize(T.FuyuForCausalLM(config).eval(), spread=0.3).save_pretrained(tmp_path)
    json_config = {"image_processor_type": "FuyuImageProcessor", "padding_mode": "constant", "padding_value": 1.0}
    json_config |= {"target_height": SIZE["height"], "target_width": SIZE["width"]}
    json_config |= {"patch_size": {"height": SIDE, "width": SIDE}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(json_config))
    return tmp_path


class PatchingProcessor(FuyuImageProcessorPil):
    """The processor of transformers for PIL, whose patches are made of arrays only."""

    def patchify_image(self, image, patch_size=None):
        return torch.tensor(super().patchify_image(np.asarray(image), patch_size))[None]


@pytest.mark.parametrize("size", SIZES)
def test_patches_and_ids_match_transformers(size, folder):
    pipeline, [image] = vitrail.load(folder, device="cpu"), pictures(size)
    tokenizer = T.PreTrainedTokenizerFast.from_pretrained(folder)
    processor = T.FuyuProcessor(PatchingProcessor(size=SIZE, patch_size={"height": SIDE, "width": SIDE}), tokenizer)
    if size == (3, 900):  # transformers resizes it to a height of 0
        assert pipeline.model.config.policy.layout(*size).views[0].resized_size == (1, 80)
        return
    expected = processor(images=image, text=ASK, return_legacy_image_output=False, return_tensors="pt")
    prompt = pipeline.build_prompt([pipeline.build_message(image, ASK)])
    assert prompt.stream.ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.images.pixels, expected["pixel_values"])
    reference = T.FuyuForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = pipeline.model(pack_streams([prompt.stream], len(prompt.stream)), prompt.images)[0]
        theirs = reference(input_ids=expected["input_ids"], pixel_values=expected["pixel_values"]).logits[0]
    assert relative(logits, theirs) <= VALUES


def test_answers_equal_greedy_text_of_transformers(folder):
    pipeline, image = vitrail.load(folder, device="cpu"), Image.new("RGB", (50, 30), (200, 30, 60))
    prompt = pipeline.build_prompt([pipeline.build_message(image, ASK)])
    reference = T.FuyuForCausalLM.from_pretrained(folder).eval()
    ids = prompt.stream.ids[None]
    found = reference.generate(
        input_ids=ids, pixel_values=prompt.images.pixels, max_new_tokens=6, do_sample=False, eos_token_id=-1
    )
    expected = pipeline.tokenizer.decode(found[0, ids.shape[1] :].tolist()).partition("|ENDOFTEXT|")[0]
    assert pipeline.ask(image, ASK, max_new_tokens=6) == expected.strip()
    assert isinstance(pipeline.ask([], ASK, max_new_tokens=2), str)


def test_prompts_that_fuyu_does_not_take_raise(folder):
    pipeline = vitrail.load(folder, device="cpu")
    question = pipeline.build_message(Image.new("RGB", (9, 9)), ASK)
    text, spans = pipeline.chat_template.render_spans([question, {"role": "assistant", "content": "a cube"}])
    assert text == f"|SPEAKER|<s>{ASK}<0x04>a cube|ENDOFTEXT|"
    assert [text[slice(*span)] for span in spans] == ["a cube|ENDOFTEXT|"]
    with pytest.raises(VitrailError, match="one question"):
        pipeline.chat([{"role": "system", "content": "a"}, question])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"text_config": {"hidden_act": "mish"}}, "hidden_act 'mish'"),
        ("preprocessor_config.json", {"patch_size": {"height": 30, "width": 30}}, "patch_size"),
        ("preprocessor_config.json", {"padding_mode": "reflect"}, "padding_mode"),
        ("preprocessor_config.json", {"padding_value": 0.5}, "padding_value is 0.5"),
        ("preprocessor_config.json", {"target_height": 61}, "not whole patches"),
    ],
)
def test_unsupported_settings_raise(file, change, message, folder):
    json_config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(json_config | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(folder)


def test_processor_config_of_transformers_is_read(folder):
    FuyuImageProcessorPil(size=SIZE, patch_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    ours = from_hf(folder)
    policy = ShrinkPolicy(patch_size=SIDE, max_height=60, max_width=80)
    assert (ours.config.policy, ours.config.mean, ours.config.std) == (policy, (0.5,) * 3, (0.5,) * 3)
    to_hf(ours, folder / "back")
    assert from_hf(folder / "back").config == ours.config


# ---- other models without an encoder -----------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_any_model_can_do_without_an_encoder(channels, tmp_path):
    """A tower of patches with images of one size: the projector reads the pixels, channels last."""
    decoder = FAMILIES["persimmon"].from_hf_config(TEXT)
    config = VLMConfig(
        tower=PatchTowerConfig(image_size=20, patch_size=10, channels=channels),
        connector=ProjectorConfig(in_features=100 * channels, out_features=48, layers=1),
        decoder=decoder,
        policy=NaivePolicy(image_size=20, patch_size=10),
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )
    assert decoder.block.mlp.activation == "relu2"
    model = randomize(VLM(config))
    pixels = torch.randn(2, channels, 20, 20)
    patches = torch.stack([pixels[..., y : y + 10, x : x + 10] for y in (0, 10) for x in (0, 10)], dim=1)
    expected = model.connector.layers.linears[0](patches.movedim(2, -1).flatten(2))
    torch.testing.assert_close(model.encode_views(pixels), expected)
    layout = config.policy.layout(7, 9)
    assert config.count_tokens(layout) == 4
    stream = build_stream([config.make_part(layout), text_part([1, 2])], config.rules)
    assert len(stream) == 6
    save(model, tmp_path / "own")
    assert load(tmp_path / "own").config == config
    work = model.workload([(7, 9)], 2)
    assert model.cost_components(work)["tower"].flops == 0 < model.cost_components(work)["connector"].flops


def test_patch_tower_needs_a_patch():
    with pytest.raises(VitrailError, match="at least one patch"):
        PatchTowerConfig(image_size=20, patch_size=30)
    assert np.prod([PatchTowerConfig().width]) == 2700
