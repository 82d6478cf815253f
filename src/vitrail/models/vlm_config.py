"""What a vision-language model is made of, and how many tokens a picture is to it: checked before anything is built.

D width of the tower, W width of the decoder
"""

from typing import Any, Self, TypeAlias

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossConfig, DeepStackConfig
from vitrail.codecs.tower import CodesTowerConfig
from vitrail.config import Config
from vitrail.connectors import AnyConnectorConfig, FusedConfig, MergerConfig
from vitrail.connectors.grids import count
from vitrail.connectors.reduce import AnyReduction, CellsConfig, readable
from vitrail.encoders.depth import depth_of
from vitrail.encoders.hybrid import HybridConfig
from vitrail.encoders.packed import PackedViTConfig
from vitrail.encoders.towers import TowersConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.processing.cut import Cut
from vitrail.processing.footage import Footage
from vitrail.processing.grid import Grid
from vitrail.processing.images import NORMS
from vitrail.processing.resolution import AnyPolicy, AnyRes, NaFlex, Naive, Native, Tiles
from vitrail.stream import POSITIONS, Part, Rules, picture, video
from vitrail.stream import queries as slots

TowerConfig: TypeAlias = ViTConfig | PackedViTConfig | TowersConfig | HybridConfig | CodesTowerConfig
Shape: TypeAlias = Cut | Grid

STRIPS = ((1, 1), (1, 4), (4, 1), (1, 100), (100, 1))
"""Height and width of the pictures among which the one of fewest tokens is looked for: policies of tiles give thin ones
fewer, those of one size give all the same."""


