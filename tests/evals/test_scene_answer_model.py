"""Models that answer questions about scenes, whichever kind they are."""

import pytest
import torch

from data.scenes.conftest import drawn
from helpers import randomize
from pipelines.test_chat import words
from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import ProjectorConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.word_sprites import draw_word_sprites
from vitrail.encoders.vit import ViTConfig
from vitrail.evals.context import MAX_ANSWER_TOKENS
from vitrail.evals.suites.answer_suites import QuestionSuite
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig
from vitrail.nn.rotary_embedding import RotaryConfig
from vitrail.pipelines import ChatPipeline
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.image_layout import ResolutionPolicy
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.resolution_policies import LetterboxPolicy, NaivePolicy
from vitrail.stream import StreamRules

NAIVE = NaivePolicy(image_size=28, patch_size=7)


def talker_of(policy: ResolutionPolicy) -> ChatPipeline:
    tokenizer = words()
    config = VLMConfig(
        tower=ViTConfig(
            image_size=28,
            patch_size=7,
            layers=1,
            block=BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=16)),
        ),
        connector=ProjectorConfig(in_features=16, out_features=32),
        decoder=DecoderConfig(
            vocab_size=tokenizer.vocab_size,
            layers=1,
            context_length=256,
            rotary=RotaryConfig(8),
            block=BlockConfig(
                width=32, attention=AttentionConfig(heads=4), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
            ),
        ),
        policy=policy,
        rules=StreamRules(fill_id=tokenizer.token_to_id("<image>")),
    )
    model = randomize(VLM(config), 2, 0.3)
    return ChatPipeline(model, tokenizer, ChatTemplate.from_tokenizer(tokenizer))


@pytest.mark.parametrize(
    ("policy", "patch"),
    [
        (LetterboxPolicy(image_size=28, patch_size=7), 7 / 28),
        (
            TilesPolicy(tile_size=28, patch_size=7, merge_size=1, min_tiles=4, max_tiles=4),
            7 / 56,
        ),  # two by two of a square
        (AnyResPolicy(tile_size=28, patch_size=7, grids=((2, 2),)), 7 / 56),
    ],
)
def test_patch_fraction_follows_the_resolution_policy(policy, patch):
    assert talker_of(policy).build_scene_answer_model().patch_fraction == pytest.approx(patch)


def test_token_limit_fits_long_answers():
    chat_pipeline, asked = talker_of(NAIVE), []
    chat_pipeline.ask_batch = lambda *_, max_new_tokens: asked.append(max_new_tokens)
    name = "a name of very many letters and words " * 3
    for answers in ((), ("ball",), ("ball", name)):
        chat_pipeline.build_scene_answer_model(answers).answer(
            torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["what is this?"]
        )
    assert (
        asked == [MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS, len(chat_pipeline.tokenizer.encode(name)) + 1]
        and asked[2] > MAX_ANSWER_TOKENS
    )


def test_vision_language_model_answers_in_batches():
    reader = talker_of(NAIVE).build_scene_answer_model()
    assert (reader.image_size, reader.patch_fraction) == (28, 7 / 28)
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    asked = ["what is this?", "how many balls are there?", "what is behind it?"]
    together = reader.answer(pixels, asked)
    assert len(together) == 3 and any(together)
    assert together == [reader.answer(pixels[i : i + 1], asked[i : i + 1])[0] for i in range(3)]


def test_scenes_use_the_given_vendors_and_fonts(tmp_path):
    sprites = [*drawn(), *draw_word_sprites(("sun", "moon", "star"))]
    Atlas.build(sprites).save(tmp_path / "atlas.safetensors")
    asked = QuestionSuite(vendors=("left",), fonts=("aileron-slanted",), atlas=str(tmp_path / "atlas.safetensors"))
    source, _ = asked.open_question_scenes("words", 32, {})
    table = source.atlas.table
    found = {(table.kind[row], table.vendor[row]) for row in source.sprite_rows.tolist()}
    assert found == {("thing", "left"), ("word", "aileron-slanted")}
    assert QuestionSuite().scene_overrides == {}
