"""A vision-language model from parts: a tower looks, a connector makes soft tokens of what it saw, and a decoder reads
them in one stream with the words. Tower, connector, fusion, resolution and positions are chosen independently.

V views, C channels, H, W pixels, N patches, K numbers of a patch, D width of the tower, M soft tokens, W width of the
decoder, B rows, L tokens of a row
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import CrossConfig, DeepStackConfig, ExpertConfig, Marked, Pictures, Stacked
from vitrail.config import Config
from vitrail.connectors import AnyConnectorConfig, Fused, FusedConfig, MergerConfig, make_connector
from vitrail.connectors.stitch import stitched
from vitrail.encoders.depth import depth_of
from vitrail.encoders.packed import PackedViT, PackedViTConfig
from vitrail.encoders.towers import Towers, TowersConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import KVCache, small
from vitrail.processing.cut import Cut
from vitrail.processing.grid import Grid
from vitrail.processing.images import NORMS, to_array
from vitrail.processing.patches import to_blocks
from vitrail.processing.resolution import AnyPolicy, NaFlex, Naive, Native
from vitrail.stream import KINDS, Batch, Part, Rules, merge, picture, video

TowerConfig: TypeAlias = ViTConfig | PackedViTConfig | TowersConfig
Shape: TypeAlias = Cut | Grid
SEEN = ("image", "video")


class VLMConfig(Config):
    """
    policy     how a picture of any size is fitted to the tower; patches are cut by the tower's side
    mean, std  of the pixels, channel by channel
    layer      of the tower whose features are read (LLaVA: −2); the last, with its norm, unless given
    prefix     whether CLS and registers are read along with the patches
    stack      what makes soft tokens of the tower's taps, one connector each (DeepStack)
    queries    what condenses the connector's tokens, together with the questions asked about them (token scaling)
    newline    whether a learned vector stands where a row of tiles ends (LLaVA-NeXT)
    rules      how words and pictures become a stream
    marks      ids of the words that stand for or around pictures, by name: what a caller writes, and files keep
    """

    tower: TowerConfig
    connector: AnyConnectorConfig
    decoder: DecoderConfig
    policy: AnyPolicy = Naive()
    mean: tuple[float, ...] = NORMS["clip"].mean
    std: tuple[float, ...] = NORMS["clip"].std
    layer: int | None = None
    prefix: bool = False
    stack: AnyConnectorConfig | None = None
    queries: FusedConfig | None = None
    newline: bool = False
    rules: Rules = Rules()
    marks: dict[str, int] = {}

    def __post_init__(self) -> None:
        D, W = self.width, self.decoder.block.width
        between = W if self.queries is None else self.queries.reads
        ways = {
            "connector": (self.connector, D, between),
            "stack": (self.stack, D, W),
            "queries": (self.queries, between, W),
        }
        for name, (connector, reads, gives) in ways.items():
            if connector is not None and (connector.reads, connector.gives) != (reads, gives):
                raise ConfigError(
                    f"the {name} reads {connector.reads} and gives {connector.gives}; it is given {reads} and should "
                    f"give {gives}",
                    f"set {name}.reads = {reads} and {name}.gives = {gives}",
                )
        if isinstance(self.connector, FusedConfig):
            raise ConfigError("question-fused queries read what a connector gives", "give them as `queries`")
        if isinstance(self.decoder.fusion, CrossConfig):
            raise ConfigError("cross-attention looks at pictures that are no tokens of the stream", "use another model")
        self._check_tower()
        self._check_stack()
        if not isinstance(self.policy, Native) and self.queries is None:
            self._check_rows(self.policy.cut(1, 1))  # what a cut is made of does not hang on the picture
        if self.rules.vocab is not None and self.rules.vocab != self.decoder.vocab:
            raise ConfigError(f"rules for {self.rules.vocab} ids and a decoder of {self.decoder.vocab}")

    def _check_tower(self) -> None:
        if isinstance(self.tower, ViTConfig):
            depth_of(self.layer, self.tower.layers)  # refuses a layer that is not there
        elif self.layer is not None or self.prefix:
            raise ConfigError(
                f"layer and prefix choose among the tokens of one ViT, not of {type(self.tower).__name__}",
                "give towers their own layers" if isinstance(self.tower, TowersConfig) else "leave them out",
            )
        if isinstance(self.tower, PackedViTConfig) != isinstance(self.policy, Native):
            raise ConfigError(
                f"{type(self.tower).__name__} cannot read what the policy {type(self.policy).__name__} gives",
                "packed towers read pictures of their own size (native); others read views of one size",
            )
        if isinstance(self.policy, NaFlex):
            raise ConfigError("naflex gives views of unequal sizes, which are not put together here", "use native")
        keys = ("patch", "merge") if isinstance(self.tower, PackedViTConfig) else ("patch",)
        wrong = [key for key in keys if self._policy(key) != self._tower(key)]
        if wrong:
            raise ConfigError(
                f"the policy's {wrong[0]} is {self._policy(wrong[0])}, the tower's {self._tower(wrong[0])}",
                f"set policy.{wrong[0]} = {self._tower(wrong[0])}",
            )
        if isinstance(self.tower, PackedViTConfig):
            for name, connector in (("connector", self.connector), ("stack", self.stack)):
                if connector is not None and not _reads_blocks(connector, self.tower.merge):
                    raise ConfigError(
                        f"the {name} does not read the {self.tower.merge}² features that a packed tower puts together",
                        f'use a merger with order = "blocks" and merge = {self.tower.merge}',
                    )

    def _check_stack(self) -> None:
        taps = len(self.tower.taps) if isinstance(self.tower, PackedViTConfig) else 0
        wanted = len(self.decoder.fusion.at) if isinstance(self.decoder.fusion, DeepStackConfig) else 0
        if not (taps == wanted and (self.stack is not None) == bool(taps)):
            raise ConfigError(
                f"{taps} taps of the tower, {'a' if self.stack else 'no'} stack connector, and {wanted} layers of the "
                "decoder to add them at",
                "DeepStack needs all three, and as many taps as layers",
            )

    def _check_rows(self, cut: Cut) -> None:
        if not self._stitched(cut) and any(span.newline != "none" for span in cut.spans):
            raise ConfigError(
                f"{type(self.connector).__name__} keeps no rows that newlines could end", "use a projector, or naive"
            )

    def _policy(self, key: str) -> int:
        return getattr(self.policy, key, 1)

    def _tower(self, key: str) -> int:
        tower = self.tower.towers[0].vit if isinstance(self.tower, TowersConfig) else self.tower
        return getattr(tower, key, 1)

    @property
    def width(self) -> int:
        """Of the features that the tower gives."""
        return self.tower.width if isinstance(self.tower, TowersConfig) else self.tower.block.width

    def tokens(self, shape: Shape, questions: int = 1) -> int:
        """Soft tokens of a picture or a video, newlines included, that the decoder reads: all that so many questions
        need together. Nothing needs to be built for this."""
        return (
            self._condensed(shape) if self.queries is None else self.queries.tokens(self._condensed(shape), questions)
        )

    def _condensed(self, shape: Shape) -> int:
        """Soft tokens that the connector gives, newlines included."""
        if isinstance(shape, Grid):
            return shape.tokens
        if self._stitched(shape):
            return shape.tokens
        return sum(self.connector.tokens(self.laid(view.grid)) for view in shape.views)

    def _stitched(self, cut: Cut) -> bool:
        """Whether the connector keeps the lattice, so that views can lie side by side and rows can end."""
        return all(self.connector.tokens(self.laid(view.grid)) == view.grid.tokens for view in cut.views)

    def laid(self, grid: Grid) -> Grid | int:
        """How the features of a view lie: in its grid, or in no grid where a prefix stands before them."""
        lead = self.tower.prefix if self.prefix and isinstance(self.tower, ViTConfig) else 0
        return lead + grid.patches if lead else grid

    def part(self, shape: Shape, **more: Any) -> Part:
        """The place of a picture, or of a video (a grid of several frames), in a stream."""
        if isinstance(shape, Grid):
            return video(shape, **more) if shape.t > 1 else picture(shape, **more)
        self._check_rows(shape)
        return picture(shape if self._stitched(shape) else self.tokens(shape), **more)

    def parts(self, shape: Shape, questions: int = 1, **more: Any) -> list[Part]:
        """What stands before each of so many questions about one picture: the picture, and then nothing, or the queries
        that were fused with that question."""
        if self.queries is None:
            return [self.part(shape, **more)]
        return [picture(count, **more) for count in self.queries.groups(questions)]


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
        self.connector = make_connector(config.connector)
        taps = config.tower.taps if isinstance(config.tower, PackedViTConfig) else ()
        self.stack = nn.ModuleList([make_connector(config.stack) for _ in taps if config.stack is not None])
        self.queries = None if config.queries is None else Fused(config.queries)
        self.decoder = Decoder(config.decoder)
        self.newline = small(1, config.decoder.block.width) if config.newline else None

    # ---- pixels -------------------------------------------------------------------------------------------------

    def prepare(self, images: Sequence[Image.Image]) -> Shown:
        """Pictures (RGB) as the tower reads them."""
        policy, weight = self.config.policy, self.decoder.embed.weight
        cuts = tuple(policy.cut(image.height, image.width) for image in images)
        views = [to_array(v, self.config.mean, self.config.std) for image in images for v in policy.apply(image)]
        if not views:
            raise ImageError("no picture", "give at least one, or ask without pictures")
        if isinstance(self.config.tower, PackedViTConfig):
            return self.packed(views)
        return Shown(torch.stack(views).to(weight), cuts)

    def packed(self, items: Sequence[Tensor]) -> Shown:
        """Stills (C, H, W) and videos (T, C, H, W), normalised, for a packed tower."""
        tower = self.config.tower
        if not isinstance(tower, PackedViTConfig):
            raise ConfigError(f"{type(tower).__name__} reads views of one size", "use prepare")
        cut = [to_blocks(item, tower.patch, merge=tower.merge, temporal=tower.temporal) for item in items]
        return Shown(torch.cat([patches for patches, _ in cut]).to(self.decoder.embed.weight), tuple(g for _, g in cut))

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
        features = self._features(shown.pixels)  # (V, N, D)
        if len(features) != len(views):
            raise ImageError(f"{len(features)} views for pictures that were cut into {len(views)}", "use prepare")
        soft = self.connector(features, self.config.laid(views[0].grid))  # (V, M, W)
        return Seen([self._read(mine, cut) for mine, cut in zip(_by_cut(soft, cuts), cuts, strict=True)], [])

    def _features(self, pixels: Tensor) -> Tensor:
        if isinstance(self.tower, ViT):
            return (self.tower.tokens if self.config.prefix else self.tower)(pixels, layer=self.config.layer)
        return self.tower(pixels)

    def _read(self, soft: Tensor, cut: Cut) -> Tensor:
        """The soft tokens (views, M, W) of one picture in the order they are read, newlines aside: (M', W)"""
        if not self.config._stitched(cut):
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
            counts = torch.tensor(batch.lengths, device=ids.device)
            spans = batch.spans.to(ids.device) if bool(batch.spans.any()) else None  # without any, kernels need no mask
            more = {"cache": cache, "counts": counts, "spans": spans}
        return self.decoder.hidden(embeds=embeds, positions=positions.to(ids.device), pictures=beside, **more)

    def _beside(self, batch: Batch, seen: dict[str, Seen], embeds: Tensor) -> Pictures | None:
        """What the fusion point takes beside the tokens."""
        kinds = torch.tensor([KINDS[feed].id for feed in SEEN])
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


def _reads_blocks(connector: AnyConnectorConfig, merge: int) -> bool:
    """Whether pictures packed in one line stay apart in it."""
    return isinstance(connector, MergerConfig) and (connector.order, connector.merge) == ("blocks", merge)


def _make_tower(config: TowerConfig) -> nn.Module:
    match config:
        case ViTConfig():
            return ViT(config)
        case PackedViTConfig():
            return PackedViT(config)
        case TowersConfig():
            return Towers(config)


def _packed(connector: nn.Module, features: Tensor, grids: Sequence[Grid]) -> Tensor:
    """(N, D) of all items → (ΣM, W). Blocks stand together, so that all of them make one line."""
    m = grids[0].merge
    return connector(features[None], Grid(h=m, w=len(features) // m, merge=m))[0]


def _by_cut(soft: Tensor, cuts: Sequence[Cut]) -> Sequence[Tensor]:
    return soft.split([len(cut.views) for cut in cuts])
