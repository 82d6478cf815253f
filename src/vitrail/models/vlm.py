"""A vision-language model from parts: a tower looks, a connector makes soft tokens of what it saw, and a decoder reads
them in one stream with the words. Tower, connector, fusion, resolution and positions are chosen independently.

V views, C channels, H, W pixels, N patches, K numbers of a patch, D width of the tower, M soft tokens, W width of the
decoder, B rows, L tokens of a row
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig, Marked, Pictures, Stacked
from vitrail.codecs.tower import CodesTower, CodesTowerConfig
from vitrail.connectors import Fused, make_connector
from vitrail.connectors.grids import Laid
from vitrail.connectors.reduce import AnyReduction, watched
from vitrail.connectors.stitch import stitched
from vitrail.connectors.voco import voco_groups, voco_plan
from vitrail.encoders.hybrid import Hybrid, HybridConfig
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.models import seeing
from vitrail.models.vlm_config import Shape, TowerConfig, VLMConfig
from vitrail.nn import KVCache, LearnedPositions, Work, cost, small
from vitrail.processing.anyres import AnyRes
from vitrail.processing.cut import Cut
from vitrail.processing.grid import Grid
from vitrail.processing.images import to_array
from vitrail.processing.patches import to_blocks
from vitrail.processing.tiles import Tiles
from vitrail.stream import KINDS, Batch, merge

SEEN = ("image", "video")


class Shown(NamedTuple):
    """Pictures, or videos, in the order of the parts that wait for them."""

    pixels: Tensor  # views (V, C, H, W) of one size or, for packed towers, patches (N, K)
    shapes: tuple[Shape, ...]
    questions: tuple[Sequence[Tensor], ...] = ()  # of each picture, where queries are fused with them: their ids (T,)


class Seen(NamedTuple):
    """What the decoder is given for `Shown`: (M, W) for each, and the same for each of the tower's taps."""

    blocks: list[Tensor]
    depths: list[list[Tensor]]


class Read(NamedTuple):
    """How the connector reads a view."""

    reduction: AnyReduction | None  # what leaves fewer of its features before
    laid: Laid  # how those lie


