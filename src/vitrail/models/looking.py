"""A vision-language model whose pictures are no tokens: gated blocks between the layers of its decoder look at them
(Flamingo, Idefics, Llama-3.2-Vision). In the stream a word marks where each picture stands, and nothing more.

P pictures, T tiles, C channels, H, W pixels, N features of a picture, D width of what is looked at, B rows, L tokens of
a row, S features of a row, V vocabulary
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
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
from vitrail.nn import KVCache, Plan
from vitrail.stream import Batch

TowerConfig: TypeAlias = TiledViTConfig | ViTConfig


class LookingVLMConfig(Config):
    """
    connector  what makes of the tower's features those that are looked at; without one they are looked at as they are
    mark       the id of the word that stands for a picture: <|image|> of Llama-3.2-V, <image> of Idefics
    joined     words after pictures that stand side by side see all of them (Llama-3.2-V), or the last one alone
    layer      of a ViT whose features are read; the last, with its norm, unless given
    prefix     whether a ViT's CLS and registers are read along with the patches (Idefics); a tiled tower's CLS is
    """

    tower: TowerConfig
    decoder: DecoderConfig
    mark: int
    connector: AnyConnectorConfig | None = None
    joined: bool = False
    layer: int | None = None
    prefix: bool = False

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
        self.connector = None if config.connector is None else make_connector(config.connector)
        self.decoder = Decoder(config.decoder)

    def look(self, pictures: Views) -> list[Tensor]:
        """What there is to see of each picture, (N, D); N differs where pictures have unequal numbers of tiles."""
        if isinstance(self.tower, TiledViT):
            features = self.tower(pictures.pixels, pictures.ratios).flatten(1, 2)  # (P, T·tokens, ·)
            counts = [rows * columns * self.tower.config.tokens for rows, columns in pictures.ratios]
        else:
            if pictures.ratios:
                raise ImageError("ratios of tiles for a tower that reads whole pictures", "leave them out")
            read = self.tower.tokens if self.config.prefix else self.tower
            features = read(pictures.pixels, layer=self.config.layer)  # (P, N, ·)
            counts = [features.shape[1]] * len(features)
        if self.connector is not None:
            features = self.connector(features, counts)
            counts = [self.connector.config.tokens(count) for count in counts]
        return [one[:count] for one, count in zip(features, counts, strict=True)]

    def hidden(self, batch: Batch, pictures: Views | None = None, *, cache: KVCache | None = None) -> Tensor:
        """What the head reads, (B, L, width). With a cache every row is one sample, from its first token on; the words
        that follow, `model.decoder(ids, cache=cache)`, go on seeing what the last one saw."""
        device = self.decoder.embed.weight.device
        more: dict = {"plan": batch.plan().to(device)}
        if cache is not None:
            if len(batch.lengths) != len(batch.ids):
                raise StreamError(
                    f"{len(batch.lengths)} samples in {len(batch.ids)} rows of a cache, which holds one a row",
                    "pack them with a budget that two do not share, such as the length of the longest",
                )
            more = {"cache": cache, "counts": torch.tensor(batch.lengths, device=device)}
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
            if self.config.cross.blind == "skip":
                return None
            # Words without a picture go through the blocks' MLPs in any company, so they get something not to see.
            none = Plan(segments=torch.zeros_like(batch.ids), key_segments=torch.full((len(marks), 1), -1))
            return Looked(weight.new_zeros(len(marks), 1, self.config.width), none.to(weight.device))
        # Samples lie in the rows where they fit; their pictures came in the order of the samples.
        order = batch.segments[row, at].argsort(stable=True).argsort()
        laid = [seen[i] for i in order.tolist()]
        rows = [torch.cat([weight.new_zeros(0, self.config.width), *own]) for own in _by_row(laid, marks)]
        sizes = torch.tensor([len(one) for one in laid], device=marks.device)
        plan = picture_plan(marks, sizes, joined=self.config.joined, segments=batch.segments)
        features = pad_sequence(rows, batch_first=True)  # (B, S, D)
        return Looked(features, plan.to(weight.device))


def _by_row(items: Sequence[Tensor], marks: Tensor) -> list[Sequence[Tensor]]:
    ends = marks.sum(1).cumsum(0).tolist()
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
