"""Random checkpoints in the shape of released models, shrunk: real config and processor files with smaller sizes.

A checkpoint has the keys, flags and scalings of the released files, the weight names of its family, and a tokenizer
with the special tokens of the model at new ids.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import randomize
from hub.test_released_configs import RELEASED
from vitrail.hub.checkpoint_info import find_checkpoint
from vitrail.hub.safetensors_files import write_weights
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.tokenizer_files import FLORENCE2_TOKENS
from vitrail.registry import FAMILIES

JSON = dict[str, Any]

TEXTS = ["USER: what is this? ASSISTANT: a red cube. Question: how many? Answer: User: what?\nAssistant: a blue ball"]
LAYERS, HEAD_DIM, WINDOW = 4, 32, 16
VISION_LAYERS, VISION_WIDTH, VISION_HEADS = 4, 64, 2
TEXT_PARTS, VISION_PARTS = ("text_config", "llm_config"), ("vision_config",)


class ReleasedModel(NamedTuple):
    """A row of the table of models.

    tokens          special tokens: key of the config that holds the id → token
    more            further special tokens
    named           tokens of the roles bos, eos and pad
    patch           changes to the shrunk config.json
    patch_files     changes to the shrunk processor files
    template        chat template; default: that of the released files, or else of the family
    is_served       whether vLLM serves the exported model; if not, vllm_reason says why
    vllm_reason     what vLLM 0.32 for CPUs says about the exported model
    vllm_patch      changes to the shrunk config.json for vLLM, which takes fewer sizes
    vllm_images     images of a prompt at most in vLLM
    vllm_inserts    vLLM inserts the tokens of images, so that prompts have no placeholder
    has_reference   whether transformers has the family, and a processor without torchvision
    """

    tokens: dict[str, str] = {}
    more: tuple[str, ...] = ()
    named: dict[str, str] = {"bos": "<s>", "eos": "</s>"}
    patch: JSON = {}
    patch_files: dict[str, JSON] = {}
    template: str | None = None
    is_served: bool = True
    vllm_reason: str = ""
    vllm_patch: JSON = {}
    vllm_images: int = 2
    vllm_inserts: bool = False
    has_reference: bool = True


def merge(table: JSON, changes: Mapping[str, Any]) -> JSON:
    """Merge nested changes."""
    made = dict(table)
    for key, value in changes.items():
        made[key] = merge(made.get(key) or {}, value) if isinstance(value, Mapping) else value
    return made


BF16_ONLY = "AssertionError: CPU GDN attention requires BF16. (the comparison is in float32)"
QWEN = ReleasedModel(
    {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "vision_token_id": "<|vision_pad|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    },
    ("<|im_start|>",),
    {"bos": "<|endoftext|>", "eos": "<|im_end|>"},
)
QWEN_TEXT = QWEN._replace(tokens={})
LLAVA = ReleasedModel({"image_token_index": "<image>", "pad_token_id": "<pad>"})
LLAMA3 = ReleasedModel(
    {"image_token_index": "<|image|>"},
    ("<|start_header_id|>", "<|end_header_id|>"),
    {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
)
GEMMA_NAMED = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}
GEMMA4 = ReleasedModel(
    {
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "boa_token_id": "<|audio>",
        "eoa_token_id": "<audio|>",
        "eoa_token_index": "<audio|>",
        "audio_token_id": "<|audio|>",
    },
    ("<|turn>", "<turn|>"),
    GEMMA_NAMED,
    patch={
        "vision_soft_tokens_per_image": 70,
        "text_config": {
            "num_hidden_layers": 6,  # five with a sliding window, then one without
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "global_head_dim": 2 * HEAD_DIM,
            "num_global_key_value_heads": 1,
        },
        "vision_config": {
            "num_key_value_heads": VISION_HEADS,
            "global_head_dim": VISION_WIDTH // VISION_HEADS,
            "default_output_length": 70,
            "position_embedding_size": 300,
        },
    },
)
FLORENCE2_SIDE = 64  # pixels
UNKNOWN_TYPE = (  # the code of these models is on the hub only
    "The checkpoint you are trying to load has model type `{}` but Transformers does not recognize this architecture"
)
MLA_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only ones of vLLM's kernel for CPUs
PHI_TURNS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
SQUARE = {"size": {"height": 56, "width": 56}, "crop_size": {"height": 56, "width": 56}}

MODELS: dict[str, ReleasedModel] = {
    # Language models
    "meta-llama/Llama-2-7b-chat-hf": ReleasedModel(),
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA3._replace(tokens={}),
    "Qwen/Qwen2.5-7B-Instruct": QWEN_TEXT,
    "Qwen/Qwen3-0.6B": QWEN_TEXT,
    "Qwen/Qwen3-30B-A3B": QWEN_TEXT,
    "mistralai/Mistral-7B-Instruct-v0.2": ReleasedModel(),
    "mistralai/Mixtral-8x7B-v0.1": ReleasedModel(),
    "microsoft/phi-4": ReleasedModel(),
    "google/gemma-2-2b": ReleasedModel(named=GEMMA_NAMED),
    # Vision-language models
    "llava-hf/llava-1.5-7b-hf": LLAVA._replace(
        patch_files={
            "preprocessor_config.json": {
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
            }
        }
    ),
    "liuhaotian/llava-v1.5-7b": ReleasedModel({"pad_token_id": "<image>"}, is_served=False),
    "llava-hf/llava-v1.6-mistral-7b-hf": LLAVA._replace(
        patch={"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]}
    ),
    "mistralai/Devstral-Small-2-24B-Instruct": ReleasedModel(
        {"image_token_index": "[IMG]"}, ("[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]")
    ),
    "Salesforce/blip2-opt-2.7b": ReleasedModel(
        {"image_token_index": "<image>"},
        named={"bos": "</s>", "eos": "</s>"},
        patch={
            "num_query_tokens": 5,
            "qformer_config": {
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 30,
                "encoder_hidden_size": VISION_WIDTH,
            },
        },
        patch_files={"preprocessor_config.json": SQUARE, "processor_config.json": {"num_query_tokens": 5}},
        vllm_images=1,
        vllm_inserts=True,
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": LLAMA3._replace(
        patch={
            "text_config": {"num_hidden_layers": 5, "cross_attention_layers": [3]},
            "vision_config": {
                "intermediate_layers_indices": [1, 2],
                "num_global_layers": 1,
                "vision_output_dim": 3 * VISION_WIDTH,
                "image_size": 56,
            },
        },
        patch_files={"preprocessor_config.json": {"size": {"height": 56, "width": 56}}},
        # All tokens follow the image: transformers and Meta's code differ for those before it.
        template="{{ '<|image|>' + bos_token + messages[0].content[1].text }}",
        is_served=False,
        vllm_reason="'MllamaProcessor' object has no attribute '_get_num_multimodal_tokens' (vLLM has had no Mllama of "
        "its own since 0.10.2)",
    ),
    "Qwen/Qwen2-VL-7B-Instruct": QWEN,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN,
    "Qwen/Qwen3-VL-2B-Instruct": QWEN,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": QWEN,
    "Qwen/Qwen3.5-small": QWEN._replace(is_served=False, vllm_reason=BF16_ONLY),
    "Qwen/Qwen3.5-35B-A3B": QWEN._replace(is_served=False, vllm_reason=BF16_ONLY),
    "google/gemma-3-4b-it": ReleasedModel(
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        ("<start_of_turn>", "<end_of_turn>"),
        GEMMA_NAMED,
        patch={
            "mm_tokens_per_image": 4,
            "text_config": {
                "num_hidden_layers": 6,  # five with a sliding window, then one without
                "num_attention_heads": 4,
                "head_dim": HEAD_DIM,
                "query_pre_attn_scalar": HEAD_DIM,
            },
        },
        patch_files={
            "preprocessor_config.json": {"size": {"height": 56, "width": 56}, "image_seq_length": 4},
            "processor_config.json": {"image_seq_length": 4},
        },
    ),
    "google/gemma-4-31B-it": GEMMA4,
    "google/gemma-4-26B-A4B-it": GEMMA4._replace(patch=merge(GEMMA4.patch, {"text_config": {"top_k_experts": 2}})),
    "google/paligemma-3b-pt-224": ReleasedModel(
        {"image_token_index": "<image>"},
        named=GEMMA_NAMED,
        patch={
            "hidden_size": 64,
            "projection_dim": 64,
            "text_config": {"head_dim": HEAD_DIM, "num_image_tokens": 16},
            "vision_config": {"image_size": 56, "projection_dim": 64, "num_image_tokens": 16},
        },
    ),
    "gustavokuklinski/aeon-smolvlm-256m-instruct": ReleasedModel(
        {"image_token_id": "<image>"},
        (
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
            "<end_of_utterance>",
            "<|im_start|>",
        ),
        patch={"vision_config": {"image_size": 128, "max_image_size": {"longest_edge": 128}}},
        patch_files={
            "preprocessor_config.json": {"max_image_size": {"longest_edge": 128}, "size": {"longest_edge": 256}},
            "processor_config.json": {"image_seq_len": 4},
        },
    ),
    "OpenGVLab/InternVL2-2B": ReleasedModel(
        {"img_context_token_id": "<IMG_CONTEXT>"},
        ("<img>", "</img>", "<|im_start|>", "<|im_end|>"),
        patch={"force_image_size": 56},
    ),
    "openbmb/MiniCPM-V-2_6": QWEN_TEXT._replace(
        tokens={"unk_token_id": "<unk>"},
        more=("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|im_start|>"),
        patch={"query_num": 4, "image_size": 56, "slice_config": {"scale_resolution": 56}},
        patch_files={"preprocessor_config.json": {"scale_resolution": 56, "image_feature_size": 4}},
        is_served=False,
        vllm_reason=UNKNOWN_TYPE.format("minicpmv"),
        has_reference=False,
    ),
    "openbmb/MiniCPM-Llama3-V-2_5": LLAMA3._replace(
        tokens={"unk_token_id": "<unk>"},
        more=("<image>", "</image>", "<slice>", "</slice>", *LLAMA3.more),
        patch={"query_num": 4, "image_size": 56, "slice_config": {"scale_resolution": 56}},
        patch_files={"preprocessor_config.json": {"scale_resolution": 56, "image_feature_size": 4}},
        is_served=False,
        has_reference=False,
    ),
    "adept/fuyu-8b": ReleasedModel(
        more=("|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"),
        named={"bos": "|ENDOFTEXT|", "eos": "|ENDOFTEXT|"},
        is_served=False,
        vllm_reason="Failed to apply FuyuProcessor (vLLM has no Fuyu of its own, and uses that of transformers)",
        has_reference=False,  # its processor needs a tokenizer with a prefix; see test_fuyu
    ),
    "allenai/Molmo-7B-D-0924": ReleasedModel(
        more=("<im_start>", "<im_end>", "<im_patch>", "<im_col>"),
        named={"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        patch={
            "embedding_size": 400,
            "vision_backbone": {
                "image_default_input_size": [112, 112],
                "image_emb_dim": VISION_WIDTH,
                "image_num_heads": VISION_HEADS,
                "image_num_layers": 9,
                "image_mlp_dim": 80,
            },
        },
        patch_files={
            "preprocessor_config.json": {
                "base_image_input_size": [112, 112],
                "image_token_length_h": 4,
                "image_token_length_w": 4,
                "overlap_margins": [2, 2],
            }
        },
        is_served=False,
        vllm_reason=UNKNOWN_TYPE.format("molmo"),
        has_reference=False,
    ),
    "microsoft/Phi-3.5-vision-instruct": ReleasedModel(
        {"image_token_id": "<|image|>"},
        PHI_TURNS,
        {"bos": "<s>", "eos": "<|endoftext|>"},
        patch={
            "rope_scaling": {"short_factor": [1.1] * (HEAD_DIM // 2), "long_factor": [1.3] * (HEAD_DIM // 2)},
            "img_processor": {"image_dim_out": VISION_WIDTH, "num_img_tokens": 4},
        },
        patch_files={"preprocessor_config.json": {"num_img_tokens": 4}},
        is_served=False,
        vllm_reason=UNKNOWN_TYPE.format("phi3_v"),
        has_reference=False,
    ),
    "microsoft/Phi-4-multimodal-instruct": ReleasedModel(
        {"image_token_id": "<|endoftext10|>"},
        (*PHI_TURNS, "<|endoftext11|>"),
        {"eos": "<|endoftext|>"},
        patch={
            "rope_scaling": {"short_factor": [1.1] * (HEAD_DIM * 3 // 8), "long_factor": [1.3] * (HEAD_DIM * 3 // 8)},
            "embd_layer": {"image_embd_layer": {"crop_size": 56}},
            "vision_lora": {"r": 4},
        },
        is_served=False,
        vllm_reason="Following weights were not initialized from checkpoint: those of the audio encoder, which no "
        "export has",
        has_reference=False,
    ),
    "microsoft/Florence-2-large-ft": ReleasedModel(
        more=(*FLORENCE2_TOKENS, "<image>"),
        named={"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
        patch={
            "text_config": {
                "d_model": 48,
                **{f"{part}_layers": layers for part, layers in (("encoder", 2), ("decoder", 3))},
                **{f"{part}_ffn_dim": 80 for part in ("encoder", "decoder")},
                **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
                "max_position_embeddings": 200,
            },
            "vision_config": {
                "dim_embed": [8, 16, 24, 32],
                "num_heads": [1, 2, 3, 4],
                "num_groups": [1, 2, 3, 4],
                "depths": [1, 1, 2, 1],
                "window_size": 3,
                "projection_dim": 48,
            },
        },
        patch_files={
            "preprocessor_config.json": {
                "size": {"height": FLORENCE2_SIDE, "width": FLORENCE2_SIDE},
                "crop_size": {"height": FLORENCE2_SIDE, "width": FLORENCE2_SIDE},
                "image_seq_length": 1 + (FLORENCE2_SIDE // 32) ** 2,
            }
        },
        is_served=False,
    ),
    "deepseek-ai/DeepSeek-V3": ReleasedModel(vllm_patch=MLA_SIZES),
    "moonshotai/Kimi-K2.5": ReleasedModel(
        {"media_placeholder_token_id": "<|media_pad|>"},
        (
            *(f"<|im_{role}|>" for role in ("system", "user", "assistant", "middle", "end")),
            *(f"<|media_{name}|>" for name in ("begin", "content", "end")),
        ),
        {"bos": "[BOS]", "eos": "[EOS]", "pad": "[PAD]"},
        patch={
            "vision_config": {
                "vt_num_hidden_layers": VISION_LAYERS,
                "vt_hidden_size": VISION_WIDTH,
                "vt_num_attention_heads": VISION_HEADS,
                "vt_intermediate_size": 80,
                "mm_hidden_size": VISION_WIDTH,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
            }
        },
        is_served=False,
        vllm_reason="There is no module or parameter named 'model.vision_tower.layers.0.wqkv' in "
        "TransformersMultiModalMoEForCausalLM",
        has_reference=False,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": ReleasedModel(
        {
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
        },
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
    ),
}

DEFAULT_MODELS: dict[str, ReleasedModel] = {
    "deepseek_v2": ReleasedModel(
        patch={"num_experts_per_tok": 2},
        vllm_patch=MLA_SIZES,
        is_served=False,
        vllm_reason="33 of 36 tokens are equal: the logits of the first other token differ by 0.064",
    ),
    "gemma": ReleasedModel(named=GEMMA_NAMED),
    "gemma3_text": ReleasedModel(named=GEMMA_NAMED),
    "glm4": ReleasedModel(),
    "ministral": ReleasedModel(),
    "ministral3": ReleasedModel(),
    "opt": ReleasedModel(),
    "persimmon": ReleasedModel(),
    "qwen3_5_text": ReleasedModel(is_served=False, vllm_reason=BF16_ONLY),
}
"""Language models without a released config, by family: vLLM serves models with their class defaults."""


def find_row(name: str) -> ReleasedModel:
    """Return the row of a released model, or of a family."""
    return MODELS[name] if name in MODELS else DEFAULT_MODELS[name]


# ---- sizes ------------------------------------------------------------------------------------------------------


def shrink_text(table: JSON) -> JSON:
    """Return the settings of a language model with smaller sizes and the same ratio of key/value heads."""
    heads = table.get("num_attention_heads", 32)
    kv_heads = table.get("num_key_value_heads") or heads
    small_kv = min(kv_heads, 2)
    small_heads = small_kv * min(heads // kv_heads, 2)
    made: JSON = {
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_kv,
        "hidden_size": small_heads * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
    }
    if table.get("model_type") == "opt":
        made = {key: made[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")}
        made |= {"ffn_dim": 96, "word_embed_proj_dim": made["hidden_size"]}
    small = {
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "n_routed_experts": 2 * (table.get("n_group") or 2),
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    made |= {key: value for key, value in small.items() if table.get(key) is not None}
    if "linear_num_value_heads" in table:
        made["linear_num_value_heads"] = 2 * table["linear_num_value_heads"] // table["linear_num_key_heads"]
    if isinstance(table.get("sliding_window"), int):
        made["sliding_window"] = WINDOW
    if "layer_types" in table:
        made["layer_types"] = table["layer_types"][:LAYERS]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(table.get(key), dict) and "mrope_section" in table[key]:
            rope = table[key]
            share = rope.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1.0
            made[key] = rope | {"mrope_section": scale_sections(rope["mrope_section"], int(HEAD_DIM * share) // 2)}
    return {key: value for key, value in (table | made).items() if key != "quantization_config"}


def scale_sections(sections: list[int], total: int) -> list[int]:
    """Scale the sections of M-RoPE to fewer slots."""
    h, w = (size * total // sum(sections) for size in sections[1:])
    return [total - h - w, h, w]


def shrink_vision(table: JSON, text_width: int) -> JSON:
    """Return the settings of a vision tower with smaller sizes."""
    small = {
        "num_hidden_layers": VISION_LAYERS,
        "depth": VISION_LAYERS,
        "num_attention_heads": VISION_HEADS,
        "attention_heads": VISION_HEADS,
        "num_heads": VISION_HEADS,
        "embed_dim": VISION_WIDTH,
        "head_dim": VISION_WIDTH // VISION_HEADS,
        "intermediate_size": 80,
        "image_size": 4 * table.get("patch_size", 14),
        "out_hidden_size": text_width,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
        "fullatt_block_indexes": [1, 3],
        "window_size": 4 * table.get("patch_size", 14),
    }
    made = {key: value for key, value in small.items() if table.get(key)}
    made["hidden_size"] = text_width if "embed_dim" in table else VISION_WIDTH
    if table.get("model_type") == "blip_2_vision_model":  # lists nothing
        made |= {key: small[key] for key in ("num_hidden_layers", "num_attention_heads", "intermediate_size")}
        made["image_size"] = 56
    return table | made


def shrink_config(hf_config: JSON) -> JSON:
    """Return a config.json with smaller sizes. Keys of parts that it leaves out, the class defaults, are added."""
    made = copy.deepcopy(hf_config)
    made.pop("quantization_config", None)
    text_key = next((key for key in TEXT_PARTS if key in made), None)
    text = shrink_text(made if text_key is None else made[text_key])
    made = text if text_key is None else made | {text_key: text}
    for key in VISION_PARTS:
        if key in made:
            made[key] = shrink_vision(made[key], text["hidden_size"])
    return made


# ---- special tokens ---------------------------------------------------------------------------------------------


def build_tokenizer(row: ReleasedModel, template: str | None) -> Tokenizer:
    """Build a tokenizer with the special tokens of a model."""
    tokenizer = Tokenizer.train(TEXTS * 3, 300, special_tokens=[], **row.named)
    tokenizer.add_special_tokens([*row.tokens.values(), *row.more])
    tokenizer.chat_template = template
    return tokenizer


def set_token_ids(table: JSON, row: ReleasedModel, tokenizer: Tokenizer) -> JSON:
    """Replace the ids of special tokens and the size of the vocabulary, in all parts."""
    roles = {f"{role}_token_id": token for role, token in row.named.items()}
    made: JSON = {}
    for key, value in table.items():
        if isinstance(value, dict):
            value = set_token_ids(value, row, tokenizer)
        elif key == "vocab_size":
            value = tokenizer.vocab_size + 6  # released tables have spare rows
        elif key in row.tokens:
            value = tokenizer.token_to_id(row.tokens[key])
        elif key in roles and value is not None:
            value = tokenizer.token_to_id(roles[key])
        elif key.endswith(("_token_id", "_token_index")):
            continue
        made[key] = value
    return made


# ---- checkpoints ------------------------------------------------------------------------------------------------


def find_template(files: Mapping[str, Any]) -> str | None:
    """Return the chat template among the files of a released model."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    return files["chat_template.json"]["chat_template"] if "chat_template.json" in files else None


