"""What coders keep of a set of pictures, and what it costs: one row a coder, each number with its interval.

N pictures, B of them at once, H, W pixels
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.fit import Fit
from vitrail.data.pictures.classes import Part
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.errors import ConfigError, DataError
from vitrail.evals.coders import Coder, Unit
from vitrail.evals.metrics import Estimate, Use, compare, estimate
from vitrail.evals.metrics.compare import Perceptual
from vitrail.evals.metrics.estimate import ROUNDS, TAIL
from vitrail.evals.metrics.frechet import Network, features, frechet_distance
from vitrail.evals.shares import Score
from vitrail.evals.suites import sets
from vitrail.evals.suites.reader import Reader
from vitrail.evals.viewer import Picture
from vitrail.processing.images import load_image

CODED, FILED, ENTROPY = "bits a pixel", "bits a pixel in files", "bits a pixel at the codes' entropy"
POOLED = "PSNR of the mean error"
ENCODED, DECODED = "pictures a second, encoding", "pictures a second, decoding"
FEW = 5  # files or batches
DRAWN = 64  # scenes at once
SEED = 7171  # of scenes: not one that models are trained on


# ---- pictures ---------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """Pictures, read when they are wanted, at their own size or resized and cut to cover `size`."""

    pictures: Sequence[Picture]
    labels: Tensor | None = None  # (N,)
    names: tuple[str, ...] = ()
    size: tuple[int, int] | None = None

    def batches(self, most: int) -> Iterator[Tensor]:
        """uint8 (B, 3, H, W) in order; those of one size that follow each other come together."""
        if most < 1:
            raise ConfigError(f"batches of {most} pictures", "give at least 1")
        held: list[Tensor] = []
        for picture in self.pictures:
            image = load_image(picture() if callable(picture) else picture)
            fit = Fit(how="crop") if self.size is None else Fit(size=self.size)
            pixels, _ = fit.apply(image, 1)
            if held and (len(held) == most or held[0].shape != pixels.shape):
                yield torch.stack(held)
                held = []
            held.append(pixels)
        if held:
            yield torch.stack(held)


def shown(
    name: str,
    *,
    part: Part = "test",
    limit: int | None = None,
    side: int | None = None,
    classes: bool = False,
    parted: bool = False,
    seed: int = SEED,
    atlas: str = "emoji",
) -> Shown:
    """Scenes by their preset, a set with classes, or any source or folder of pictures; with `classes`, a folder with a
    sub-folder a class, and if it is `parted` with folders `train` and `test` of such. Scenes are drawn, and drawings
    rasterised, at `side`; everything else is brought to a square of it, if it is given."""
    size = None if side is None else (side, side)
    if name in PRESETS and not Path(name).is_dir():
        if limit is None:
            raise ConfigError(f"scenes ({name}) never end", "say how many: --limit")
        config = ScenesConfig(atlas=atlas, preset=name, side=side or ScenesConfig(atlas=atlas).side, seed=seed)
        if limit < 1:
            raise ConfigError(f"a limit of {limit}", "give at least 1")
        return Shown(_Scenes(SceneSource(config, open_atlas(atlas)), limit))
    if classes or name in sets.CLASSES:
        found = sets.classes(name, part, limit, parted=parted)
        return Shown(found.pictures, found.labels, found.names, size)
    return Shown(sets.album(name, limit, None if Path(name).is_dir() else side).pictures, size=size)


class _Scenes(Sequence[np.ndarray]):
    """Scenes as pictures, drawn some at a time, which takes hardly longer than one."""

    def __init__(self, source: SceneSource, count: int):
        self._source, self._count, self._start, self._held = source, count, -1, np.empty(0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> np.ndarray:  # type: ignore[override]
        if not 0 <= number < self._count:
            raise IndexError(number)
        start = number // DRAWN * DRAWN
        if start != self._start:
            index = torch.arange(start, min(start + DRAWN, self._count))
            self._start, self._held = start, self._source.draw(index).pixels.permute(0, 2, 3, 1).contiguous().numpy()
        return self._held[number - start]


# ---- rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """`scores` by name, `read` what a reader makes of the reconstructions, `use` of each group of codes, `missing` what
    was not measured and why, `equal` the pictures that came back as they were."""

    name: str
    kind: str
    pictures: int
    pixels: int
    scores: Mapping[str, Estimate]
    device: str
    equal: int
    use: tuple[Use, ...]
    read: tuple[Score, ...]
    missing: Mapping[str, str]
    about: Mapping[str, Any]

    @property
    def share(self) -> float | None:
        """Of the codes, the part that was used; of several groups their mean."""
        return sum(use.share for use in self.use) / len(self.use) if self.use else None

    @property
    def perplexity(self) -> float | None:
        """Of a code; of several groups the geometric mean."""
        return 2 ** (sum(use.entropy for use in self.use) / len(self.use)) if self.use else None

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON, where null stands for what is infinite: the PSNR of equals, an interval's missing end."""
        return {
            "name": self.name,
            "kind": self.kind,
            "pictures": self.pictures,
            "pixels": self.pixels,
            "equal": self.equal,
            "device": self.device,
            "scores": {
                name: {"value": _finite(one.value), "interval": [_finite(end) for end in one.interval], "of": one.of}
                for name, one in self.scores.items()
            },
            "use": [use._asdict() | {"share": use.share, "perplexity": use.perplexity} for use in self.use],
            "read": [score.plain for score in self.read],
            "missing": dict(self.missing),
            "about": dict(self.about),
        }


