"""OpenGVLab's layout of InternVL matches transformers' InternVL with the same weights."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from helpers import randomize, relative
from hub.test_released_configs import RELEASED
from hub.vlm_parity import VALUES, build_samples, check_parity, compute_logits, compute_reference, pixels_alone
from vitrail import hub
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, to_hf
from vitrail.processing.chat_template_presets import INTERNVL_CONVERSATIONS
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES

IMAGE = 92
SIZE = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 99, "intermediate_size": 47}
SIZE |= {"num_key_value_heads": 2, "tie_word_embeddings": False}
TOWER = {"hidden_size": 24, "intermediate_size": 37, "num_attention_heads": 2, "num_hidden_layers": 3}
TOWER |= {"image_size": 12, "patch_size": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-6}
TILES = {"dynamic_image_size": True, "use_thumbnail": True, "min_dynamic_patch": 1, "max_dynamic_patch": 5}
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<img>", "</img>"]


def internvl(text, vision=(), **more):
    vision = T.InternVLVisionConfig(**TOWER | {"attention_bias": True} | dict(vision))
    config = T.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, tie_word_embeddings=False, **more
    )
    return randomize(T.InternVLForConditionalGeneration(config).eval(), spread=0.1)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
CASES = {
    "internlm2": lambda: internvl(T.LlamaConfig(**SIZE, rope_parameters=DYNAMIC)),
    "internlm2, biased, one layer down": lambda: internvl(
        T.LlamaConfig(**SIZE | {"num_key_value_heads": 6}, attention_bias=True), vision_feature_layer=-2
    ),
    "qwen2, merged by 4": lambda: internvl(T.Qwen2Config(**SIZE, rope_parameters=DYNAMIC), downsample_ratio=0.25),
    "llama, InternViT-6B": lambda: internvl(
        T.LlamaConfig(**SIZE), {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
    ),
}
TOWER_NAMES = {
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "encoder.layer.": "encoder.layers.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "lambda_": "ls",
}
PROJECTOR_NAMES = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def replace_all(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def join_qkv(tensors: dict[str, Tensor], query: str, name: str, groups: int, head_dim: int) -> None:
    """Join q, k and v. With groups, their rows alternate: the queries of a group, its key, its value."""
    q, k, v = (tensors.pop(query.replace("q_proj", f"{x}_proj")) for x in "qkv")
    if groups:
        rows = [x.reshape(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
        tensors[name] = torch.cat(rows, 1).reshape(-1, *q.shape[1:])
    else:
        tensors[name] = torch.cat([q, k, v])


def write_original(reference, folder: Path, internlm2: bool = False, **more) -> None:
    """Write a model of transformers in OpenGVLab's layout."""
    config, tensors = reference.config, {}
    text, vision = config.text_config, config.vision_config
    for name, tensor in reference.state_dict().items():
        tensor, name = tensor.clone(), name.removeprefix("model.")
        if name.startswith("vision_tower."):
            name = "vision_model." + replace_all(name.removeprefix("vision_tower."), TOWER_NAMES)
        elif name.startswith("multi_modal_projector."):
            name = "mlp1." + replace_all(name.removeprefix("multi_modal_projector."), PROJECTOR_NAMES)
        else:
            name = name.replace("language_model.", "model.")
            name = "language_model." + (replace_all(name, INTERNLM2_NAMES) if internlm2 else name)
        tensors[name] = tensor
    for name in [name for name in tensors if name.startswith("vision_model.") and ".q_proj." in name]:
        join_qkv(tensors, name, name.replace("q_proj", "qkv"), 0, 0)
    if internlm2:
        head_dim = text.hidden_size // text.num_attention_heads
        for name in [name for name in tensors if ".self_attn.q_proj." in name]:
            target = name.replace("self_attn.q_proj", "attention.wqkv")
            join_qkv(tensors, name, target, text.num_key_value_heads, head_dim)
    rope = text.rope_parameters
    llm = {**SIZE, "num_key_value_heads": text.num_key_value_heads, "rope_theta": rope["rope_theta"]}
    llm |= {"rms_norm_eps": text.rms_norm_eps, "max_position_embeddings": text.max_position_embeddings}
    llm |= {"model_type": "internlm2" if internlm2 else text.model_type, "bias": getattr(text, "attention_bias", False)}
    llm["rope_scaling"] = {"type": "dynamic", "factor": rope["factor"]} if rope["rope_type"] == "dynamic" else None
    tower = {**TOWER, "qkv_bias": vision.attention_bias, "qk_normalization": vision.use_qk_norm}
    tower |= {"norm_type": vision.norm_type, "model_type": "intern_vit_6b"}
    about = {"model_type": "internvl_chat", "llm_config": llm, "vision_config": tower, "ps_version": "v2", **TILES}
    about |= {"downsample_ratio": config.downsample_ratio, "select_layer": config.vision_feature_layer}
    about |= {"force_image_size": 12, "template": "internvl2_5"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about | more))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    def write(reference, folder):
        write_original(reference, folder, "internlm2" in case)

    ours = check_parity(CASES[case](), tmp_path, write=write)
    assert (ours.config.policy.max_tiles, ours.config.rules.fill_id) == (5, IMAGE)


