"""How near drawings come to true pictures of what was asked, all together: the Fréchet distance that papers call gFID,
seen through another network and named after it.

N pictures, D width of the features
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vitrail.data.formats.sample import progress
from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import Words
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.judge import wished
from vitrail.evals.metrics.frechet import Moments, Network, features, frechet, frechet_distance
from vitrail.evals.shares import Score
from vitrail.evals.suites.talking import BATCH, Drawer

APART = 1 << 24  # scenes between those that are asked for and the others
CODED, OTHERS = "true pictures in its codes", "other true pictures"


def fidelity(
    drawer: Drawer,
    through: Callable[[Tensor], Tensor],
    source: SceneSource,
    words: Words,
    count: int,
    network: Network,
    *,
    held_out: bool = False,
    batch: int = BATCH,
) -> Score:
    """The distance between drawings of `count` prompts of each of GenEval's kinds and the scenes that these tell of.
    Beside it: how far these scenes are when a codec shows them, which no drawing in its codes can be expected to
    better, and how far as many others are, which is what so few pictures differ by."""
    if count < 1:
        raise ConfigError(f"{count} drawings of each kind", "ask for at least one")
    asked = [wished(words, source, kind, count, whole=True, held_out=held_out) for kind in DRAWINGS]
    others = [wished(words, source, kind, count, start=APART, whole=True)[1].pixels for kind in DRAWINGS]

    def drawn() -> Iterator[Tensor]:
        texts = [words.pieces.read(prompt.text) for prompt, _ in asked]
        parts = [(kind, first) for kind in range(len(asked)) for first in range(0, count, batch)]
        for kind, first in progress(parts, "drawings"):
            yield drawer(texts[kind][first : first + batch], kind * count + first)

    true = torch.cat([made.pixels for _, made in asked])
    there, seen = features(true, network), features(drawn(), network)
    coded = features((through(some) for some in progress(true.split(batch), "true pictures")), network)
    found = frechet_distance(seen, there, network.name)  # which says so where there are too few
    exact = Moments.of(there)
    beside = {
        CODED: frechet(Moments.of(coded), exact),
        OTHERS: frechet(Moments.of(features(torch.cat(others), network)), exact),
    }
    return Score(found.name, found.value, found.interval, found.of, beside, points=True)
