"""Models that answer questions about scenes, whichever kind they are."""

import pytest
import torch

from data.scenes.conftest import drawn
from helpers import randomize
from test_talker import words
from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.eval_common import Scenes
from vitrail.cli.eval_reader import LONGEST, _talker, scenes_of
from vitrail.connectors import ProjectorConfig
from vitrail.data.scenes.letters import word_sprites
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders.vit import ViTConfig
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig
from vitrail.nn.rotary import RotaryConfig
from vitrail.processing.anyres import AnyRes
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.cut import Policy
from vitrail.processing.resolution import Letterbox, Naive
from vitrail.processing.tiles import Tiles
from vitrail.stream import Rules
from vitrail.talker import Talker

NAIVE = Naive(size=28, patch=7)


def talker_of(policy: Policy) -> Talker:
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
        policy=policy,
        rules=Rules(fill=tokenizer.id("<image>")),
    )
    model = randomize(VLM(config), 2, 0.3)
    return Talker(model, tokenizer, ChatTemplate.of(tokenizer))


@pytest.mark.parametrize(
    ("policy", "patch"),
    [
        (Letterbox(size=28, patch=7), 7 / 28),
        (Tiles(tile=28, patch=7, merge=1, least=4, most=4), 7 / 56),  # two by two of a square
        (AnyRes(tile=28, patch=7, grids=((2, 2),)), 7 / 56),
    ],
)
def test_the_finest_patch_is_that_of_what_is_read(policy, patch):
    assert _talker(talker_of(policy)).patch == pytest.approx(patch)


def test_long_names_have_room():
    talker, asked = talker_of(NAIVE), []
    talker.answers = lambda *_, max_new: asked.append(max_new)
    name = "a name of very many letters and words " * 3
    for answers in ((), ("ball",), ("ball", name)):
        _talker(talker, answers).answerer(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["what is this?"])
    assert asked == [LONGEST, LONGEST, len(talker.words.encode(name)) + 1] and asked[2] > LONGEST


def test_a_vision_language_model_is_asked_side_by_side():
    reader = _talker(talker_of(NAIVE))
    assert (reader.side, reader.patch) == (28, 7 / 28)
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    asked = ["what is this?", "how many balls are there?", "what is behind it?"]
    together = reader.answerer(pixels, asked)
    assert len(together) == 3 and any(together)
    assert together == [reader.answerer(pixels[i : i + 1], asked[i : i + 1])[0] for i in range(3)]


def test_scenes_are_of_the_vendors_and_fonts_that_are_asked_for(tmp_path):
    sprites = [*drawn(), *word_sprites(("sun", "moon", "star"))]
    Atlas.build(sprites).save(tmp_path / "atlas.safetensors")
    asked = Scenes(vendors=("left",), fonts=("aileron-slanted",), atlas=str(tmp_path / "atlas.safetensors"))
    source, _ = scenes_of("words", asked, 32)
    table = source.atlas.table
    found = {(table.kind[row], table.vendor[row]) for row in source.rows.tolist()}
    assert found == {("thing", "left"), ("word", "aileron-slanted")}
    assert Scenes().changes() == {}