def write_config(name: str, folder: Path, shrink: bool = True, patch: JSON | None = None) -> JSON:
    """Write config, tokenizer and processor files of a released model, or of the class defaults of a family.

    With `shrink`, sizes are smaller, and `patch` are further changes. Returns the config.json.
    """
    row, files = find_row(name), RELEASED[name] if name in RELEASED else build_default_files(name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(row, row.template or find_template(files))
    tokenizer.save(folder)
    released = files["config.json"]
    hf_config = set_token_ids(shrink_config(released) if shrink else released, row, tokenizer)
    if shrink:
        hf_config = merge(hf_config, merge(row.patch, patch or {}))
    key = next((key for key in TEXT_PARTS if hf_config.get(key)), None)
    text, released_text = (hf_config, released) if key is None else (hf_config[key], released[key])
    text["vocab_size"] = tokenizer.vocab_size + 6 if shrink else released_text["vocab_size"]
    written = {"config.json": hf_config}
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if file in files:
            written[file] = files[file]
            if shrink:
                written[file] = merge(shrink_budget(files[file]), row.patch_files.get(file, {}))
    if "generation_config.json" in files:
        written["generation_config.json"] = set_token_ids(files["generation_config.json"], row, tokenizer)
    for file, content in written.items():
        (folder / file).write_text(json.dumps(content))
    return hf_config


def write_checkpoint(name: str, folder: Path, patch: JSON | None = None) -> Path:
    """Write a random checkpoint in the shape of a released model, or of the class defaults of a family."""
    hf_config = write_config(name, folder, patch=patch)
    found = find_checkpoint(folder)
    assert found.family is not None
    model = randomize(found.model_class(found.config).eval(), 3, 0.2)
    state = model.state_dict()
    rules = found.family.tensor_rules(found.config)
    # Some files have names of their own.
    if hf_config.get("llm_config", {}).get("model_type") == "internlm2" or "dim_embed" in hf_config.get(
        "vision_config", {}
    ):
        rules = [rule.alternative or rule for rule in rules]
    pairs = (
        pair
        for rule in rules
        for pair in zip(rule.hf, rule.export([state[native] for native in rule.native]), strict=True)
    )
    with torch.no_grad():
        write_weights(folder, pairs, stem=found.family.weights_stem)
    return folder


def shrink_budget(processor: JSON) -> JSON:
    """Return a processor config with fewer pixels, if it has a budget of pixels."""
    side = processor.get("patch_size", 1) * processor.get("merge_size", 1)
    if "max_pixels" in processor:
        return processor | {"min_pixels": 4 * side**2, "max_pixels": 16 * side**2}
    if "merge_size" in processor and "size" in processor:
        frames = processor.get("temporal_patch_size", 1) if "Glm" in str(processor.get("processor_class")) else 1
        return processor | {"size": {"shortest_edge": 4 * side**2 * frames, "longest_edge": 16 * side**2 * frames}}
    return processor


def build_default_files(family: str) -> dict[str, JSON]:
    """Return the config.json of a language model with the class defaults of transformers."""
    return {"config.json": {"model_type": family, **FAMILIES[family].class_defaults}}


def find_family(name: str) -> str:
    """Return the family that reads a released model, or a family itself."""
    if name not in RELEASED:
        return name
    hf_config = RELEASED[name]["config.json"]
    keys = [*hf_config.get("architectures", []), hf_config.get("model_type")]
    return next(key for key in keys if key in FAMILIES)
