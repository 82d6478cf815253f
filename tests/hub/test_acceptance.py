"""A random checkpoint in the shape of each released model answers, is trained, exported and opened by transformers.

The steps are those of a user: `vitrail ask` (or `vitrail write`), `vitrail train`, `vitrail export`, then transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

from helpers import randomize, relative
from hub.shrunk_checkpoints import MODELS, find_family, write_checkpoint
from hub.test_processors import ASK, asked, opened, turn
from vitrail import hub, recipe
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.cli.ask_command import ask_questions
from vitrail.cli.checkpoint_conversion_command import export_checkpoint
from vitrail.cli.write_command import generate_text
from vitrail.connectors import ProjectorConfig
from vitrail.encoders import ViTConfig
from vitrail.hub import llava_original, phi4_multimodal
from vitrail.hub.checkpoint_info import read_config
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.encoder_decoder_vlm import EncoderDecoderVLM
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.pipelines import ChatPipeline
from vitrail.processing.resolution_policies import NaFlexPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules, pack_streams

VALUES = 1e-4  # max |Δ| / max |reference|
NAFLEX_TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content if m.content is string else m.content[0].text }}</s>{% endgeneration %}
{% else %}{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{{ '\\n' }}
{% endif %}{% endfor %}"""
TALK = [{"from": "human", "value": f"<image>\n{ASK}"}, {"from": "gpt", "value": "a red cube"}]


def is_language_model(name: str) -> bool:
    return FAMILIES[find_family(name)].model_class is Decoder


@pytest.fixture(autouse=True)
def small_tower(monkeypatch):
    """The layouts of LLaVA, Phi-3-vision and Phi-4-multimodal name their towers, whose sizes are then fixed."""
    clip = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 2}
    tower = {**clip, "image_size": 56, "patch_size": 14}
    monkeypatch.setitem(llava_original.TOWERS, "openai/clip-vit-large-patch14-336", tower)
    monkeypatch.setattr(phi4_multimodal, "TOWER", phi4_multimodal.TOWER | tower | {"crop_size": 56})


