"""A vision-language model whose pictures are no tokens: gated blocks between the layers of its decoder look at them
(Flamingo, Idefics, Llama-3.2-Vision). In the stream a word marks where each picture stands, and nothing more.

P pictures, T tiles, C channels, H, W pixels, N features of a picture, D width of what is looked at, B rows, L tokens of
a row, S features of a row, V vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import CrossConfig, Looked, picture_plan
from vitrail.config import Config
from vitrail.connectors import AnyConnectorConfig, FusedConfig, make_connector
from vitrail.encoders.depth import depth_of
from vitrail.encoders.tiled import TiledViT, TiledViTConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError, StreamError
from vitrail.models import seeing
from vitrail.nn import KVCache, LearnedPositions, Plan, Work, cost
from vitrail.processing.canvas import Canvas
from vitrail.processing.images import NORMS, to_array
from vitrail.processing.resolution import Crop, Letterbox, Naive
from vitrail.stream import Batch

TowerConfig: TypeAlias = TiledViTConfig | ViTConfig
LookingPolicy: TypeAlias = Canvas | Naive | Letterbox | Crop


class LookingVLMConfig(Config):
    """
    connector  what makes of the tower's features those that are looked at; without one they are looked at as they are
    mark       the id of the word that stands for a picture: <|image|> of Llama-3.2-V, <image> of Idefics
    joined     words after pictures that stand side by side see all of them (Llama-3.2-V), or the last one alone
    layer      of a ViT whose features are read; the last, with its norm, unless given
    prefix     whether a ViT's CLS and registers are read along with the patches (Idefics); a tiled tower's CLS is
    place      whether a learned row for each place of a picture is added to a ViT's features; it starts at zero
    policy     how a picture of any size is fitted to the tower; unless given, on a canvas of tiles, or squashed
    mean, std  of the pixels, channel by channel
    """

    tower: TowerConfig
    decoder: DecoderConfig
    mark: int
    connector: AnyConnectorConfig | None = None
    joined: bool = False
    layer: int | None = None
    prefix: bool = False
    place: bool = False
    policy: LookingPolicy | None = None
    mean: tuple[float, ...] = NORMS["clip"].mean
    std: tuple[float, ...] = NORMS["clip"].std

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Plain data, in which systems and parts may be given by the names of presets: see `vitrail.models.named`."""
        from vitrail.models.named import fill  # which knows the systems, and they are made of this

        return super().read(fill(data))

    def __post_init__(self) -> None:
        D, read = self.width, self.decoder.vocab + self.decoder.extra
        if not 0 <= self.mark < read:
            raise ConfigError(f"mark {self.mark} is none of the {read} ids that the decoder reads", "give one of them")
        gives = self.tower.width if isinstance(self.tower, TiledViTConfig) else self.tower.block.width
        reads, made = (D, D) if self.connector is None else (self.connector.reads, self.connector.gives)
        if (gives, made) != (reads, D):
            raise ConfigError(
                f"the tower gives {gives}, the connector makes {made} of {reads}, and the blocks look at {D}",
                "set connector.reads, connector.gives and fusion.context_width so that they follow one another",
            )
        if isinstance(self.connector, FusedConfig):
            raise ConfigError("question-fused queries need the question before the picture", "use another connector")
        if isinstance(self.tower, ViTConfig):
            depth_of(self.layer, self.tower.layers)  # refuses a layer that is not there
        elif self.layer is not None or self.prefix:
            raise ConfigError("layer and prefix choose among the tokens of a ViT", "a tiled tower has `taps`")
        elif self.place:
            raise ConfigError("a tiled tower says itself where its tiles lie", "leave place out")
        if self.policy is not None:
            self._check_policy(self.policy)

    def _check_policy(self, policy: LookingPolicy) -> None:
        usual = self._usual()
        if isinstance(policy, Canvas) != isinstance(usual, Canvas):
            raise ConfigError(
                f"{type(self.tower).__name__} cannot read what the policy {type(policy).__name__} gives",
                "tiled towers read a canvas; others one view of a picture",
            )
        for key in ("tile", "most", "patch") if isinstance(policy, Canvas) else ("size", "patch", "unread"):
            ours, towers = getattr(policy, key), getattr(usual, key)
            if ours != towers:
                raise ConfigError(f"the policy's {key} is {ours}, the tower's {towers}", f"set policy.{key} = {towers}")

    def _usual(self) -> Canvas | Naive:
        tower = self.tower
        if isinstance(tower, TiledViTConfig):
            return Canvas(tile=tower.image, patch=tower.patch, most=tower.tiles)
        return Naive(size=tower.image, patch=tower.patch, unread=tower.image % tower.patch)

    @property
    def fitted(self) -> LookingPolicy:
        """The policy, said or not."""
        return self.policy or self._usual()

    @property
    def cross(self) -> CrossConfig:
        if not isinstance(self.decoder.fusion, CrossConfig):
            raise ConfigError(
                f"a decoder with {type(self.decoder.fusion).__name__} does not look at pictures beside the stream",
                "give it a cross fusion, or use the model `vlm`, whose pictures are tokens",
            )
        return self.decoder.fusion

    @property
    def width(self) -> int:
        """Of what is looked at."""
        return self.cross.context_width or self.decoder.block.width


