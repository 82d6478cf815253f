"""Random checkpoints in the shrunk shape of released vision-language models answer, are trained and exported.

Widths, layers and vocabulary are small. All other settings, the processor files and the chat template are the released
ones, and so are the image sizes and the number of image tokens.
"""

import copy
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import vitrail
from helpers import randomize, relative
from hub.test_gemma3_vlm import inputs as gemma_inputs
from hub.test_idefics3 import inputs as idefics_inputs
from hub.test_paligemma import inputs as paligemma_inputs
from hub.test_released_configs import RELEASED
from hub.vlm_parity import VALUES, is_image, pixels_alone
from vitrail import hub
from vitrail.cli.ask_command import ask_questions
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.hub.checkpoint_info import find_checkpoint
from vitrail.hub.safetensors_files import write_weights
from vitrail.pipelines.chat_settings import build_training_chat_format
from vitrail.processing.resolution_policies import TokenBudgetPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import pack_streams
from vitrail.tasks.chat_task import ChatSettings, ChatTask

TEXTS = ["What is this? A red cube. USER: ASSISTANT: user model"] * 3
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja")


class Shape(NamedTuple):
    """A shrunk shape.

    text, vision  changed keys of the parts
    tokens        keys of config.json → special tokens
    named         bos, eos and others
    inputs        further inputs of the model in transformers; None for a model that it lacks
    more          other changed keys
    spread        of random weights; small ones repeat the last token of the prompt, which may be a line break
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    tokens: dict[str, str]
    named: dict[str, Any]
    specials: tuple[str, ...] = ()
    inputs: Any = pixels_alone
    more: dict[str, Any] = {}
    text_key: str | None = "text_config"
    spread: float = 0.1


def glm_inputs(sample, mask, views) -> dict[str, Any]:
    """Return the patches of one image, with its grid by the positions of its tokens."""
    _, h, w = (sample.positions[mask].amax(0) - sample.positions[mask].amin(0) + 1).tolist()
    return {
        "pixel_values": views[0],
        "image_grid_thw": torch.tensor([[1, 2 * h, 2 * w]]),
        "mm_token_type_ids": mask.long()[None],
    }


def gemma4_inputs(sample, mask, views) -> dict[str, Any]:
    """Return the patches of one picture: rows × columns × channels, not normalized, with their positions."""
    grid = TokenBudgetPolicy().layout(*PICTURE_SIZE).views[0].grid
    blocks = views[0].view(grid.num_rows, grid.num_columns, 3, 3, 3, 16, 16)
    columns, rows = torch.meshgrid(torch.arange(grid.w), torch.arange(grid.h), indexing="xy")
    return {
        "pixel_values": (blocks.permute(0, 2, 1, 3, 5, 6, 4).reshape(1, grid.h * grid.w, -1) + 1) / 2,
        "image_position_ids": torch.stack([columns, rows], -1).flatten(0, 1)[None],
        "mm_token_type_ids": mask.long()[None],
    }


PICTURE_SIZE = (90, 230)  # height and width
GEMMA4 = Shape(
    {
        **TEXT,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 64,
    },
    {**VISION, "num_key_value_heads": 2, "head_dim": 12, "position_embedding_size": 300},
    {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "eos_token_id": "<turn|>",
    },
    {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
    ("<|turn>",),
    gemma4_inputs,
    spread=0.2,
)
EXPERTS = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "pad_token_id": "<|endoftext|>",
    "eos_token_id": "<|user|>",
}
LLAMA = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
SHAPES = {
    "llava-hf/llava-1.5-7b-hf": Shape(TEXT, VISION, {"image_token_index": "<image>", "pad_token_id": "<pad>"}, LLAMA),
    "google/gemma-3-4b-it": Shape(
        {**TEXT, "head_dim": 8, "num_key_value_heads": 2},
        VISION,
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "eos_token_id": "<end_of_turn>",
        },
        {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
        ("<start_of_turn>",),
        gemma_inputs,
    ),
    "google/gemma-4-31B-it": GEMMA4,
    "google/gemma-4-26B-A4B-it": GEMMA4._replace(text=GEMMA4.text | EXPERTS),
    "OpenGVLab/InternVL2-8B": Shape(
        {**TEXT, "num_key_value_heads": 2},
        VISION,
        {},
        {"bos": "<s>", "eos": "</s>"},
        ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"),
        text_key="llm_config",
    ),
    "gustavokuklinski/aeon-smolvlm-256m-instruct": Shape(
        {**TEXT, "num_key_value_heads": 2, "head_dim": 8},
        VISION,
        {"image_token_id": "<image>"},
        {"bos": "<|im_start|>", "eos": "<end_of_utterance>"},
        ("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2, 3, 4))),
        idefics_inputs,
    ),
    "openbmb/MiniCPM-V-2_6": Shape(
        {**TEXT, "hidden_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 4096},
        VISION,
        {},
        {"eos": "<|im_end|>"},
        ("<|im_start|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>"),
        inputs=None,
        text_key=None,
    ),
    "adept/fuyu-8b": Shape(
        TEXT,
        {},
        {"image_token_id": "|SPEAKER|", "image_newline_id": "|NEWLINE|"},
        {"bos": "|ENDOFTEXT|", "eos": "|ENDOFTEXT|"},
        ("<s>", "<0x04>"),
        text_key=None,
        spread=0.3,
    ),
    "allenai/Molmo-7B-D-0924": Shape(
        {**TEXT, "num_key_value_heads": 2},
        {},
        {},
        {"eos": "<|endoftext|>"},
        ("<im_start>", "<im_end>", "<im_patch>", "<im_col>"),
        inputs=None,
        more={
            "embedding_size": 500,
            "vision_backbone": {
                "image_emb_dim": 24,
                "image_num_heads": 2,
                "image_mlp_dim": 40,
                "image_num_layers": 9,
            },
        },
        text_key=None,
        spread=0.3,
    ),
    "google/paligemma-3b-pt-224": Shape(
        {**TEXT, "head_dim": 8},
        VISION,
        {"image_token_index": "<image>"},
        {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
        inputs=paligemma_inputs,
        more={"projection_dim": 32, "hidden_size": 32},
        spread=0.3,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": Shape(
        {**TEXT, "num_key_value_heads": 2, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}},
        {**VISION, "num_heads": 2, "depth": 2, "out_hidden_size": 32},
        GLM_TOKENS,
        {"eos": "<|endoftext|>"},
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        glm_inputs,
        text_key=None,
        spread=0.3,
    ),
}
ASK = "What is this?"


def write_checkpoint(name: str, folder) -> None:
    """Write a random checkpoint in the shrunk shape of a released model, with its own weight names."""
    shape, files = SHAPES[name], copy.deepcopy(RELEASED[name])
    about = files["config.json"]
    words = Tokenizer.train(TEXTS, 400, special_tokens=(*shape.tokens.values(), *shape.specials), **shape.named)
    text = about if shape.text_key is None else about[shape.text_key]
    text |= shape.text | {"vocab_size": words.vocab_size}
    about |= shape.more | {key: words.token_to_id(token) for key, token in shape.tokens.items()}
    if "vision_config" in about:
        about["vision_config"] |= shape.vision
    words.save(folder)
    for file in ("config.json", *(file for file in PROCESSOR_FILES if file in files)):
        content = files[file]
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    found = find_checkpoint(folder)
    model = randomize(found.model_class(found.config), spread=shape.spread)
    state = model.state_dict()
    tensors = (
        (hf, tensor)
        for rule in found.family.tensor_rules(found.config)
        for hf, tensor in zip(rule.hf, rule.export([state[native] for native in rule.native]), strict=True)
    )
    write_weights(folder, tensors)


def train_one_step(pipeline, folder) -> None:
    """Train on one conversation with a picture. Every part of the model learns."""
    rows = [{"id": 0, "image": "photo.png", "conversations": []}]
    rows[0]["conversations"] = [{"from": "human", "value": f"<image>\n{ASK}"}, {"from": "gpt", "value": "A red cube."}]
    (folder / "talks.json").write_text(json.dumps(rows))
    source = ConversationSource(ConversationsConfig(path=str(folder / "talks.json")), "talks")
    model, chat = pipeline.model.train(), build_training_chat_format(pipeline.model, pipeline.tokenizer)
    task = ChatTask(model, {"talks": source}, pipeline.tokenizer, ChatSettings(max_length=4000), chat)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch, optimizer = task.collate([source[0]]), torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = task(batch)["answers"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    changed = {name.partition(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name.partition(".")[0] for name in before}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_answers_learns_and_exports(name, tmp_path, capsys):
    folder = tmp_path / "released"
    folder.mkdir()
    write_checkpoint(name, folder)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*PICTURE_SIZE, 3), dtype=np.uint8))
    picture.save(tmp_path / "photo.png")
    ask_questions(str(tmp_path / "photo.png"), ASK, model=str(folder), max_new_tokens=5, device="cpu")
    pipeline = vitrail.load(folder, device="cpu")
    answer = pipeline.ask(picture, ASK, max_new_tokens=5)
    assert answer and answer in capsys.readouterr().out

    train_one_step(pipeline, tmp_path)
    hub.to_hf(pipeline.model.eval(), tmp_path / "export", tokenizer=pipeline.tokenizer)
    prompt, inputs = pipeline.build_prompt([pipeline.build_message(picture, ASK)]), SHAPES[name].inputs
    packed = pack_streams([prompt.stream], len(prompt.stream))
    with torch.no_grad():
        ours = pipeline.model(packed, prompt.images)[0]
        if inputs is None:
            assert torch.equal(ours, hub.load(tmp_path / "export")(packed, prompt.images)[0])
            return
        reference = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
        given = inputs(prompt.stream, is_image(prompt.stream), [prompt.images.pixels])
        expected = reference(input_ids=prompt.stream.ids[None], **given).logits[0]
    assert relative(ours, expected) <= VALUES
