"""The loss of a conversation is what transformers' LLaVA has for the same words and labels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from helpers import randomize
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.hub import from_hf
from vitrail.processing.text import Tokenizer
from vitrail.talker.speech import speech_of
from vitrail.tasks.chat import ChatSettings, ChatTask

IMAGE = "<image>"
TALKS = [
    (["a"], ["<image>\nWhat is this?", "A red cube.", "And behind it?", "Nothing at all."]),
    (["a", "b"], ["Is <image> taller than <image>?", "Yes."]),
    ([], ["How many legs has a spider?", "Eight."]),
]


@pytest.fixture
def source(tmp_path):
    for name, pixels in zip("ab", np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), np.uint8), strict=True):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    rows = [
        {
            "id": number,
            "image": [f"{name}.png" for name in shown],
            "conversations": [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(said)],
        }
        for number, (shown, said) in enumerate(TALKS)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    return ConversationSource(ConversationsConfig(data=str(tmp_path / "talks.json")))


def test_as_transformers_learns(source, tmp_path):
    """A random LLaVA of theirs, -100 on all that the user says."""
    said = [text.replace(IMAGE, "") for _, turns in TALKS for text in turns]
    words = Tokenizer.train(said * 3, 320, specials=[IMAGE], bos="<s>", eos="</s>")
    size = {"intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=24, image_size=28, patch_size=7, **size),
        text_config=LlamaConfig(hidden_size=32, vocab_size=words.size, **size),
        image_token_index=words.id(IMAGE),
    )
    theirs = randomize(LlavaForConditionalGeneration(config).eval(), spread=0.1)
    theirs.save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    task = ChatTask(ours, {"talks": source}, words, ChatSettings(length=400), speech_of(ours, words))
    assert task.speech.template.name == "the vicuna template"
    for item in range(3):
        stream, shown, *_ = task.said(source[item])
        pixels = {} if shown is None else {"pixel_values": shown.pixels}
        labels = stream.ids.where(stream.loss, -100)
        expected = theirs(input_ids=stream.ids[None], labels=labels[None], **pixels).loss
        batch = task.collate([source[item]])
        found = task(batch)["answers"] / task.counts(batch)["answers"]
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        (grad,) = torch.autograd.grad(found, ours.decoder.embed.weight)
        (reference,) = torch.autograd.grad(expected, theirs.get_input_embeddings().weight)
        assert torch.allclose(grad[: len(reference)], reference, atol=1e-4 * reference.abs().max().item())
