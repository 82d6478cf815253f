"""Models that answer questions about scenes, whichever kind they are."""

import torch

from helpers import randomize
from test_talker import words
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.eval_reader import _talker
from vitrail.connectors import ProjectorConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig
from vitrail.nn.rotary import RotaryConfig
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.resolution import Naive
from vitrail.stream import Rules
from vitrail.talker import Talker


def test_a_vision_language_model_is_asked_side_by_side():
    tokenizer = words()
    config = VLMConfig(
        tower=ViTConfig(
            image=28,
            patch=7,
            layers=1,
            block=BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=16)),
        ),
        connector=ProjectorConfig(reads=16, gives=32),
        decoder=DecoderConfig(
            vocab=tokenizer.size,
            layers=1,
            context=256,
            rotary=RotaryConfig(8),
            block=BlockConfig(width=32, attention=AttentionConfig(heads=4), mlp=GatedConfig(hidden=32), norm="rms"),
        ),
        policy=Naive(size=28, patch=7),
        rules=Rules(fill=tokenizer.id("<image>")),
    )
    model = randomize(VLM(config), 2, 0.3)
    reader = _talker(Talker(model, tokenizer, ChatTemplate.of(tokenizer)))
    assert (reader.side, reader.patch) == (28, 7 / 28)
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    asked = ["what is this?", "how many balls are there?", "what is behind it?"]
    together = reader.answerer(pixels, asked)
    assert len(together) == 3 and any(together)
    assert together == [reader.answerer(pixels[i : i + 1], asked[i : i + 1])[0] for i in range(3)]