@pytest.fixture
def picture(tmp_path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (41, 97, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def train_one_step(folder: Path, picture: Path, out: Path, *, is_text: bool) -> Path:
    """Train a checkpoint for one step on a conversation or on a text; return the folder of the result."""
    stage: dict[str, Any] = {"name": "tune", "steps": 1, "batch_size": 2, "optim": {"lr": 1e-3}, "dtype": "float32"}
    if is_text:
        (out.parent / "text.txt").write_text(f"{ASK} a red cube. " * 60)
        source = {"kind": "text", "files": [str(out.parent / "text.txt")], "window_length": 16}
        stage |= {"task": "text"}
    else:
        rows = [{"id": 1, "image": str(picture), "conversations": TALK}]
        (out.parent / "talks.json").write_text(json.dumps(rows))
        source = {"kind": "conversations", "path": str(out.parent / "talks.json")}
        length = min(1000, read_config(folder).decoder.context_length)
        stage |= {"task": "chat", "settings": {"max_length": length}}
    table = {
        "name": "tune",
        "description": "one step",
        "model": {"checkpoint": str(folder)},
        "tokenizer": {"checkpoint": str(folder)},
        "sources": {"data": source},
        "stages": [stage | {"mixture": {"weights": {"data": 1}}}],
    }
    recipe.train_recipe(recipe.Recipe.from_dict(table), out, quiet=True)
    return out / "final"


def take_gradient_step(folder: Path, picture: Path, out: Path) -> Path:
    """Do one step of gradient descent by hand: no task trains models whose images are canvases of tiles."""
    pipeline = ChatPipeline.load(folder, device="cpu")
    stream, shown, _ = pipeline.build_prompt([pipeline.build_message(str(picture), ASK)])
    model = pipeline.model
    logits = model(pack_streams([stream], len(stream)), shown)[0]
    torch.nn.functional.cross_entropy(logits[:-1], stream.ids[1:]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad
    hub.save(model, out / "final", pipeline.tokenizer)
    return out / "final"


def check_text_logits(folder: Path) -> None:
    ours, reference = hub.load(folder), T.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(ours.config.vocab_size, (2, 40))
    with torch.no_grad():
        assert relative(ours(ids), reference(ids).logits) <= VALUES


@torch.no_grad()
def check_image_logits(folder: Path, picture: Path, monkeypatch) -> None:
    """The processor and the model of transformers give our ids and logits."""
    pipeline = ChatPipeline.load(folder, device="cpu")
    image = Image.open(picture)
    processor = opened(folder, monkeypatch)
    if isinstance(pipeline.model, CrossAttentionVLM):  # its template starts with the image, not with the bos token
        prompt = pipeline.chat_template.render([turn(image, ASK)], add_generation_prompt=True)
        given = processor(text=prompt, images=[image], add_special_tokens=False, return_tensors="pt")
    else:
        given = asked(processor, image)
    stream, shown, _ = pipeline.build_prompt([pipeline.build_message(image, ASK)])
    start = torch.empty(0, dtype=torch.long)
    if isinstance(pipeline.model, EncoderDecoderVLM):  # the answer starts with the end and the start of a text
        start = stream.ids[-2:]
        given["decoder_input_ids"] = start[None]
    assert torch.cat([given["input_ids"][0], start]).tolist() == stream.ids.tolist()
    model: Any = pipeline.model
    if isinstance(model, CrossAttentionVLM) and model.config.tower is not None:  # transformers takes outputs of blocks
        tower = model.config.tower
        config = model.config.replace(
            tower=tower.replace(feature_layers=tuple(layer + 1 for layer in tower.feature_layers))
        )
        state, model = model.state_dict(), CrossAttentionVLM(config).eval()
        model.load_state_dict(state)
    reference = T.AutoModelForImageTextToText.from_pretrained(folder).eval()
    expected = reference(**given).logits[0]
    logits = model(pack_streams([stream], len(stream)), shown)[0][-len(expected) :]
    assert logits.shape == expected.shape and relative(logits, expected) <= VALUES


@pytest.mark.parametrize("name", MODELS)
def test_released_shape_from_answer_to_export(name, picture, tmp_path, monkeypatch, capsys):
    folder = write_checkpoint(name, tmp_path / "released")
    is_text = is_language_model(name)
    if is_text:
        generate_text(ASK, model=str(folder), max_new_tokens=3, temperature=0.0, device="cpu")
        assert capsys.readouterr().out.startswith(ASK)
    else:
        ask_questions(str(picture), ASK, model=str(folder), max_new_tokens=3, device="cpu")
        assert (
            capsys.readouterr().out
            == f"{ChatPipeline.load(folder, device='cpu').ask(str(picture), ASK, max_new_tokens=3)}\n"
        )

    before = hub.load(folder).state_dict()
    can_train = is_text or issubclass(FAMILIES[find_family(name)].model_class, VLM)
    final = (
        train_one_step(folder, picture, tmp_path / "out", is_text=is_text)
        if can_train
        else take_gradient_step(folder, picture, tmp_path / "out")
    )
    after = hub.load(final).state_dict()
    assert before.keys() == after.keys()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert len(changed) > len(before) / 2

    exported = tmp_path / "exported"
    export_checkpoint(str(final), out=exported)
    again = hub.load(exported).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in after.items())
    if not MODELS[name].has_reference:
        return
    if is_text:
        check_text_logits(exported)
    else:
        check_image_logits(exported, picture, monkeypatch)


def test_naflex_tower_in_a_vision_language_model(picture, tmp_path, capsys):
    """SigLIP 2 NaFlex: a model of Vitrail's own format answers about images of unequal sizes and is trained on them."""
    block = BlockConfig(
        width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=24)
    )
    text = BlockConfig(
        width=32, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=40), norm="rms"
    )
    tokenizer = Tokenizer.train([ASK], 300, special_tokens=["<image>"], bos="<s>", eos="</s>")
    tokenizer.chat_template = NAFLEX_TEMPLATE
    config = VLMConfig(
        tower=ViTConfig(layers=2, block=block, image_size=32, patch_size=8, patch_order="channels_last"),
        connector=ProjectorConfig(in_features=16, out_features=32),
        decoder=DecoderConfig(vocab_size=tokenizer.vocab_size, layers=1, block=text, rotary=RotaryConfig(16)),
        policy=NaFlexPolicy(patch_size=8, max_patches=16),
        rules=StreamRules(fill_id=tokenizer.token_to_id("<image>")),
    )
    hub.save(randomize(VLM(config)), tmp_path / "model", tokenizer)
    tall = tmp_path / "tall.png"
    Image.open(picture).rotate(90, expand=True).save(tall)
    ask_questions(str(picture), str(tall), ASK, model=str(tmp_path / "model"), max_new_tokens=3, device="cpu")
    pipeline = ChatPipeline.load(tmp_path / "model", device="cpu")
    assert capsys.readouterr().out == f"{pipeline.ask([str(picture), str(tall)], ASK, max_new_tokens=3)}\n"
    grids = {
        layout.views[0].grid for layout in pipeline.build_prompt([turn(picture, ASK), turn(tall, ASK)]).images.layouts
    }
    assert len(grids) == 2
    final = train_one_step(tmp_path / "model", picture, tmp_path / "out", is_text=False)
    assert not torch.equal(hub.load(final).tower.embed.proj.weight, pipeline.model.tower.embed.proj.weight)


def test_every_family_with_a_released_config_is_listed():
    """A vision-language or language model of `released_configs.json` has a row for its family."""
    from hub.test_released_configs import RELEASED

    chat = (VLM, CrossAttentionVLM, Decoder)
    families = set()
    for name in RELEASED:
        try:
            family = find_family(name)
        except StopIteration:  # known, and not implemented
            continue
        if issubclass(FAMILIES[family].model_class, chat):
            families.add(family)
    assert families == {find_family(name) for name in MODELS}
