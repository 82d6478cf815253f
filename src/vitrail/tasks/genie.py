"""The three stages of a Genie: frames through their codes, frames through the actions between, and what follows.

A batch is windows of episodes: frames and, where the controls are known, what was done.

B windows, T frames, H, W pixels
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers.base import entropy_of
from vitrail.codecs.video import VideoCodec
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError
from vitrail.models.genie import Genie
from vitrail.models.latent_actions import LatentActions
from vitrail.nn import cost
from vitrail.objectives.masked import hide_codes
from vitrail.objectives.reconstruction import Weights, l1, l2
from vitrail.tasks.codec import QuantizerWeights, loss_names
from vitrail.train.task import Batch


class FramesSettings(Config):
    """
    weights    what each loss counts, of which frames have l1, l2 and the quantizer's
    quantizer  what each of the quantizer's losses counts, before all of them count as `weights.quantizer`; as in other
               codecs unless given, and for actions a `commit` of 0.01: a strong one keeps them what they were by
               chance at the start, where a weak one leaves a codec's codes unused.
    """

    weights: Weights = Weights(l2=1.0, quantizer=1.0)
    quantizer: QuantizerWeights | None = None

    def __post_init__(self) -> None:
        idle = [name for name in ("perceptual", "gram", "gan", "distillation") if getattr(self.weights, name)]
        if idle or not (self.weights.l1 or self.weights.l2):
            raise ConfigError(f"weights {self.weights.plain()}", "frames are learned by l1, l2 and the quantizer's")


class FramesTask:
    """Frames from what a part makes of them: a codec of all, latent actions of those behind the first.

    `psnr` and `used`, how many codes a batch uses as if it used them equally, weigh nothing and are there to be seen.
    """

    def __init__(self, model: nn.Module, part: VideoCodec | LatentActions, settings: FramesSettings | None = None):
        self.model, self.part, self.settings = model, part, settings or FramesSettings()
        usual = QuantizerWeights(commit=0.01) if isinstance(part, LatentActions) else QuantizerWeights()
        table, inner = self.settings.weights, (self.settings.quantizer or usual).plain()
        found = loss_names(part) if table.quantizer else []
        self.inner = [name for name in found if inner[name]]
        self.weights = {name: weight for name in ("l1", "l2") if (weight := getattr(table, name))}
        self.weights |= {name: table.quantizer * inner[name] for name in self.inner} | {"psnr": 0.0, "used": 0.0}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
        return {"frames": frames(samples)}

    def counts(self, batch: Batch) -> dict[str, int]:
        """Windows."""
        return dict.fromkeys(self.weights, len(batch["frames"]))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        video = self.part.pixels(batch["frames"])
        drawn, found = self.part(video)
        drawn, shown = drawn.float(), video[:, -drawn.shape[1] :].float()
        losses = {name: {"l1": l1, "l2": l2}[name](drawn, shown) for name in ("l1", "l2") if name in self.weights}
        losses |= {name: found.losses[name] for name in self.inner}
        with torch.no_grad():
            error = ((drawn.clamp(-1, 1) - shown) / 2).square().mean((2, 3, 4))
            losses["psnr"] = -10 * error.clamp_min(1e-10).log10().mean()
            losses["used"] = _used(found.ids, self.part.quantizer.sizes[0])
        return {name: losses[name] * len(video) for name in self.weights}

    def flops(self, batch: Batch) -> int:
        B, T = batch["frames"].shape[:2]
        return cost.flops(self.part, self.part.work(T, B))


class DynamicsSettings(Config):
    """
    rate   the share of a window's codes that are hidden, drawn between the two for each window
    whole  the share of frames, on average, of which none is: those before are seen whole when a world is played
    noise  the largest share of the codes in view that are those of another window at the same place, drawn for each
           window: what a world has drawn itself is not without faults, and should not be believed blindly
    """

    rate: tuple[float, float] = (0.5, 1.0)
    whole: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise ConfigError(f"{self.noise:g} of the codes in view are wrong", "give 0 or more, and less than 1")


class DynamicsTask:
    """Hidden codes from those in view and what was done, which a model that learned actions infers.

    `changed` is the loss of those alone that differ from the frame before. They are few: a world that only ever copies
    has a small loss too, and shows here. It weighs nothing.
    """

    def __init__(self, model: Genie, settings: DynamicsSettings | None = None):
        self.model, self.settings = model, settings or DynamicsSettings()
        self.weights = {"dynamics": 1.0, "changed": 0.0}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> Batch:
        batch = {"frames": frames(samples)}
        if self.model.latent is None:
            batch["actions"] = torch.from_numpy(np.stack([sample["actions"] for sample in samples]))
            if batch["actions"].is_floating_point():
                raise DataError("these episodes were steered by dials", "controls are choices: int64 (T − 1,)")
            self.model.check_actions(batch["actions"])
        return batch

    def counts(self, batch: Batch) -> dict[str, int]:
        """Windows, each the mean over its hidden codes."""
        return dict.fromkeys(self.weights, len(batch["frames"]))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        model = self.model
        video = model.codec.pixels(batch["frames"])
        ids, actions = model.look(video), batch["actions"] if model.latent is None else model.infer(video)
        hidden = hide_codes(tuple(ids.shape), self.settings.rate, ids.device, whole=self.settings.whole)
        shown = ids if not self.settings.noise else torch.where(hidden, ids, mixed(ids, self.settings.noise))
        missed = model.dynamics.missed(shown, model.dynamics.led(actions), hidden)
        each = (missed * hidden).flatten(1).sum(1) / hidden.flatten(1).sum(1).clamp_min(1)  # (B,)
        changed = hidden & (ids != ids.roll(1, 1))  # of the first frame nothing is hidden
        few = (missed.detach() * changed).sum() / changed.sum().clamp_min(1)
        return {"dynamics": each.sum(), "changed": few * len(video)}

    def flops(self, batch: Batch) -> int:
        """Frames are read by a pass forward alone, where what trains has three."""
        model, (B, T) = self.model, batch["frames"].shape[:2]
        read = cost.flops(model.codec.encoder, model.codec.work(T, B))
        if model.latent is not None:
            read += cost.flops(model.latent.encoder, model.latent.encoder.work(T, B))
        return cost.flops(model, model.work(T, B)) + read // 3


def frames(samples: Sequence[Mapping[str, np.ndarray]]) -> Tensor:
    """uint8 (T, H, W, 3) each → (B, T, 3, H, W)"""
    return torch.from_numpy(np.stack([sample["frames"] for sample in samples])).movedim(-1, 2)


def mixed(ids: Tensor, most: float) -> Tensor:
    """(B, T, h, w) with a share of each window's codes, from none to `most`, taken from the next window's same places:
    codes that may well stand there, in the wrong world."""
    share = most * torch.rand(len(ids), 1, 1, 1, device=ids.device)
    return torch.where(torch.rand(ids.shape, device=ids.device) < share, ids.roll(1, 0), ids)


def make_frames_task(model: Any, part: str, settings: FramesSettings) -> FramesTask:
    """The task of a Genie's codec or latent actions, or of a model that is nothing else."""
    found = getattr(model, part) if isinstance(model, Genie) else model
    if found is None:
        raise ConfigError("this world's controls are known, and no actions are learned", "leave the stage out")
    return FramesTask(model, found, settings)


def _used(ids: Tensor | None, codes: int) -> Tensor:
    """exp of the entropy of the ids of a batch"""
    assert ids is not None
    flat = ids.flatten()
    counts = torch.zeros(codes, device=flat.device).scatter_add(0, flat, torch.ones_like(flat, dtype=torch.float32))
    return entropy_of(counts / flat.numel()).exp()
