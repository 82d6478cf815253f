"""Latent action model: unsupervised discrete actions between video frames (Genie).

The encoder sees frames 1 … t + 1 and outputs one of a few codes; the decoder predicts frame t + 1 from frames 1 … t and
the codes so far. A code of three bits cannot hold an image, so it encodes what the past does not determine: the action.
Only the codes are used later. The decoder predicts the change from each frame to the next.

The quantizer input is the change of the encoder's mean feature between frames, compared by direction, so that features
common to all frames have no influence. A step without change has only the direction of rounding errors: it gets the
first code, and does not update the codebook.

Shapes: B batch, T frames, C channels, H, W pixels, P patch, N patches of a frame, D width, d width of a code.
"""

import math

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers import VQ, QuantizerOutput, VQConfig
from vitrail.codecs.video_codec import patch_grid, patchify_video, uint8_to_pixels, unpatchify_video
from vitrail.config import Config
from vitrail.errors import DataError
from vitrail.nn import FramesWorkload, SpaceTimeConfig, SpaceTimeTransformer, Workload, cost
from vitrail.registry import MODELS

MIN_RELATIVE_CHANGE = 1e-3  # smaller changes, relative to the feature's length, are rounding errors of half precision


class LatentActionConfig(Config):
    """Config of a `LatentActionModel`. `quantizer.codebook_size` is the number of actions."""

    image_size: int | tuple[int, int]
    patch_size: int
    encoder: SpaceTimeConfig
    decoder: SpaceTimeConfig
    quantizer: VQConfig = VQConfig(codebook_size=8, dim=32, metric="cosine", ema_decay=0.95, dead_code_threshold=0.1)
    channels: int = 3

    def __post_init__(self) -> None:
        patch_grid(self.image_size, self.patch_size)


@MODELS.register("latent-actions")
class LatentActionModel(nn.Module):
    """Model that infers discrete latent actions from video."""

    Config = LatentActionConfig

    def __init__(self, config: LatentActionConfig):
        super().__init__()
        self.config = config
        P, C, grid = config.patch_size, config.channels, patch_grid(config.image_size, config.patch_size)
        encoder_width, decoder_width = config.encoder.block.width, config.decoder.block.width
        self.encoder_embed = nn.Linear(C * P * P, encoder_width)
        self.encoder = SpaceTimeTransformer(config.encoder, grid)
        self.pre_quant_proj = nn.Linear(encoder_width, config.quantizer.dim, bias=False)
        self.quantizer = VQ(config.quantizer)
        self.post_quant_proj = nn.Linear(config.quantizer.dim, decoder_width)
        self.decoder_embed = nn.Linear(C * P * P, decoder_width)
        self.decoder, self.last = SpaceTimeTransformer(config.decoder, grid), nn.Linear(decoder_width, C * P * P)

    @property
    def num_actions(self) -> int:
        return self.config.quantizer.codebook_size

    @property
    def device(self) -> torch.device:
        return self.last.weight.device

    def infer_actions(self, video: Tensor) -> QuantizerOutput:
        """Infer codes (B, T − 1, d) and ids (B, T − 1) of the actions between the frames of a video (B, T, C, H, W)."""
        if video.ndim == 5 and video.shape[1] < 2:
            raise DataError(f"the video has {video.shape[1]} frames, so no action", "give at least 2 frames")
        patches, grid = patchify_video(video, self.config.patch_size, self.config.channels)
        view = self.encoder(self.encoder_embed(patches), grid)  # (B, T, N, D)
        # In float32: half precision would lose a small difference of two means.
        change = view.mean(2, dtype=torch.float32).diff(dim=1)  # (B, T − 1, D)
        slight = change.norm(dim=-1) < MIN_RELATIVE_CHANGE * view.float().norm(dim=-1).mean(2)[:, 1:]  # (B, T − 1)
        unmoved = (video[:, 1:] == video[:, :1]).flatten(2).all(2).int().cumprod(1).bool()  # independent of rounding
        return self._quantize_changes(self.pre_quant_proj(change.to(view.dtype)), slight | unmoved)

    def _quantize_changes(self, changes: Tensor, still: Tensor) -> QuantizerOutput:
        """Quantize changes (B, T − 1, d); `still` marks steps without change.

        Still steps are replaced by other steps of the batch before quantization, so that shapes do not change and the
        codebook learns only from changes. If all steps are still, codes of the codebook replace them.
        """
        flat, none = changes.masked_fill(still[..., None], 0).flatten(0, 1), still.flatten()
        steps = torch.arange(len(none), device=none.device)
        others = none.int().argsort(stable=True)[steps % (~none).sum().clamp_min(1)]
        codes = self.quantizer.get_codebook().detach().to(flat.dtype)
        instead = torch.where(none.all(), codes[steps % len(codes)], flat.detach()[others])
        output = self.quantizer(torch.where(none[:, None], instead, flat).view_as(changes))
        assert output.ids is not None
        first = self.quantizer.get_codebook()[0].to(output.codes.dtype)
        return output._replace(
            codes=torch.where(still[..., None], first, output.codes), ids=output.ids.masked_fill(still, 0)
        )

    def predict_next_frames(self, video: Tensor, codes: Tensor) -> Tensor:
        """Predict the next frames of video (B, T, C, H, W) from action codes (B, T, d), not clamped."""
        patches, grid = patchify_video(video, self.config.patch_size, self.config.channels)
        x = self.decoder_embed(patches) + self.post_quant_proj(codes)[:, :, None]
        return video + unpatchify_video(self.last(self.decoder(x, grid)), self.config.patch_size, grid)

    def forward(self, video: Tensor) -> tuple[Tensor, QuantizerOutput]:
        """Return predictions of frames 2 … T of a video (B, T, C, H, W), and the quantized actions."""
        output = self.infer_actions(video)
        return self.predict_next_frames(video[:, :-1], output.codes), output

    def to_pixels(self, frames: Tensor) -> Tensor:
        """Convert uint8 of any shape to pixels in −1 … 1 on the model's device, in its dtype."""
        return uint8_to_pixels(frames, self.last.weight)

    def workload(self, num_frames: int, batch_size: int = 1) -> FramesWorkload:
        """Return the workload of the decoder, which has one frame less than the encoder."""
        return self.decoder.workload(num_frames - 1, batch_size)


@cost.count_flops.register
def _(module: LatentActionModel, work: Workload) -> int:
    """Count `model(video)`, with the workload of `LatentActionModel.workload`."""
    num_frames = work.tokens // (math.prod(module.decoder.positions.grid_size) * work.sequences) + 1
    encoder_work = module.encoder.workload(num_frames, work.sequences)
    steps = Workload(tokens=work.sequences * (num_frames - 1), attention_pairs=0, sequences=work.sequences)
    code_flops = sum(
        cost.count_flops(part, steps) for part in (module.pre_quant_proj, module.quantizer, module.post_quant_proj)
    )
    patches = work.replace(tokens=work.tokens // (num_frames - 1) * num_frames)
    decoder_flops = sum(cost.count_flops(part, work) for part in (module.decoder_embed, module.decoder, module.last))
    return (
        cost.count_flops(module.encoder_embed, patches)
        + cost.count_flops(module.encoder, encoder_work)
        + code_flops
        + decoder_flops
    )


cost.count_bytes.register(LatentActionModel, cost.sum_child_bytes)
