"""Loss and gradients of a conversation equal those of transformers' LLaVA."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from helpers import randomize
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.hub import from_hf
from vitrail.pipelines.chat_settings import build_training_chat_format
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.chat_task import ChatSettings, ChatTask

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
            "conversations": [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(output)],
        }
        for number, (shown, output) in enumerate(TALKS)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    return ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json")))


def test_gradients_match_transformers(source, tmp_path):
    """A random LLaVA of transformers, with label -100 for all user tokens."""
    output = [text.replace(IMAGE, "") for _, turns in TALKS for text in turns]
    words = Tokenizer.train(output * 3, 320, special_tokens=[IMAGE], bos="<s>", eos="</s>")
    size = {"intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=24, image_size=28, patch_size=7, **size),
        text_config=LlamaConfig(hidden_size=32, vocab_size=words.vocab_size, **size),
        image_token_index=words.token_to_id(IMAGE),
    )
    theirs = randomize(LlavaForConditionalGeneration(config).eval(), spread=0.1)
    theirs.save_pretrained(tmp_path)
    ours = from_hf(tmp_path).eval()
    task = ChatTask(
        ours, {"talks": source}, words, ChatSettings(max_length=400), build_training_chat_format(ours, words)
    )
    assert task.chat_format.template.name == "the vicuna template"
    for item in range(3):
        stream, shown, *_ = task.encode_conversation(source[item])
        pixels = {} if shown is None else {"pixel_values": shown.pixels}
        labels = stream.ids.where(stream.loss_mask, -100)
        expected = theirs(input_ids=stream.ids[None], labels=labels[None], **pixels).loss
        batch = task.collate([source[item]])
        found = task(batch)["answers"] / task.count_loss_terms(batch)["answers"]
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        (grad,) = torch.autograd.grad(found, ours.decoder.embed.weight)
        (reference,) = torch.autograd.grad(expected, theirs.get_input_embeddings().weight)
        assert torch.allclose(grad[: len(reference)], reference, atol=1e-4 * reference.abs().max().item())
