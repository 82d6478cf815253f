"""Training tasks of the three parts of Genie: video codec, latent action model and dynamics model.

A batch holds windows of episodes: frames, and actions if they are known.

B windows, T frames, H, W pixels
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.quantizer import compute_entropy
from vitrail.codecs.video_codec import VideoCodec
from vitrail.config import Config, FractionBelowOne
from vitrail.errors import ConfigError, DataError
from vitrail.models.genie_model import Genie
from vitrail.models.latent_action_model import LatentActionModel
from vitrail.nn import cost
from vitrail.objectives.masking import sample_code_mask
from vitrail.objectives.reconstruction_loss import ReconstructionWeights, l1_loss, l2_loss
from vitrail.registry import TASKS
from vitrail.tasks.codec_task import QuantizerWeights, quantizer_loss_names
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch


class VideoReconstructionSettings(Config):
    """Settings of the tasks "video-codec" and "latent-actions".

    weights    weights of the losses: l1, l2 and quantizer
    quantizer  weights of the quantizer losses, all multiplied by `weights.quantizer`. Defaults are those of image
               codecs, but `commit` is 0.01 for latent actions: a strong commitment keeps actions at their random
               initialization, while a weak one leaves codes of a codec unused
    """

    weights: ReconstructionWeights = ReconstructionWeights(l2=1.0, quantizer=1.0)
    quantizer: QuantizerWeights | None = None

    def __post_init__(self) -> None:
        unsupported = [name for name in ("perceptual", "gram", "gan", "distillation") if getattr(self.weights, name)]
        if unsupported or not (self.weights.l1 or self.weights.l2):
            raise ConfigError(
                f"weights = {self.weights.to_dict()}", "set l1 or l2, and only the weights l1, l2 and quantizer"
            )


class VideoReconstructionTask:
    """Trains a video codec to reconstruct all frames, or a latent action model to predict all frames after the first.

    `psnr` and `used` are metrics with weight 0. `used` is the perplexity of the codes of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        video_model: VideoCodec | LatentActionModel,
        settings: VideoReconstructionSettings | None = None,
    ):
        self.model, self.video_model, self.settings = model, video_model, settings or VideoReconstructionSettings()
        default = QuantizerWeights(commit=0.01) if isinstance(video_model, LatentActionModel) else QuantizerWeights()
        loss_weights, quantizer_weights = self.settings.weights, (self.settings.quantizer or default).to_dict()
        names = quantizer_loss_names(video_model) if loss_weights.quantizer else []
        self.quantizer_losses = [name for name in names if quantizer_weights[name]]
        self.loss_weights = {name: weight for name in ("l1", "l2") if (weight := getattr(loss_weights, name))}
        self.loss_weights |= {
            name: loss_weights.quantizer * quantizer_weights[name] for name in self.quantizer_losses
        } | {
            "psnr": 0.0,
            "used": 0.0,
        }

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
        return {"frames": stack_frames(samples)}

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count windows."""
        return dict.fromkeys(self.loss_weights, len(batch["frames"]))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        video = self.video_model.to_pixels(batch["frames"])
        predicted, quantized = self.video_model(video)
        predicted, targets = predicted.float(), video[:, -predicted.shape[1] :].float()
        losses = {
            name: {"l1": l1_loss, "l2": l2_loss}[name](predicted, targets)
            for name in ("l1", "l2")
            if name in self.loss_weights
        }
        losses |= {name: quantized.losses[name] for name in self.quantizer_losses}
        with torch.no_grad():
            error = ((predicted.clamp(-1, 1) - targets) / 2).square().mean((2, 3, 4))
            losses["psnr"] = -10 * error.clamp_min(1e-10).log10().mean()
            losses["used"] = _effective_codes(quantized.ids, self.video_model.quantizer.vocab_sizes[0])
        return {name: losses[name] * len(video) for name in self.loss_weights}

    def count_flops(self, batch: Batch) -> int:
        B, T = batch["frames"].shape[:2]
        return cost.count_flops(self.video_model, self.video_model.workload(T, B))


class DynamicsSettings(Config):
    """Settings of the dynamics task.

    mask_ratio_range        range of the fraction of a window's codes that is masked, drawn per window
    visible_frame_fraction  mean fraction of frames without masked codes: in a rollout, past frames are fully visible
    max_noise_fraction      largest fraction of visible codes that is replaced by codes of another window, drawn per
                            window. It makes the model robust to errors in its own past frames
    """

    mask_ratio_range: tuple[float, float] = (0.5, 1.0)
    visible_frame_fraction: float = 0.0
    max_noise_fraction: FractionBelowOne = 0.0


class DynamicsTask:
    """Trains the dynamics model to predict masked codes from visible codes and actions.

    Actions come from the batch, or from the latent action model if there is one. `changed` is the loss of codes that
    differ from the previous frame, a metric with weight 0. A model that only copies frames has a high `changed` loss.
    """

    def __init__(self, model: Genie, settings: DynamicsSettings | None = None):
        self.model, self.settings = model, settings or DynamicsSettings()
        self.loss_weights = {"dynamics": 1.0, "changed": 0.0}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
        batch = {"frames": stack_frames(samples)}
        if self.model.latent is None:
            batch["actions"] = torch.from_numpy(np.stack([sample["actions"] for sample in samples]))
            if batch["actions"].is_floating_point():
                raise DataError(
                    "the episodes have continuous actions", "use episodes with discrete actions: int64 (T − 1,)"
                )
            self.model.check_actions(batch["actions"])
        return batch

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count windows."""
        return dict.fromkeys(self.loss_weights, len(batch["frames"]))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        model = self.model
        video = model.codec.to_pixels(batch["frames"])
        ids = model.encode_frames(video)
        actions = batch["actions"] if model.latent is None else model.infer_actions(video)
        masked = sample_code_mask(
            tuple(ids.shape),
            self.settings.mask_ratio_range,
            ids.device,
            unmasked_frame_rate=self.settings.visible_frame_fraction,
        )
        inputs = (
            ids
            if not self.settings.max_noise_fraction
            else torch.where(masked, ids, mix_codes(ids, self.settings.max_noise_fraction))
        )
        code_losses = model.dynamics.compute_code_losses(inputs, model.dynamics.shift_actions(actions), masked)
        window_losses = (code_losses * masked).flatten(1).sum(1) / masked.flatten(1).sum(1).clamp_min(1)  # (B,)
        changed = masked & (ids != ids.roll(1, 1))  # the first frame has no masked codes
        changed_loss = (code_losses.detach() * changed).sum() / changed.sum().clamp_min(1)
        return {"dynamics": window_losses.sum(), "changed": changed_loss * len(video)}

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass. Frozen encoders count a third: they have no backward pass."""
        model, (B, T) = self.model, batch["frames"].shape[:2]
        encoder_flops = cost.count_flops(model.codec.encoder, model.codec.workload(T, B))
        if model.latent is not None:
            encoder_flops += cost.count_flops(model.latent.encoder, model.latent.encoder.workload(T, B))
        return cost.count_flops(model, model.workload(T, B)) + encoder_flops // 3


def stack_frames(samples: Sequence[Mapping[str, np.ndarray]]) -> Tensor:
    """Stack the frames of samples: uint8 (T, H, W, 3) each → (B, T, 3, H, W)."""
    return torch.from_numpy(np.stack([sample["frames"] for sample in samples])).movedim(-1, 2)


def mix_codes(ids: Tensor, max_fraction: float) -> Tensor:
    """Replace a random fraction of each window's codes (B, T, h, w), up to `max_fraction`, by those of the next window.

    Codes keep their position, so the replaced codes are plausible.
    """
    fraction = max_fraction * torch.rand(len(ids), 1, 1, 1, device=ids.device)
    return torch.where(torch.rand(ids.shape, device=ids.device) < fraction, ids.roll(1, 0), ids)


def make_reconstruction_task(
    model: Any, part_name: str, settings: VideoReconstructionSettings
) -> VideoReconstructionTask:
    """Build the task of a Genie's codec or latent action model, or of such a model alone."""
    video_model = getattr(model, part_name) if isinstance(model, Genie) else model
    if video_model is None:
        raise ConfigError(f"the model has no {part_name} part: its actions are known", "remove the stage")
    return VideoReconstructionTask(model, video_model, settings)


def _effective_codes(ids: Tensor | None, codes: int) -> Tensor:
    """Perplexity of the ids of a batch."""
    assert ids is not None
    flat = ids.flatten()
    counts = torch.zeros(codes, device=flat.device).scatter_add(0, flat, torch.ones_like(flat, dtype=torch.float32))
    return compute_entropy(counts / flat.numel()).exp()


TASKS.register(
    "video-codec",
    TaskSpec(
        lambda model, _sources, _tokenizer, settings: make_reconstruction_task(model, "codec", settings),
        (Genie, VideoCodec),
        ("episodes",),
        VideoReconstructionSettings,
    ),
)
TASKS.register(
    "latent-actions",
    TaskSpec(
        lambda model, _sources, _tokenizer, settings: make_reconstruction_task(model, "latent", settings),
        (Genie, LatentActionModel),
        ("episodes",),
        VideoReconstructionSettings,
    ),
)
TASKS.register(
    "dynamics",
    TaskSpec(
        lambda model, _sources, _tokenizer, settings: DynamicsTask(model, settings),
        Genie,
        ("episodes",),
        DynamicsSettings,
    ),
)
