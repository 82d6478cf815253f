"""A vision-language model from parts: a tower looks, a connector makes soft tokens of what it saw, and a decoder reads
them in one stream with the words. Tower, connector, fusion, resolution and positions are chosen independently.

V views, C channels, H, W pixels, N patches, K numbers of a patch, D width of the tower, M soft tokens, W width of the
decoder, B rows, L tokens of a row
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig, Marked, Pictures, Stacked
from vitrail.codecs.tower import CodesTower, CodesTowerConfig
from vitrail.connectors import Fused, make_connector
from vitrail.connectors.stitch import stitched
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.models import seeing
from vitrail.models.vlm_config import Shape, TowerConfig, VLMConfig
from vitrail.nn import KVCache, LearnedPositions, Work, cost, small
from vitrail.processing.cut import Cut
from vitrail.processing.grid import Grid
from vitrail.processing.images import to_array
from vitrail.processing.patches import to_blocks
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


class VLM(nn.Module):
    """`model(batch, pictures)` → logits (B, L, V) of a packed stream."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.config = config
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

    # ---- pixels -------------------------------------------------------------------------------------------------

    def prepare(self, images: Sequence[Image.Image]) -> Shown:
        """Pictures (RGB) as the tower reads them."""
        return self._here(prepare(self.config, images))

    def packed(self, items: Sequence[Tensor]) -> Shown:
        """Stills (C, H, W) and videos (T, C, H, W), normalised, for a packed tower."""
        return self._here(_blocks(self.config, items))

    def _here(self, shown: Shown) -> Shown:
        return shown._replace(pixels=shown.pixels.to(self.decoder.embed.weight))

    # ---- features -----------------------------------------------------------------------------------------------

    def look(self, shown: Shown) -> Seen:
        seen = self._soft(shown)
        if self.queries is None:
            return seen
        return Seen(self.queries.talks(seen.blocks, shown.questions or [[]] * len(seen.blocks)), seen.depths)

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
        features = self.features(shown.pixels)  # (V, N, D)
        if len(features) != len(views):
            raise ImageError(f"{len(features)} views for pictures that were cut into {len(views)}", "use prepare")
        soft = self.connector(features, self.config.laid(views[0].grid))  # (V, M, W)
        return Seen([self._read(mine, cut) for mine, cut in zip(_by_cut(soft, cuts), cuts, strict=True)], [])

    def features(self, pixels: Tensor) -> Tensor:
        """Views (V, C, H, W) → what the tower makes of them, each at its place where these are learned (V, N, D)"""
        if isinstance(self.tower, ViT):
            found = (self.tower.tokens if self.config.prefix else self.tower)(pixels, layer=self.config.layer)
        else:
            found = self.tower(pixels)
        return found if self.place is None else found + self.place(*self.place.grid)

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
        """What the head reads, (B, L, W). With a cache every row is one sample, from its first token on."""
        seen = {feed: self.look(shown) for feed, shown in zip(SEEN, (pictures, videos), strict=True) if shown}
        tables = {} if self.newline is None else {"newline": self.newline}
        ids = batch.ids.to(self.decoder.embed.weight.device)
        embeds = self.decoder.embed(ids)
        embeds = merge(embeds, {feed: one.blocks for feed, one in seen.items()} | tables, batch)
        beside = self._beside(batch, seen, embeds)
        positions = batch.positions[..., 0] if self.config.decoder.rotary.layout == "1d" else batch.positions
        more: dict[str, Any] = {"plan": batch.plan().to(ids.device)}
        if cache is not None:
            counts = torch.tensor(batch.alone.lengths)  # on the host, where the cache looks at them
            spans = batch.spans.to(ids.device) if bool(batch.spans.any()) else None  # without any, kernels need no mask
            more = {"cache": cache, "counts": counts, "spans": spans}
        return self.decoder.hidden(embeds=embeds, positions=positions.to(ids.device), pictures=beside, **more)

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

    def work(self, sizes: Sequence[tuple[int, int]], words: int, batch: int = 1) -> seeing.SeeingWork:
        """What `cost` needs to know of a prompt of so many words and pictures of these sizes (height, width), `batch`
        times: all is read, and the logits of the last token are asked for."""
        cuts = [self.config.policy.cut(*size) for size in sizes]
        soft = [self.config.tokens(cut) for cut in cuts]
        prompt = Work.prefill(words + sum(soft), batch)
        if "image" in self.config.rules.both:
            prompt = prompt.with_(pairs=prompt.pairs + batch * sum(n * (n - 1) // 2 for n in soft))
        grids = [view.grid for cut in cuts for view in cut.views] * batch
        looks = self._looks(grids)
        if self.queries is not None and cuts:  # all words are the question
            looks += (self.queries.work(self.config.given(cuts[0]), batch * len(cuts), (words,)),)
        return seeing.SeeingWork.of(prompt.with_(context=batch * sum(soft)), *looks)

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
        loose = [] if self.newline is None else [self.newline]
        connectors = [self.connector, *self.stack, *([] if self.place is None else [self.place])]
        more: dict[str, Any] = {"layer": self.config.layer, "loose": loose, "queries": self.queries}
        return seeing.make_legs(work, self.tower, connectors, self.decoder, **more)


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
        case CodesTowerConfig():
            return CodesTower(config)


def _packed(connector: nn.Module, features: Tensor, grids: Sequence[Grid]) -> Tensor:
    """(N, D) of all items → (ΣM, W). Blocks stand together, so that all of them make one line."""
    m = grids[0].merge
    return connector(features[None], Grid(h=m, w=len(features) // m, merge=m))[0]


def _by_cut(soft: Tensor, cuts: Sequence[Cut]) -> Sequence[Tensor]:
    return soft.split([len(cut.views) for cut in cuts])