@pytest.mark.parametrize("case", CASES)
def test_exports_as_internvl(case, tmp_path):
    reference = CASES[case]()
    write_original(reference, tmp_path / "own", "internlm2" in case)
    ours = from_hf(tmp_path / "own")
    to_hf(ours, tmp_path / "export")
    exported = T.AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
    a, b = reference.state_dict(), exported.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    samples, shown = build_samples(ours)
    expected = compute_reference(exported, samples, shown, pixels_alone)
    for x, y in zip(compute_logits(ours, samples, shown), expected, strict=True):
        assert relative(x, y) <= VALUES
    with pytest.raises(VitrailError, match="possible: internvl"):
        to_hf(ours, tmp_path / "out", family="internvl_chat")


def test_internlm2_alone(tmp_path):
    reference = randomize(T.LlamaForCausalLM(T.LlamaConfig(**SIZE)).eval(), spread=0.1)
    tensors = {replace_all(name, INTERNLM2_NAMES): x.clone() for name, x in reference.state_dict().items()}
    for name in [name for name in tensors if ".q_proj." in name]:
        join_qkv(tensors, name, name.replace("self_attn.q_proj", "attention.wqkv"), 2, 6)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm2", **SIZE, "bias": False}))
    ids = torch.tensor([[1, 5, 9, 2]])
    ours = hub.load(tmp_path)
    assert relative(ours(ids), reference(ids).logits) <= VALUES
    rules = FAMILIES["internlm2"].tensor_rules(ours.config)
    state = ours.state_dict()
    for rule in rules:
        for name, tensor in zip(rule.hf, rule.export([state[native] for native in rule.native]), strict=True):
            assert torch.equal(tensor, tensors[name])


# ---- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversation", INTERNVL_CONVERSATIONS)
def test_prompts_are_those_of_the_published_code(conversation, tmp_path):
    """The template of the conversation, also if the tokenizer has one of the language model alone."""
    words = Tokenizer.train(["What is this?"], 400, special_tokens=[*SPECIALS, "<IMG_CONTEXT>"], bos="<s>", eos="</s>")
    words.chat_template = "{{ messages[0].content + '' }}"
    reference = internvl(T.LlamaConfig(**SIZE | {"vocab_size": words.vocab_size}))
    write_original(reference, tmp_path, template=conversation)
    words.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    about = json.loads((tmp_path / "config.json").read_text())
    about["llm_config"]["vocab_size"] = words.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(about))
    pipeline = vitrail.load(tmp_path, device="cpu")
    stream = pipeline.build_prompt([pipeline.build_message(Image.new("RGB", (12, 24)), "What is this?")]).stream
    row = INTERNVL_CONVERSATIONS[conversation]
    text = words.decode(stream.ids.tolist())
    assert text == (
        f"<s>{row['system_start']}{row['default_system']}{row['separator']}{row['user_start']}"
        f"<img>{'<IMG_CONTEXT>' * 12}</img>\nWhat is this?{row['separator']}{row['assistant_start']}"
    )
    assert row["separator"].startswith("<|end|>" if conversation == "phi3-chat" else "<|im_end|>")


def test_image_token_is_that_of_the_tokenizer(tmp_path):
    family = FAMILIES["internvl_chat"]
    about = RELEASED["OpenGVLab/InternVL2-8B"]["config.json"]
    assert family.read_config(about, tmp_path / "config.json").image_token_id == 92_546
    for name, content in {
        "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<img>"}, {"id": 8, "content": "<IMG_CONTEXT>"}]},
        "tokenizer_config.json": {"added_tokens_decoder": {"9": {"content": "<IMG_CONTEXT>"}}},
        "added_tokens.json": {"<IMG_CONTEXT>": 10},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
        expected = int(re.findall(r"\d+", json.dumps(content))[-1])
        assert family.read_config(about, tmp_path / "config.json").image_token_id == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ps_version": "v1"}, "ps_version is 'v1'"),
        ({"pad2square": True}, "pad2square"),
        ({"use_thumbnail": False}, "use_thumbnail is false"),
        ({"force_image_size": 448}, "force_image_size is 448, but the tower has positions for images of 12 pixels"),
        ({"llm_config": {"model_type": "mamba"}}, "llm_config.model_type 'mamba'"),
        ({"vision_config": {"model_type": "uniflow"}}, "vision_config.model_type 'uniflow'"),
        ({"select_layer": [-1, -2]}, "several layers"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    write_original(CASES["internlm2"](), tmp_path, True, **change)
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_one_view_without_dynamic_image_size(tmp_path):
    write_original(CASES["internlm2"](), tmp_path, True, dynamic_image_size=False)
    assert from_hf(tmp_path).config.policy.max_tiles == 1
