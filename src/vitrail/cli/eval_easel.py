"""A unified model that draws, and the judge of its drawings, for the suites that look at them."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from vitrail.cli.eval_common import Common, device_of
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.scenes.source import SceneSource
    from vitrail.evals.judge import Judge
    from vitrail.models.detector import Detector


@Parameter(name="*")
@dataclass
class Hand:
    """What the suites that have pictures drawn take."""

    guidance: float = 3.0
    "How strongly the prompt leads."
    steps: int = 24
    "Passes of a model that draws all codes at once."
    temperature: float = 1.0
    "Of the choice of codes."
    tries: int = 1
    "Drawings of which the model chooses the one that is looked at, as `vitrail draw --tries` does."
    seed: int = 0
    "Of the prompts and of the drawings."


HAND = Hand()


class Easel:
    """A unified model that draws, and shows true pictures in its codes. `side` is that of its own pictures, `shows`
    that of those it gives: what who looks at them was made for."""

    def __init__(self, model: str, hand: Hand, common: Common):
        from vitrail.studio import Studio

        self.studio, self.hand = Studio.load(model, device=device_of(common)), hand
        self.shows = self.side = self.studio.model.codec.size[0]

    def draw(self, texts: list[str], first: int) -> "Tensor":
        """A `Drawer`: uint8 (B, 3, S, S)"""
        how: dict[str, Any] = asdict(self.hand) | {"seed": self.hand.seed + first}
        return self._shown(self.studio.draw_ids(texts, **how))

    def through(self, pixels: "Tensor") -> "Tensor":
        """uint8 (B, 3, H, W) of its own side → (B, 3, S, S)"""
        unified = self.studio.model
        return self._shown(unified.look(unified.codec.pixels(pixels))[1])

    def _shown(self, ids: "Tensor") -> "Tensor":
        from torch.nn.functional import interpolate

        unified, size = self.studio.model, (self.shows, self.shows)
        pixels = unified.pixels(ids).float()
        if pixels.shape[-1] != self.shows:
            pixels = interpolate(pixels, size, mode="bicubic", antialias=True)
        return unified.codec.bytes(pixels)


def open_detector(judge: str, common: Common) -> "Detector":
    """The eyes of a judge."""
    import torch

    from vitrail import hub
    from vitrail.models.detector import Detector

    detector = hub.load(judge, dtype=torch.float32, device=device_of(common))
    if not isinstance(detector, Detector):
        raise ConfigError(f"{judge} is a {type(detector).__name__}, and no detector", "give one that `judge` trained")
    return detector


def judge_of(detector: "Detector", source: "SceneSource", common: Common) -> "Judge":
    """A judge of pictures of the things that a source has."""
    from vitrail.data.words import Words
    from vitrail.evals.judge import Judge

    table = source.atlas.table
    return Judge(detector, Words.of(table).to(device_of(common)), table)
