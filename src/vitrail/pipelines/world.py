"""The pipeline of a world model: rollouts from images and actions, and Gymnasium environments.

The folder of a model may contain `starts.png`, start images side by side, and `controls.json`, the mapping from the
controls of a simulator to the actions of the model.

Axes: B images, N start images, C channels, H, W pixels, h × w codes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.codecs.image_sources import ImageResizeConfig
from vitrail.control import ImaginedWorld
from vitrail.control.imagined_world import RewardFn
from vitrail.data.episodes import EpisodesConfig, EpisodeSource
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.generate.rollout import Rollout, RolloutConfig, rollout_frames
from vitrail.generate.sampling import SamplingConfig
from vitrail.hub import checkpoint_info
from vitrail.hub.safetensors_files import read_json, write_json
from vitrail.models.genie_model import Genie
from vitrail.pipelines.base import select_device
from vitrail.pipelines.controls import ControlMap, check_action_codes, check_episodes, infer_controls
from vitrail.processing.image_loading import ImageSource, load_image

if TYPE_CHECKING:
    from vitrail.control.gym_env import WorldEnv, WorldVectorEnv

STARTS, CONTROLS = "starts.png", "controls.json"
STEPS, TEMPERATURE = 2, 0.5  # default decoding steps of a frame, and sampling temperature of its codes


class WorldPipeline:
    """A Genie with its start images and controls; `vitrail.load(folder)` returns it for a folder with a Genie.

    `start_images` are uint8 (N, H, W, 3).
    """

    def __init__(
        self, model: Genie, start_images: np.ndarray | Tensor | None = None, controls: ControlMap | None = None
    ):
        if model.config.codec.channels != 3:
            raise ConfigError(
                f"the codec has {model.config.codec.channels} channels", "use a world model with RGB frames"
            )
        self.model, self.controls = model.eval(), controls
        self.start_images = torch.zeros(0, *self.image_size, 3, dtype=torch.uint8)
        if start_images is not None:
            self.start_images = self.create_world(start_images=torch.as_tensor(start_images)).start_images.movedim(
                1, -1
            )
        if controls is not None:
            check_action_codes(controls, model)

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "WorldPipeline":
        """Load a model. It runs on a GPU if one is available; in half precision if the device supports it."""
        where, default_dtype = select_device(device, prefer_half=True)
        folder = checkpoint_info.resolve_path(name_or_path)
        model = hub.load(folder, dtype=dtype or default_dtype, device=where)
        if not isinstance(model, Genie):
            raise ConfigError(
                f"{name_or_path} is a {type(model).__name__}, not a world model",
                'give a model that is trained with kind = "genie"',
            )
        return cls(model, _read_start_images(folder / STARTS, model), _read_controls(folder / CONTROLS, model))

    def save(self, folder: str | Path, *, small: bool = False) -> None:
        """Save the model to a folder. `small` quantizes to 8 bits a weight."""
        folder = Path(folder)
        hub.save(self.model, folder, int8=small)
        for file in (STARTS, CONTROLS):  # of a model that the folder contained before
            (folder / file).unlink(missing_ok=True)
        if len(self.start_images):
            strip = self.start_images.transpose(0, 1).flatten(1, 2)  # (H, N·W, 3)
            Image.fromarray(strip.contiguous().numpy()).save(folder / STARTS)
        if self.controls is not None:
            write_json(folder / CONTROLS, self.controls.to_dict())

    def with_episodes(self, folder: str | Path, count: int = 16) -> "WorldPipeline":
        """Return a pipeline with start images and controls from recorded episodes.

        Start images are first frames of episodes of the test split; controls come from `infer_controls`.
        """
        check_episodes(str(folder))
        source = EpisodeSource(
            EpisodesConfig(folder=str(folder), window_length=1, split="test", fields=("frames",), cache_bytes=0)
        )
        numbers = source.episode_numbers[:count].tolist()
        firsts = [source.episodes.read_window(number, 0, 1, ("frames",))["frames"][0] for number in numbers]
        starts = torch.stack([self.preprocess_image(first) for first in firsts])
        return WorldPipeline(self.model, starts, infer_controls(self.model, str(folder)))

    # ---- frames -------------------------------------------------------------------------------------------------

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of frames in pixels."""
        return self.model.codec.image_size

    def preprocess_image(self, image: ImageSource) -> Tensor:
        """Crop and resize any image to a frame of the model, uint8 (H, W, 3)."""
        codec = self.model.codec
        return (
            ImageResizeConfig(size=codec.image_size).apply(load_image(image), codec.downsample_factor)[0].movedim(0, -1)
        )

    def tokenize(self, images: Any) -> Tensor:
        """Encode one image or a list of independent images to codec ids (B, h, w)."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not several:
            raise ConfigError("the list of images is empty", "give at least one")
        frames = torch.stack([self.preprocess_image(one) for one in several]).movedim(-1, 1)[:, None]  # (B, 1, C, H, W)
        return self.model.encode_frames(self.model.codec.to_pixels(frames))[:, 0]

    @torch.no_grad()
    def detokenize(self, ids: Tensor) -> list[Image.Image]:
        """Decode codec ids (B, h, w) to images."""
        codec = self.model.codec
        return _to_pil_images(codec.to_uint8(codec.decode(codec.lookup(ids.to(codec.device)[:, None]))[:, 0]))

    # ---- worlds -------------------------------------------------------------------------------------------------

    def create_rollout(self, steps: int = STEPS, temperature: float = TEMPERATURE) -> Rollout:
        """Create a rollout; call `start` on it first."""
        return Rollout(self.model, _build_rollout_config(steps, temperature))

    def generate_frames(
        self,
        actions: Sequence[int],
        start_image: "ImageSource | None" = None,
        *,
        seed: int | None = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
    ) -> list[Image.Image]:
        """Generate the frames that follow an image, by default the first start image, one for each action."""
        if start_image is None and not len(self.start_images):
            raise ConfigError("the model has no start images", "give start_image")
        start = self.start_images[0] if start_image is None else self.preprocess_image(start_image)
        done = torch.tensor(list(actions), dtype=torch.long)[None]
        frames = rollout_frames(
            self.model, start.movedim(-1, 0)[None], done, _build_rollout_config(steps, temperature), seed=seed
        )
        return _to_pil_images(frames[0])

    def create_world(
        self,
        *,
        start_images: np.ndarray | Tensor | None = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
        reward_fn: RewardFn | None = None,
        max_episode_steps: int | None = None,
    ) -> ImaginedWorld:
        """Create the world that environments wrap. `start_images` replace the model's own."""
        if start_images is None and not len(self.start_images):
            raise ConfigError("the model has no start images", "give start_images, uint8 (N, H, W, 3)")
        start_images = self.start_images if start_images is None else start_images
        return ImaginedWorld(
            lambda: self.create_rollout(steps, temperature),
            start_images,
            reward_fn=reward_fn,
            max_episode_steps=max_episode_steps,
        )

    def create_env(self, **options: Any) -> "WorldEnv":
        """Create a Gymnasium environment. `options` are those of `create_world`."""
        return self.create_world(**options).create_env()

    def create_vector_env(self, num_envs: int, **options: Any) -> "WorldVectorEnv":
        """Create a Gymnasium vector environment of worlds in one batch. `options` are those of `create_world`."""
        return self.create_world(**options).create_vector_env(num_envs)


