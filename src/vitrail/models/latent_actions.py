"""Actions that nobody labelled: what must be told of a frame to one who knows the frames before (Genie).

An encoder sees frames 1 … t + 1 and says one of a few codes; a decoder makes frame t + 1 of frames 1 … t and of what
was said up to there. Three bits hold no picture, so that they come to hold what the past does not tell: what was done.
Only the codes are used; the decoder is there to learn by. It draws what changes from each frame to the next: most of
a frame does not, and need not be learned.

What is said is how the encoder's view changes from one frame to the next, and its direction alone chooses the code:
what the frames have in common, which is most of a view at first, then has no say. Where nothing changes there is no
direction but that of rounding: such a step has the first code, and codes do not learn from it.

B batch, T frames, C channels, H, W pixels, P patch, N patches of a frame, D width, d width of a code
"""

import math

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers import VQ, Quantized, VQConfig
from vitrail.codecs.video import cut, grid_of, mend, to_pixels
from vitrail.config import Config
from vitrail.errors import DataError
from vitrail.nn import FramesWork, SpaceTime, SpaceTimeConfig, Work, cost

STILL = 1e-3  # of a view's length: a smaller change is rounding, half precision's included


class LatentActionsConfig(Config):
    """`quantizer.codes` are the actions: eight, not eight bits."""

    image: int | tuple[int, int]
    patch: int
    encoder: SpaceTimeConfig
    decoder: SpaceTimeConfig
    quantizer: VQConfig = VQConfig(codes=8, dim=32, metric="cosine", decay=0.95, revive=0.1)
    channels: int = 3

    def __post_init__(self) -> None:
        grid_of(self.image, self.patch)


class LatentActions(nn.Module):
    def __init__(self, config: LatentActionsConfig):
        super().__init__()
        self.config = config
        P, C, grid = config.patch, config.channels, grid_of(config.image, config.patch)
        wide, tall = config.encoder.block.width, config.decoder.block.width
        self.seen, self.encoder = nn.Linear(C * P * P, wide), SpaceTime(config.encoder, grid)
        self.into, self.quantizer, self.out_of = (
            nn.Linear(wide, config.quantizer.dim, bias=False),
            VQ(config.quantizer),
            nn.Linear(config.quantizer.dim, tall),
        )
        self.known = nn.Linear(C * P * P, tall)
        self.decoder, self.last = SpaceTime(config.decoder, grid), nn.Linear(tall, C * P * P)

    @property
    def actions(self) -> int:
        return self.config.quantizer.codes

    @property
    def device(self) -> torch.device:
        return self.last.weight.device

    def infer(self, video: Tensor) -> Quantized:
        """video (B, T, C, H, W) → a code (B, T − 1, d) and its id (B, T − 1) for every step from a frame to the next"""
        if video.ndim == 5 and video.shape[1] < 2:
            raise DataError(f"{video.shape[1]} frames have no action between them", "give two or more")
        patches, grid = cut(video, self.config.patch, self.config.channels)
        view = self.encoder(self.seen(patches), grid)  # (B, T, N, D)
        # In float32: half precision would leave little of a small difference of two means.
        change = view.mean(2, dtype=torch.float32).diff(dim=1)  # (B, T − 1, D)
        slight = change.norm(dim=-1) < STILL * view.float().norm(dim=-1).mean(2)[:, 1:]  # (B, T − 1)
        unmoved = (video[:, 1:] == video[:, :1]).flatten(2).all(2).int().cumprod(1).bool()  # whatever rounding makes
        return self._quantize(self.into(change.to(view.dtype)), slight | unmoved)

    def _quantize(self, said: Tensor, still: Tensor) -> Quantized:
        """(B, T − 1, d) and where nothing changed. There steps that have a change stand in, one after another, so that
        the quantizer learns of no others: to leave some out would give every batch another shape. Where none has, its
        own codes do, of which it learns what it knows."""
        flat, none = said.masked_fill(still[..., None], 0).flatten(0, 1), still.flatten()
        steps = torch.arange(len(none), device=none.device)
        others = none.int().argsort(stable=True)[steps % (~none).sum().clamp_min(1)]
        codes = self.quantizer.table().detach().to(flat.dtype)
        instead = torch.where(none.all(), codes[steps % len(codes)], flat.detach()[others])
        found = self.quantizer(torch.where(none[:, None], instead, flat).view_as(said))
        assert found.ids is not None
        first = self.quantizer.table()[0].to(found.codes.dtype)
        return found._replace(
            codes=torch.where(still[..., None], first, found.codes), ids=found.ids.masked_fill(still, 0)
        )

    def predict(self, video: Tensor, codes: Tensor) -> Tensor:
        """Frames (B, T, C, H, W) and what was done at each (B, T, d) → the frames after them, not clamped"""
        patches, grid = cut(video, self.config.patch, self.config.channels)
        x = self.known(patches) + self.out_of(codes)[:, :, None]
        return video + mend(self.last(self.decoder(x, grid)), self.config.patch, grid)

    def forward(self, video: Tensor) -> tuple[Tensor, Quantized]:
        """(B, T, C, H, W) → frames 2 … T as they are predicted, and the actions between"""
        found = self.infer(video)
        return self.predict(video[:, :-1], found.codes), found

    def pixels(self, bytes: Tensor) -> Tensor:
        """uint8 of any shape → −1 … 1 where the model lies, in its type"""
        return to_pixels(bytes, self.last.weight)

    def work(self, frames: int, batch: int = 1) -> FramesWork:
        """Of the decoder, whose frames are one fewer than those of the encoder."""
        return self.decoder.work(frames - 1, batch)


@cost.flops.register
def _(module: LatentActions, work: Work) -> int:
    """Of `model(video)`; `work` as `LatentActions.work` gives it."""
    shown = work.tokens // (math.prod(module.decoder.positions.grid) * work.rows) + 1
    seen = module.encoder.work(shown, work.rows)
    steps = Work(tokens=work.rows * (shown - 1), pairs=0, rows=work.rows)
    told = sum(cost.flops(part, steps) for part in (module.into, module.quantizer, module.out_of))
    patches = work.with_(tokens=work.tokens // (shown - 1) * shown)
    made = sum(cost.flops(part, work) for part in (module.known, module.decoder, module.last))
    return cost.flops(module.seen, patches) + cost.flops(module.encoder, seen) + told + made


cost.bytes.register(LatentActions, cost.sum_bytes)