class VLMConfig(Config):
    """
    policy     how a picture of any size is fitted to the tower; patches are cut by the tower's side
    mean, std  of the pixels, channel by channel
    layer      of the tower whose features are read (LLaVA: −2); the last, with its norm, unless given
    prefix     whether CLS and registers are read along with the patches
    place      whether a learned row for each place of a view, zero at first, is added to the tower's features: else
               only what the tower kept of it says in which column a token stands
    reduce     what leaves fewer of a view's features, without training, before the connector reads them
    voco       learned tokens behind each picture that text sees instead of it (VoCo-LLaMA); 0 for none
    stack      what makes soft tokens of the tower's taps, one connector each (DeepStack)
    queries    what condenses the connector's tokens, together with the questions asked about them (token scaling)
    newline    whether a learned vector stands where a row of tiles ends (LLaVA-NeXT)
    rules      how words and pictures become a stream
    marks      ids of the words that stand for or around pictures, by name: what a caller writes, and files keep
    footage    which frames of a video are read, and how large; as Qwen's, InternVL's, LLaVA-OneVision's and
               LLaVA-NeXT-Video's are, unless given
    """

    tower: TowerConfig
    connector: AnyConnectorConfig
    decoder: DecoderConfig
    policy: AnyPolicy = Naive()
    mean: tuple[float, ...] = NORMS["clip"].mean
    std: tuple[float, ...] = NORMS["clip"].std
    layer: int | None = None
    prefix: bool = False
    place: bool = False
    reduce: AnyReduction | None = None
    voco: int = 0
    stack: AnyConnectorConfig | None = None
    queries: FusedConfig | None = None
    newline: bool = False
    rules: Rules = Rules()
    marks: dict[str, int] = {}
    footage: Footage | None = None

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Plain data, in which systems and parts may be given by the names of presets: see `vitrail.models.named`."""
        from vitrail.models.named import fill  # which knows the systems, and they are made of this

        return super().read(fill(data))

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
            raise ConfigError(
                "cross-attention looks at pictures that are no tokens of the stream",
                'use the model that looks: kind = "looking-vlm"',
            )
        self._check_footage()
        self._check_tower()
        self._check_stack()
        self._check_reduce()
        self._check_voco()
        if not isinstance(self.policy, Native) and self.queries is None:
            self._check_rows(self.policy.cut(1, 1))  # what a cut is made of does not hang on the picture
        rows = self.decoder.vocab + self.decoder.extra
        if self.rules.fill >= rows:
            raise ConfigError(f"rules.fill is {self.rules.fill}, and the decoder embeds {rows} ids", "give one of them")
        if self.decoder.rotary.layout == "1d" and not POSITIONS[self.rules.positions].flat:
            raise ConfigError(
                f"rules.positions {self.rules.positions!r} counts rows and columns, and the decoder turns by one index",
                'set rules.positions = "1d", or give the decoder a rotary layout of three axes (mrope)',
            )
        if self.rules.vocab is not None and self.rules.vocab != self.decoder.vocab:
            raise ConfigError(f"rules for {self.rules.vocab} ids and a decoder of {self.decoder.vocab}")
        self._check_context()

    def _check_footage(self) -> None:
        if self.footage is None:
            return
        usual = self._usual_footage
        if usual is None:
            raise ConfigError(f"{type(self.tower).__name__} reads no videos", "leave footage out")
        if self.footage.rule != usual.rule and (self.footage.squares or usual.squares):
            raise ConfigError(f"footage by {self.footage.rule!r} for a tower that reads {usual.rule!r}", "leave it out")
        if usual.squares and self.footage.side != usual.side:
            raise ConfigError(
                f"frames of {self.footage.side} pixels, and tiles of {usual.side}", "do they belong together?"
            )

    def _check_tower(self) -> None:
        if isinstance(self.tower, ViTConfig):
            depth_of(self.layer, self.tower.layers)  # refuses a layer that is not there
        elif self.layer is not None or self.prefix:
            raise ConfigError(
                f"layer and prefix choose among the tokens of one ViT, not of {type(self.tower).__name__}",
                "give towers their own layers"
                if isinstance(self.tower, TowersConfig | HybridConfig)
                else "leave them out",
            )
        if isinstance(self.tower, TowersConfig | HybridConfig) and (any(self.mean) or set(self.std) != {1.0}):
            raise ConfigError(
                f"pixels less {self.mean} by {self.std}, and towers that do the same by themselves",
                "set mean = [0, 0, 0] and std = [1, 1, 1]",
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
        if isinstance(self.tower, HybridConfig):
            view, image, side = self.policy.cut(1, 1).views[0], self.tower.image, self.tower.side
            if view.canvas != (image, image) or (view.grid.h, view.grid.w) != (side, side):
                low = self.tower.low.vit.image
                raise ConfigError(
                    f"the tower reads pictures of {image} pixels and gives {side} × {side} features; the policy makes "
                    f"views of {view.canvas} with {view.grid.h} × {view.grid.w}",
                    f'use policy = {{ policy = "framed", size = {low}, patch = {self.tower.patch}, fine = {image} }}',
                )
        if isinstance(self.tower, PackedViTConfig):
            if self.place:
                raise ConfigError("a packed tower reads pictures of any grid, and places are of one", "leave place out")
            for name, connector in (("connector", self.connector), ("stack", self.stack)):
                if connector is not None and not _reads_blocks(connector, self.tower.merge):
                    raise ConfigError(
                        f"the {name} does not read the {self.tower.merge}² features that a packed tower puts together",
                        f'use a merger with order = "blocks" and merge = {self.tower.merge}',
                    )

    def _check_stack(self) -> None:
        taps = len(self.tower.taps) if isinstance(self.tower, PackedViTConfig) else 0
        wanted = len(self.decoder.fusion.at) if isinstance(self.decoder.fusion, DeepStackConfig) else 0
        if taps and self.queries is not None:
            raise ConfigError("queries condense the tokens that DeepStack would add to", "use one of the two")
        if not (taps == wanted and (self.stack is not None) == bool(taps)):
            raise ConfigError(
                f"{taps} taps of the tower, {'a' if self.stack else 'no'} stack connector, and {wanted} layers of the "
                "decoder to add them at",
                "DeepStack needs all three, and as many taps as layers",
            )

    def _check_reduce(self) -> None:
        if self.reduce is None:
            return
        if isinstance(self.tower, PackedViTConfig):
            raise ConfigError(
                f"a packed tower puts {self.tower.merge}² features together, at places of a grid, and of a grid none "
                "can be left out",
                "leave reduce out, or lower the policy's max_pixels",
            )
        left = self.reduction
        if left is None:
            return
        laid = self.laid(self.grid)  # refuses cells that the grid has not
        try:
            self.connector.tokens(laid)
        except ConfigError:
            raise ConfigError(
                f"{type(self.connector).__name__} puts neighbours together, and of those some are left out",
                'use a projector, a Q-Former or a resampler, or reduce by kind = "pool" to a grid that divides',
            ) from None
        if not left.looking:
            return
        if not isinstance(self.tower, ViTConfig) or self.tower.rotary is not None:
            raise ConfigError(
                f"features are left out by what one ViT without rotary positions looks at, and the tower is "
                f"{type(self.tower).__name__}{' with them' if isinstance(self.tower, ViTConfig) else ''}",
                'reduce by kind = "pool", or use a CLIP, SigLIP or DINOv2 tower',
            )
        if not depth_of(self.layer, self.tower.layers):
            raise ConfigError("nothing looks at anything before a tower's first block", "read a later layer")
        readable(self.tower.block)

    def _check_voco(self) -> None:
        if self.voco < 0:
            raise ConfigError(f"{self.voco} tokens that stand for a picture", "give 0 for none, or more")
        if not self.voco:
            return
        if self.queries is not None or isinstance(self.tower, PackedViTConfig) or "image" in self.rules.both:
            raise ConfigError(
                "voco tokens stand behind pictures of views, which are read causally: not with queries, with a packed "
                'tower, or with rules.both = ["image"]',
                "leave voco out, or the other",
            )

    def _check_rows(self, cut: Cut) -> None:
        if self.reduction is None and not self.stitches(cut) and any(span.newline != "none" for span in cut.spans):
            raise ConfigError(
                f"{type(self.connector).__name__} keeps no rows that newlines could end", "use a projector, or naive"
            )

    def _check_context(self) -> None:
        least, context = self.least, self.decoder.context
        if least < context:
            return
        if self.queries is not None:
            what, fewer = f"the first question about a picture has {least} queries", "queries.first"
        else:
            what, fewer = (
                f"a picture is {least} tokens or more",
                "the policy's size, or use a connector that gives fewer",
            )
        raise ConfigError(
            f"{what}, which leaves no room for a word in the decoder's context of {context}",
            f"set decoder.context to more than {least}, or lower {fewer}",
        )

    def _policy(self, key: str) -> int:
        return getattr(self.policy, key, 1)

    def _tower(self, key: str) -> int:
        tower = self.tower.towers[0].vit if isinstance(self.tower, TowersConfig) else self.tower
        return getattr(tower, key, 1)

    @property
    def width(self) -> int:
        """Of the features that the tower gives."""
        tower = self.tower
        return tower.block.width if isinstance(tower, ViTConfig | PackedViTConfig) else tower.width

    @property
    def films(self) -> Footage | None:
        """The footage, said or not; None where the tower reads no videos."""
        return self._usual_footage if self.footage is None else self.footage

    @property
    def _usual_footage(self) -> Footage | None:
        if isinstance(self.tower, PackedViTConfig):
            rule = "qwen3-vl" if self.rules.positions == "qwen3-vl" else "qwen2-vl"
            return Footage.usual(rule, self.tower.patch * self.tower.merge)
        if self.queries is not None or self.voco:  # which stand for pictures
            return None
        if isinstance(self.policy, Tiles):
            return Footage.usual("internvl", self.policy.tile)
        if isinstance(self.policy, AnyRes) and self.policy.pool is not None:
            return Footage.usual("llava-next-video", self.policy.tile)
        if isinstance(self.policy, AnyRes) and self.policy.max_tiles and self.newline:  # LLaVA-NeXT reads none
            return Footage.usual("llava-onevision", self.policy.tile)
        return None

    def tokens(self, shape: Shape, questions: int = 1) -> int:
        """Soft tokens of a picture or a video, newlines and voco included, that the decoder reads: all that so many
        questions need together. Nothing needs to be built for this."""
        given = self.given(shape)
        return given + self.voco if self.queries is None else self.queries.tokens(given, questions)

    @property
    def least(self) -> int:
        """Soft tokens that a picture takes at least."""
        if self.queries is not None:
            return self.queries.first
        return min(self.tokens(self.policy.cut(*shape)) for shape in STRIPS)

    def given(self, shape: Shape) -> int:
        """Soft tokens that the connector gives, newlines included."""
        if isinstance(shape, Grid):
            return shape.tokens
        if self.stitches(shape):
            return shape.tokens
        return sum(self.connector.tokens(self.laid(view.grid)) for view in shape.views)

    def stitches(self, cut: Cut) -> bool:
        """Whether the lattice is kept, so that views can lie side by side and rows can end. Of reduced views it is not:
        their tokens follow one another, without newlines and with what padding is among them, as released."""
        return self.reduction is None and all(
            self.connector.tokens(self.laid(view.grid)) == view.grid.tokens for view in cut.views
        )

    def laid(self, grid: Grid) -> Grid | int:
        """How the features of a view lie that the connector reads: in a grid, or in none, where a prefix stands before
        them or some were left out."""
        reduction = self.left(grid)
        left = grid if reduction is None else reduction.laid(grid)
        return self.lead + count(left) if self.lead else left

    @property
    def grid(self) -> Grid:
        """That of every view; pictures of a packed tower have one each."""
        return self.policy.cut(1, 1).views[0].grid

    @property
    def reduction(self) -> AnyReduction | None:
        """What leaves features out; nothing does where there are no more than are kept."""
        return None if self.reduce is None or self.reduce.keep >= self.grid.patches else self.reduce

    def left(self, grid: Grid) -> AnyReduction | None:
        """What leaves fewer of the features of a view of this grid: the reduction, or else the means of blocks that are
        read of a video's frame."""
        if self.reduction is None and isinstance(self.policy, AnyRes) and grid.merge > 1:
            return CellsConfig(keep=grid.tokens)
        return self.reduction

    @property
    def lead(self) -> int:
        """Tokens of the tower that are read before a view's patches."""
        return self.tower.prefix if self.prefix and isinstance(self.tower, ViTConfig) else 0

    def clip(self, shape: Shape, **more: Any) -> Part:
        """The place of a video in a stream: a grid of its temporal patches, or of as many frames as it has views; a
        cut where newlines stand in it."""
        if isinstance(shape, Grid):
            return video(shape, **more)
        if isinstance(self.policy, AnyRes) and self.stitches(shape):
            return video(shape, **more)
        frames = len(shape.views)
        each = shape.views[0].grid if self.stitches(shape) else Grid(h=1, w=self.given(shape) // frames)
        return video(each.with_(t=frames), **more)

    def part(self, shape: Shape, **more: Any) -> Part:
        """The place of a picture, or of a video (a grid of several frames), in a stream."""
        if self.queries is not None:
            raise ConfigError("queries stand before each question about a picture", "use parts(shape, questions)")
        if self.voco:
            raise ConfigError("tokens that stand for a picture come behind it", "use parts(shape)")
        return self._picture(shape, **more)

    def _picture(self, shape: Shape, **more: Any) -> Part:
        if isinstance(shape, Grid):
            return video(shape, **more) if shape.t > 1 else picture(shape, **more)
        self._check_rows(shape)
        return picture(shape if self.stitches(shape) else self.given(shape), **more)

    def parts(self, shape: Shape, questions: int = 1, **more: Any) -> list[Part]:
        """What stands before each of so many questions about one picture: the picture, with what stands for it, and
        then nothing, or the queries that were fused with that question, all from one block of features."""
        if self.queries is None:
            return [self._picture(shape, **more), *([slots(self.voco)] if self.voco else [])]
        counts = self.queries.groups(questions)
        more = {"source": object(), **more}
        return [picture(n, first=sum(counts[:k]), **more) for k, n in enumerate(counts)]


def _reads_blocks(connector: AnyConnectorConfig, merge: int) -> bool:
    """Whether pictures packed in one line stay apart in it."""
    return isinstance(connector, MergerConfig) and (connector.order, connector.merge) == ("blocks", merge)