def _build_rollout_config(steps: int, temperature: float) -> RolloutConfig:
    return RolloutConfig(steps=steps, sampling=SamplingConfig(temperature=temperature))


def _to_pil_images(frames: Tensor) -> list[Image.Image]:
    """Convert frames uint8 (B, 3, H, W) to PIL images."""
    return [Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()) for one in frames.cpu()]


def _read_start_images(file: Path, model: Genie) -> Tensor | None:
    """Read start images side by side in one file → (N, H, W, 3)."""
    if not file.exists():
        return None
    strip = torch.from_numpy(np.array(load_image(file)))  # (H, N·W, 3)
    H, W = model.codec.image_size
    if strip.shape[0] != H or strip.shape[1] % W:
        raise CheckpointError(
            f"{file} has {strip.shape[0]} × {strip.shape[1]} pixels",
            f"give frames of {H} × {W} pixels side by side",
        )
    return strip.unflatten(1, (-1, W)).transpose(0, 1).contiguous()


def _read_controls(file: Path, model: Genie) -> ControlMap | None:
    if not file.exists():
        return None
    try:
        controls = ControlMap.from_dict(read_json(file))
        check_action_codes(controls, model)
        return controls
    except VitrailError as error:
        raise CheckpointError(f"{file}: {error.problem}", error.remedy) from None