class VLM(nn.Module):
    """`model(batch, pictures)` → logits (B, L, V) of a packed stream."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self._take(config)
        self.tower = _make_tower(config.tower)
        self.place = None
        if config.place:
            grid = config.policy.cut(1, 1).views[0].grid  # which all views have
            self.place = LearnedPositions((grid.h, grid.w), config.width, config.lead)
            nn.init.zeros_(self.place.table)
        self.connector = make_connector(config.connector)
        taps = config.tower.taps if isinstance(config.tower, PackedViTConfig) else ()
        self.stack = nn.ModuleList([make_connector(config.stack) for _ in taps if config.stack is not None])
        self.queries = None if config.queries is None else Fused(config.queries)
        self.decoder = Decoder(config.decoder)
        self.newline = small(1, config.decoder.block.width) if config.newline else None
        self.voco = small(config.voco, config.decoder.block.width) if config.voco else None

    def reduced(self, reduce: AnyReduction | None) -> "VLM":
        """The same model, of the same weights, that is left other features of each view, or all of them (None)."""
        other = copy.copy(self)
        other._take(self.config.with_(reduce=reduce))  # which refuses what does not fit
        return other

    def _take(self, config: VLMConfig) -> None:
        """What a pass asks of the config is asked once: it is no work for a compiler."""
        self.config, self._grid, self._still, self._frame = config, None, None, None
        if not isinstance(config.tower, PackedViTConfig):
            policy, self._grid = config.policy, config.grid
            frame = policy.film(1).views[0].grid if isinstance(policy, AnyRes) else self._grid
            self._still, self._frame = (Read(config.left(grid), config.laid(grid)) for grid in (self._grid, frame))

    # ---- pixels -------------------------------------------------------------------------------------------------

    def prepare(self, images: Sequence[Image.Image]) -> Shown:
        """Pictures (RGB) as the tower reads them."""
        return self._here(prepare(self.config, images))

    def packed(self, items: Sequence[Tensor]) -> Shown:
        """Stills (C, H, W) and videos (T, C, H, W), normalised, for a packed tower."""
        return self._here(_blocks(self.config, items))

    def filmed(self, items: Sequence[Tensor]) -> Shown:
        """Videos (T, C, H, W), normalised, as the tower reads them: packed, or with a view for each frame."""
        return self._here(filmed(self.config, items))

    def _here(self, shown: Shown) -> Shown:
        return shown._replace(pixels=shown.pixels.to(self.decoder.embed.weight))

    # ---- features -----------------------------------------------------------------------------------------------

    def look(self, shown: Shown) -> Seen:
        seen = self._soft(shown)
        if self.queries is None:
            return seen
        talks = self.queries.talks(seen.blocks, shown.questions or [[]] * len(seen.blocks))
        return Seen([torch.cat(talk) for talk in talks], seen.depths)

    def _soft(self, shown: Shown) -> Seen:
        if isinstance(self.tower, PackedViT):
            grids = [shape for shape in shown.shapes if isinstance(shape, Grid)]
            *taps, last = self.tower.depths(shown.pixels, grids)  # (N, D) each
            counts = [grid.tokens for grid in grids]
            depths = [_packed(stack, tap, grids) for stack, tap in zip(self.stack, taps, strict=True)]
            return Seen(
                list(_packed(self.connector, last, grids).split(counts)), [list(d.split(counts)) for d in depths]
            )
        cuts = [shape for shape in shown.shapes if isinstance(shape, Cut)]
        views = [view for cut in cuts for view in cut.views]
        if len(shown.pixels) != len(views):
            raise ImageError(f"{len(shown.pixels)} views for pictures that were cut into {len(views)}", "use prepare")
        soft = self.soft(shown.pixels, frames=views[0].grid != self._grid)  # (V, M, W)
        return Seen([self._read(mine, cut) for mine, cut in zip(_by_cut(soft, cuts), cuts, strict=True)], [])

    def soft(self, pixels: Tensor, *, frames: bool = False) -> Tensor:
        """Views (V, C, H, W), of pictures or of videos → soft tokens (V, M, W)"""
        read = self._frame if frames else self._still
        assert read is not None
        features = self.features(pixels) if read.reduction is None else self._left(pixels, read.reduction)
        return self.connector(features, read.laid)

    def features(self, pixels: Tensor) -> Tensor:
        """Views (V, C, H, W) → what the tower makes of them, each at its place where these are learned (V, N, D)"""
        if isinstance(self.tower, ViT):
            found = (self.tower.tokens if self.config.prefix else self.tower)(pixels, layer=self.config.layer)
        else:
            found = self.tower(pixels)
        return self._placed(found)

    def _placed(self, features: Tensor) -> Tensor:
        return features if self.place is None else features + self.place(*self.place.grid)

    def _left(self, pixels: Tensor, reduction: AnyReduction) -> Tensor:
        """What is left of the features of views, and before them the prefix, where it is read: (V, n, D)"""
        seen, tower = None, self.tower
        if reduction.looking:
            assert isinstance(tower, ViT)
            tokens, seen = watched(tower, pixels, self.config.layer)
            features = self._placed(tokens if self.config.prefix else tokens[:, tower.config.prefix :])
        else:
            features = self.features(pixels)
        lead, patches = features.split([self.config.lead, features.shape[1] - self.config.lead], dim=1)
        assert self._grid is not None
        return torch.cat([lead, reduction.reduce(patches, seen, self._grid)], dim=1)

    def _read(self, soft: Tensor, cut: Cut) -> Tensor:
        """The soft tokens (views, M, W) of one picture in the order they are read, newlines aside: (M', W)"""
        if not self.config.stitches(cut):
            return soft.flatten(0, 1)
        return torch.cat([stitched(soft, cut, span) for span in cut.spans])

    # ---- words --------------------------------------------------------------------------------------------------

    def hidden(
        self,
        batch: Batch,
        pictures: Shown | None = None,
        videos: Shown | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the head reads, (B, L, W). With a cache every row is one sample, from its first token on; where other
        tokens stand for a picture, the cache then holds these alone."""
        seen = {feed: self.look(shown) for feed, shown in zip(SEEN, (pictures, videos), strict=True) if shown}
        learned = {"newline": self.newline, "query": self.voco}
        tables = {feed: table for feed, table in learned.items() if table is not None}
        ids = batch.ids.to(self.decoder.embed.weight.device)
        embeds = self.decoder.embed(ids)
        embeds = merge(embeds, {feed: one.blocks for feed, one in seen.items()} | tables, batch)
        beside = self._beside(batch, seen, embeds)
        positions = batch.positions[..., 0] if self.config.decoder.rotary.layout == "1d" else batch.positions
        if self.voco is not None and seen:
            return self._standing(batch, embeds, positions.to(ids.device), beside, cache)
        more: dict[str, Any] = {"plan": batch.plan().to(ids.device)}
        if cache is not None:
            counts = torch.tensor(batch.alone.lengths)  # on the host, where the cache looks at them
            spans = batch.spans.to(ids.device) if bool(batch.spans.any()) else None  # without any, kernels need no mask
            more = {"cache": cache, "counts": counts, "spans": spans}
        return self.decoder.hidden(embeds=embeds, positions=positions.to(ids.device), pictures=beside, **more)

    def _standing(
        self, batch: Batch, embeds: Tensor, positions: Tensor, beside: Pictures | None, cache: KVCache | None
    ) -> Tensor:
        """The pass of tokens that stand for pictures. What of a cache nobody sees any more is dropped."""
        pictures = batch.kinds == KINDS["image"].id
        groups = voco_groups(pictures, batch.kinds == KINDS["query"].id)
        if cache is not None:
            cache.extend(embeds.shape[1], torch.tensor(batch.alone.lengths))
        plan = voco_plan(groups, batch.segments).to(embeds.device)
        hidden = self.decoder.through(embeds, positions, plan, cache, beside)
        if cache is not None:
            cache.keep(~pictures)
        return hidden

    def _beside(self, batch: Batch, seen: dict[str, Seen], embeds: Tensor) -> Pictures | None:
        """What the fusion point takes beside the tokens."""
        kinds = torch.tensor([KINDS[feed].id for feed in SEEN], device=batch.kinds.device)
        if not seen:
            return None
        match self.config.decoder.fusion:
            case ExpertConfig():
                return Marked(torch.isin(batch.kinds, kinds).to(embeds.device))
            case DeepStackConfig(at=at):
                mask = torch.isin(batch.kinds, kinds).to(embeds.device)
                # The depths go where the soft tokens went, and are read off there in the order of the mask.
                laid = [
                    merge(torch.zeros_like(embeds), {feed: one.depths[k] for feed, one in seen.items()}, batch)[mask]
                    for k in range(len(at))
                ]
                return Stacked(mask, laid)
        return None

    def forward(self, batch: Batch, pictures: Shown | None = None, videos: Shown | None = None) -> Tensor:
        return self.decoder.logits(self.hidden(batch, pictures, videos))

    # ---- costs --------------------------------------------------------------------------------------------------

    def work(
        self,
        sizes: Sequence[tuple[int, int]],
        words: int,
        batch: int = 1,
        questions: int = 1,
        films: Sequence[Shape] = (),
    ) -> seeing.SeeingWork:
        """What `cost` needs to know of a prompt of pictures of these sizes (height, width), of videos of these shapes,
        and so many words behind them, `batch` times: all is read, and the logits of the last token are asked for. Of
        `questions` about each picture, queries that are fused with them need more than for one."""
        config = self.config
        cuts = [config.policy.cut(*size) for size in sizes]
        soft, played = [config.tokens(cut, questions) for cut in cuts], [config.tokens(film) for film in films]
        entering = sum(soft) + sum(played)
        prompt = Work.prefill(words + entering, batch)
        for kind, counts in zip(SEEN, (soft, played), strict=True):
            if kind in config.rules.both:
                prompt = prompt.with_(pairs=prompt.pairs + batch * sum(n * (n - 1) // 2 for n in counts))
        if config.voco:
            unseen, held = self._unseen(soft, words), prompt.held - batch * self._dropped(sizes)
            prompt = prompt.with_(pairs=prompt.pairs - batch * unseen, held=held)
        stills = [view.grid for cut in cuts for view in cut.views] * batch
        frames = [grid for film in films for grid in _frames(film)] * batch
        if isinstance(self.tower, PackedViT):
            looks = self._looks(stills + frames)
        else:  # frames may be read in another way
            looks = seeing.summed(self._looks(stills), self._looks(frames))
        if self.queries is not None and cuts:  # all words are of the questions
            asked = (words, *[0] * (questions - 1))
            looks += (self.queries.work(config.given(cuts[0]), batch * len(cuts), asked),)
        return seeing.SeeingWork.of(prompt.with_(context=batch * entering), *looks)

    def step(self, length: int, sizes: Sequence[tuple[int, int]], batch: int = 1) -> Work:
        """The same of one more word, the `length`-th, behind such pictures; those that others stand for are gone."""
        return Work.decode(max(1, length - self._dropped(sizes)), batch)

    def _dropped(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of pictures that a cache does not keep."""
        return sum(self.config.given(self.config.policy.cut(*size)) for size in sizes) if self.config.voco else 0

    def _unseen(self, soft: Sequence[int], words: int) -> int:
        """Pairs of a causal row that tokens standing for pictures spare: nobody behind sees the picture itself."""
        behind, found = words, 0
        for n in reversed(soft):
            found += (n - self.config.voco) * behind
            behind += n
        return found

    def _looks(self, grids: list[Grid]) -> tuple[Work, ...]:
        """What tower and connector do for views of these grids."""
        if not grids:
            return ()
        if isinstance(self.tower, PackedViT):
            line = sum(grid.patches for grid in grids) // grids[0].merge  # see `_packed`
            return self.tower.work(grids), self.connector.work(Grid(h=grids[0].merge, w=line, merge=grids[0].merge))
        V, lead = len(grids), self.tower.config.prefix if isinstance(self.tower, ViT) else 0
        return Work.full(lead + grids[0].patches, V), self.connector.work(self.config.laid(grids[0]), V)

    def legs(self, work: Work) -> dict[str, seeing.Leg]:
        """The parts, each with its work."""
        loose = [table for table in (self.newline, self.voco) if table is not None]
        connectors = [self.connector, *self.stack, *([] if self.place is None else [self.place])]
        more: dict[str, Any] = {"layer": self.config.layer, "loose": loose, "queries": self.queries}
        more["choosing"] = self._choosing()
        return seeing.make_legs(work, self.tower, connectors, self.decoder, **more)

    def _choosing(self) -> int:
        """Operations by which it is found out what is left of a view."""
        config, reduction = self.config, self.config.reduction
        tower = config.tower if isinstance(config.tower, ViTConfig) else None
        return 0 if reduction is None or tower is None else reduction.flops(tower, config.grid.patches)


cost.flops.register(VLM, seeing.flops)
cost.bytes.register(VLM, seeing.bytes)


def prepare(config: VLMConfig, images: Sequence[Image.Image]) -> Shown:
    """Pictures (RGB) as the tower of such a model reads them, in float32 on the CPU: no weight is needed."""
    views = [to_array(v, config.mean, config.std) for image in images for v in config.policy.apply(image)]
    if not views:
        raise ImageError("no picture", "give at least one, or ask without pictures")
    if isinstance(config.tower, PackedViTConfig):
        return _blocks(config, views)
    return Shown(torch.stack(views), shapes(config, [(image.height, image.width) for image in images]))


def filmed(config: VLMConfig, items: Sequence[Tensor]) -> Shown:
    """Videos (T, C, H, W), normalised, as the tower of such a model reads them."""
    policy = config.policy
    if not isinstance(policy, Tiles | AnyRes):
        return _blocks(config, items)
    return Shown(torch.cat(list(items)), tuple(policy.film(len(item)) for item in items))


def shapes(config: VLMConfig, sizes: Sequence[tuple[int, int]]) -> tuple[Shape, ...]:
    """Those of pictures of these sizes (height, width)."""
    cuts = [config.policy.cut(*size) for size in sizes]
    return tuple(cut.views[0].grid if isinstance(config.tower, PackedViTConfig) else cut for cut in cuts)


def _blocks(config: VLMConfig, items: Sequence[Tensor]) -> Shown:
    tower = config.tower
    if not isinstance(tower, PackedViTConfig):
        raise ConfigError(f"{type(tower).__name__} reads views of one size", "use prepare")
    cut = [to_blocks(item, tower.patch, merge=tower.merge, temporal=tower.temporal) for item in items]
    return Shown(torch.cat([patches for patches, _ in cut]), tuple(grid for _, grid in cut))


def _make_tower(config: TowerConfig) -> nn.Module:
    match config:
        case ViTConfig():
            return ViT(config)
        case PackedViTConfig():
            return PackedViT(config)
        case TowersConfig():
            return Towers(config)
        case HybridConfig():
            return Hybrid(config)
        case CodesTowerConfig():
            return CodesTower(config)


def _frames(film: Shape) -> list[Grid]:
    """What the tower reads of a video."""
    return [film] if isinstance(film, Grid) else [view.grid for view in film.views]


def _packed(connector: nn.Module, features: Tensor, grids: Sequence[Grid]) -> Tensor:
    """(N, D) of all items → (ΣM, W). Blocks stand together, so that all of them make one line."""
    m = grids[0].merge
    return connector(features[None], Grid(h=m, w=len(features) // m, merge=m))[0]


def _by_cut(soft: Tensor, cuts: Sequence[Cut]) -> Sequence[Tensor]:
    return soft.split([len(cut.views) for cut in cuts])