class Views(NamedTuple):
    """Pictures, in the order of the samples and of their marks."""

    pixels: Tensor  # (P, C, H, W) or, for a tiled tower, (P, T, C, H, W)
    ratios: Sequence[tuple[int, int]] = ()  # rows and columns of tiles that each was cut into, for a tiled tower


class LookingVLM(nn.Module):
    """`model(batch, pictures)` → logits (B, L, V) of a packed stream of words."""

    def __init__(self, config: LookingVLMConfig):
        super().__init__()
        self.config = config
        self.tower = TiledViT(config.tower) if isinstance(config.tower, TiledViTConfig) else ViT(config.tower)
        self.place = None
        if config.place and isinstance(config.tower, ViTConfig):
            side, lead = config.tower.side, config.tower.prefix if config.prefix else 0
            self.place = LearnedPositions((side, side), config.tower.block.width, lead)
            nn.init.zeros_(self.place.table)
        self.connector = None if config.connector is None else make_connector(config.connector)
        self.decoder = Decoder(config.decoder)

    def prepare(self, images: Sequence[Image.Image]) -> Views:
        """Pictures (RGB) as the tower reads them."""
        config, policy, weight = self.config, self.config.fitted, self.decoder.embed.weight
        if not images:
            raise ImageError("no picture", "give at least one, or ask without pictures")
        shown = [
            torch.stack([to_array(view, config.mean, config.std) for view in policy.apply(image)]).to(weight)
            for image in images
        ]  # (1 or its tiles, C, H, W) each
        if not isinstance(config.tower, TiledViTConfig):
            return Views(torch.cat(shown))
        T = config.tower.tiles
        pixels = torch.stack([F.pad(tiles, (0, 0) * 3 + (0, T - len(tiles))) for tiles in shown])  # (P, T, C, H, W)
        return Views(pixels, [policy.cut(image.height, image.width).spans[0].layout for image in images])

    def look(self, pictures: Views) -> list[Tensor]:
        """What there is to see of each picture, (N, D); N differs where pictures have unequal numbers of tiles."""
        if isinstance(self.tower, TiledViT):
            features = self.tower(pictures.pixels, pictures.ratios).flatten(1, 2)  # (P, T·tokens, ·)
            counts = [rows * columns * self.tower.config.tokens for rows, columns in pictures.ratios]
        else:
            if pictures.ratios:
                raise ImageError("ratios of tiles for a tower that reads whole pictures", "leave them out")
            features = self.features(pictures.pixels)  # (P, N, ·)
            counts = [features.shape[1]] * len(features)
        if self.connector is not None:
            features = self.connector(features, counts)
            counts = [self.connector.config.tokens(count) for count in counts]
        return [one[:count] for one, count in zip(features, counts, strict=True)]

    def features(self, pixels: Tensor) -> Tensor:
        """Pictures (P, C, H, W) → what a ViT makes of them, each at its place where these are learned (P, N, ·)"""
        assert isinstance(self.tower, ViT)
        read = self.tower.tokens if self.config.prefix else self.tower
        found = read(pixels, layer=self.config.layer)
        return found if self.place is None else found + self.place(*self.place.grid)

    def hidden(self, batch: Batch, pictures: Views | None = None, *, cache: KVCache | None = None) -> Tensor:
        """What the head reads, (B, L, width). With a cache every row is one sample, from its first token on; the words
        that follow, `model.decoder(ids, cache=cache)`, go on seeing what the last one saw."""
        device = self.decoder.embed.weight.device
        more: dict = {"plan": batch.plan().to(device)}
        if cache is not None:
            more = {"cache": cache, "counts": torch.tensor(batch.alone.lengths)}
        positions = batch.positions[..., 0].to(device)
        looked = self._looked(batch, [] if pictures is None else self.look(pictures))
        return self.decoder.hidden(batch.ids.to(device), positions=positions, pictures=looked, **more)

    def forward(self, batch: Batch, pictures: Views | None = None) -> Tensor:
        return self.decoder.logits(self.hidden(batch, pictures))

    def _looked(self, batch: Batch, seen: Sequence[Tensor]) -> Looked | None:
        """What is seen of the pictures, laid out row by row, and by whom."""
        marks = (batch.ids == self.config.mark) & (batch.segments >= 0)  # (B, L), padding aside
        row, at = marks.nonzero(as_tuple=True)
        if len(row) != len(seen):
            raise StreamError(
                f"{len(seen)} pictures for {len(row)} marks (id {self.config.mark}) in the stream",
                "write one mark for each picture, where it stands",
            )
        weight = self.decoder.embed.weight
        if not seen:
            return self.nothing(*marks.shape)
        # Samples lie in the rows where they fit; their pictures came in the order of the samples.
        order = batch.segments[row, at].argsort(stable=True).argsort()
        laid = [seen[i] for i in order.tolist()]
        rows = [torch.cat([weight.new_zeros(0, self.config.width), *own]) for own in _by_row(laid, marks)]
        sizes = torch.tensor([len(one) for one in laid], device=marks.device)
        plan = picture_plan(marks, sizes, joined=self.config.joined, segments=batch.segments)
        features = pad_sequence(rows, batch_first=True)  # (B, S, D)
        return Looked(features, plan.to(weight.device))

    def nothing(self, rows: int, tokens: int) -> Looked | None:
        """What so many rows of words without a picture are shown."""
        if self.config.cross.blind == "skip":
            return None
        # Words without a picture go through the blocks' MLPs in any company, so they get something not to see.
        weight = self.decoder.embed.weight
        segments = torch.zeros(rows, tokens, dtype=torch.long, device=weight.device)
        none = Plan(segments=segments, key_segments=torch.full_like(segments[:, :1], -1))
        return Looked(weight.new_zeros(rows, 1, self.config.width), none)

    # ---- costs --------------------------------------------------------------------------------------------------

    def work(self, sizes: Sequence[tuple[int, int]], words: int, batch: int = 1) -> seeing.SeeingWork:
        """What `cost` needs to know of a prompt of pictures of these sizes (height, width), a mark each, and so many
        words behind them, `batch` times: all is read, and the logits of the last token are asked for."""
        counts = self._counts(sizes)
        prompt = Work.prefill(words + len(sizes), batch)
        if not counts:
            return seeing.SeeingWork.of(prompt)
        seen = [self._sees(counts[: i + 1]) for i in range(len(counts))]  # by each mark
        pairs = batch * (sum(seen) + words * seen[-1])
        prompt = prompt.with_(context=batch * sum(counts), context_pairs=pairs)
        return seeing.SeeingWork.of(prompt, *self._looks(sizes, batch))

    def step(self, length: int, sizes: Sequence[tuple[int, int]], batch: int = 1) -> Work:
        """The same of one more word, the `length`-th, behind such pictures: their keys and values are kept."""
        return Work.decode(length, batch).across(self._sees(self._counts(sizes)), batch).with_(context=0)

    def _sees(self, counts: Sequence[int]) -> int:
        """How many features a word sees that stands behind pictures of so many."""
        return sum(counts if self.config.joined else counts[-1:])

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """How many features there are to look at, of each picture."""
        counts = [self._tiles(size) * self._features for size in sizes]
        return counts if self.connector is None else [self.connector.config.tokens(count) for count in counts]

    def _looks(self, sizes: Sequence[tuple[int, int]], batch: int) -> tuple[Work, Work | None]:
        """What tower and connector do. Tiles that a picture does not fill are computed too."""
        P, tower = batch * len(sizes), self.config.tower
        looks, tiles = self.tower.work(P), 1
        if isinstance(tower, TiledViTConfig):
            tiles, every = tower.tiles, tower.tiles * tower.filled
            empty = [every - self._tiles(size) * tower.tokens for size in sizes]  # which do not see each other
            looks = looks.with_(pairs=batch * sum(every**2 - mine**2 for mine in empty))
        return looks, None if self.connector is None else self.connector.work(tiles * self._features, P)

    def _tiles(self, size: tuple[int, int]) -> int:
        """Of a picture of this size; a ViT reads it as one."""
        return len(self.config.fitted.cut(*size).views)

    @property
    def _features(self) -> int:
        """That the tower gives of a tile."""
        tower = self.config.tower
        if isinstance(tower, TiledViTConfig):
            return tower.tokens
        return tower.side**2 + (tower.prefix if self.config.prefix else 0)

    def legs(self, work: Work) -> dict[str, seeing.Leg]:
        """The parts, each with its work."""
        connectors = [part for part in (self.connector, self.place) if part is not None]
        return seeing.make_legs(work, self.tower, connectors, self.decoder, layer=self.config.layer)


cost.flops.register(LookingVLM, seeing.flops)
cost.bytes.register(LookingVLM, seeing.bytes)


def _by_row(items: Sequence[Tensor], marks: Tensor) -> list[Sequence[Tensor]]:
    ends = marks.sum(1).cumsum(0).tolist()
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
