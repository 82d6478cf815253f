"""Any model that answers questions about pictures, for the suites that ask about scenes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vitrail.cli.eval_common import Common, Scenes, device_of
from vitrail.cli.fewer import FEWER, Fewer
from vitrail.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.scenes.source import SceneSource
    from vitrail.data.words import Words
    from vitrail.evals.suites.talking import Answerer
    from vitrail.processing.text import Tokenizer
    from vitrail.studio import Studio
    from vitrail.talker import Talker

LONGEST = 24  # tokens of an answer to a question about a scene, captions aside: all true ones are shorter
SIDE = 224  # of scenes for a model that takes pictures of any size


class Reader(NamedTuple):
    """`side` is that of the pictures it was made for, `patch` the share of it that the finest patch has."""

    answerer: "Answerer"
    side: int
    patch: float


def open_reader(model: str, common: Common, fewer: Fewer = FEWER, answers: Sequence[str] = ()) -> Reader:
    """`answers` are true ones that may be longer than those about scenes."""
    from vitrail.studio import Studio, refuse_talk, talks
    from vitrail.talker import Talker

    device, reduce = device_of(common), fewer.chosen
    if talks(model):
        return _talker(Talker.load(model, device=device, reduce=reduce), answers)
    refuse_talk(model, None, reduce)
    return _studio(Studio.load(model, device=device), answers)


def _studio(studio: "Studio", answers: Sequence[str] = ()) -> Reader:
    from vitrail.generate.answers import answer

    unified, most = studio.model, _longest(studio.words, answers)

    def answerer(pixels: "Tensor", texts: list[str]) -> list[str]:
        seen, _ = unified.look(unified.codec.pixels(pixels))
        return [one.text for one in answer(unified, seen, texts, studio.words, max_new=most)]

    return Reader(answerer, unified.codec.size[0], 1 / unified.grid[0])


def _talker(talker: "Talker", answers: Sequence[str] = ()) -> Reader:
    from PIL import Image

    from vitrail.models.vlm_config import VLMConfig

    config = talker.model.config
    policy = config.policy if isinstance(config, VLMConfig) else config.fitted
    side, most = getattr(policy, "size", SIDE), _longest(talker.words, answers)
    views = policy.cut(side, side).views  # a picture may be enlarged before it is read
    pixels = min(view.source[2 + axis] / view.resized[axis] for view in views for axis in (0, 1))

    def answerer(pixels: "Tensor", texts: list[str]) -> list[str]:
        pictures = [Image.fromarray(picture) for picture in pixels.permute(0, 2, 3, 1).cpu().numpy()]
        return talker.answers(pictures, texts, max_new=most)

    return Reader(answerer, side, policy.patch * pixels / side)


def _longest(words: "Tokenizer", answers: Sequence[str]) -> int:
    """Tokens that every true answer has room in, and one more: who goes on is not right."""
    return max([LONGEST, *(len(ids) + 1 for ids in words.encode_batch(answers))])


def check_kinds(kinds: Iterable[str]) -> None:
    from vitrail.data.words import DRAFTS

    for kind in kinds:
        if kind not in DRAFTS:
            raise ConfigError(f"there is no kind of question {kind!r}", nearest(kind, DRAFTS))
        if kind.startswith("caption"):
            raise ConfigError(f"{kind!r} has many right answers, and one is compared word for word", "leave it out")


def scenes_of(
    preset: str, asked: Scenes, side: int, changes: dict[str, object] | None = None
) -> "tuple[SceneSource, Words]":
    """Scenes of a preset, changed as said, and words about them."""
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.told import words_about

    scene = {**asked.changes(), **(changes or {})}
    config = ScenesConfig(atlas=asked.atlas, preset=preset, scene=scene, side=side, seed=asked.seed)
    source = SceneSource(config, open_atlas(asked.atlas))
    return source, words_about(source)