def measure(
    coder: Coder,
    pictures: Shown,
    *,
    batch: int = 256,
    device: torch.device | str = "cpu",
    perceptual: Perceptual | None = None,
    network: Network | None = None,
    original: Tensor | None = None,
    reader: Reader | None = None,
    missing: Mapping[str, str] | None = None,
    rounds: int = ROUNDS,
) -> Row:
    """A row, in one pass and a batch at a time; what the reconstructions are measured by lies on `device`. `missing`
    says why there is no LPIPS, or no Fréchet distance, for people who look for it. `original` are the features (N, D)
    of the pictures themselves, so that the network sees them once and not for every coder."""
    units: list[Unit] = []
    errors: list[Tensor] = []
    counts: list[int] = []
    seconds: dict[str, list[float]] = {ENCODED: [], DECODED: []}
    seen = reader.look() if reader else None
    through: tuple[list[Tensor], list[Tensor]] = ([], [])  # features of pictures, and of reconstructions

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x in pictures.batches(batch):
            if not counts:
                coder.decode(coder.encode(x))  # what is slow only once
            coded = _timed(partial(coder.encode, x), seconds[ENCODED])
            y = _timed(partial(coder.decode, coded), seconds[DECODED])
            units.extend(coder.keep(coded))
            counts.append(len(x))
            x, y = x.to(device), y.to(device)
            errors.append((x.double() - y.double()).div(255).square().mean((1, 2, 3)).cpu())
            if seen:
                seen.add(y)
            if network is not None:
                through[1].append(features(y, network))
                if original is None:
                    through[0].append(features(x, network))
            yield x, y

    scores = compare(pairs(), perceptual=perceptual, rounds=rounds)
    if network is not None:
        first = torch.cat(through[0]) if original is None else original
        distance = frechet_distance(first.to(device), torch.cat(through[1]).to(device), network.name, paired=True)
        scores[distance.name] = distance
    kept = coder.done()
    lost = torch.cat(errors)
    mean = estimate(POOLED, lost, rounds=rounds)
    low, high = (_decibel(end) for end in reversed(mean.interval))
    scores[POOLED] = Estimate(POOLED, _decibel(mean.value), (low, high), len(lost))
    missing, total, N = dict(missing or {}), sum(unit.pixels for unit in units), len(lost)
    pixels, coded = [unit.pixels for unit in units], [unit.coded for unit in units]
    if None in coded:
        missing[CODED] = missing[FILED] = "codes are continuous, so they have no bits of their own"
    else:
        scores[CODED] = ratio(CODED, coded, pixels, of=N, once=kept.once, rounds=rounds)
        files = [unit.file for unit in units]
        alone = None in files  # one file holds them all, and there is no other to draw
        whole = ([kept.file], [total]) if alone else (files, pixels)
        scores[FILED] = ratio(FILED, *whole, of=N, rounds=rounds)
    if kept.use:
        bits = sum(use.entropy * use.tokens for use in kept.use)
        scores[ENTROPY] = ratio(ENTROPY, [bits], [total], of=N)
    for name, spent in seconds.items():
        scores[name] = ratio(name, counts, spent, of=N, rounds=rounds)
    read = seen.scores() if seen else ()
    equal = int((lost == 0).sum())
    return Row(
        coder.name, coder.kind, N, total, scores, coder.device, equal, kept.use, tuple(read), missing, coder.about
    )


def ratio(
    name: str,
    amounts: Sequence[float | None],
    over: Sequence[float],
    *,
    of: int,
    once: float = 0,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Estimate:
    """Σ amounts / Σ over, with `once` added to the first, and the percentiles of that over units drawn anew. A few
    units tell too little of others for an interval to have ends."""
    above, below = (torch.tensor(list(values), dtype=torch.float64) for values in (amounts, over))
    if len(above) != len(below) or not len(below) or not bool(below.sum() > 0):
        raise DataError(f"{name}: {len(above)} amounts over {len(below)}", "give at least one of each")
    value = (above.sum().item() + once) / below.sum().item()
    if len(above) < FEW or not rounds:
        return Estimate(name, value, (-math.inf, math.inf), of)
    chance = torch.Generator().manual_seed(seed)
    again = []
    for _ in range(rounds):
        draw = torch.randint(len(above), (len(above),), generator=chance)
        again.append((above[draw].sum() + once) / below[draw].sum())
    values = torch.stack(again).sort().values
    ends = math.floor(TAIL * (rounds - 1)), math.ceil((1 - TAIL) * (rounds - 1))
    return Estimate(name, value, (values[ends[0]].item(), values[ends[1]].item()), of)


def _timed(call: Callable[[], Any], spent: list[float]) -> Any:
    start = time.perf_counter()
    found = call()
    spent.append(time.perf_counter() - start)
    return found


def _decibel(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
