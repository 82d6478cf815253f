"""Suites of world models: `world` and `imitation`."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.evals.evaluation import EvaluationResult, Suite
from vitrail.registry import SUITES

if TYPE_CHECKING:
    import torch

    from vitrail.data.episodes import EpisodeDataset
    from vitrail.evals.context import EvalContext
    from vitrail.evals.suites.imitation_benchmark import Demonstrations, ImitationResult
    from vitrail.models.genie_model import Genie


@SUITES.register("world")
class WorldSuite(Suite):
    """Roll out a world model from real frames, with the true and with other actions, and compare it with the episodes.

    data            episodes that `vitrail data make` recorded
    split           split of the episodes. test is the tenth that training does not use
    count           maximum number of videos, one an episode, so that intervals are over episodes
    length          frames of a video
    steps           decoding steps of a frame. May be repeated. All scores use the first value; the others show the
                    effect of more steps
    temperature     sampling temperature of the codes. Default: as in `vitrail play`
    rollout_frames  length of the long rollouts in frames
    network         features of the Fréchet distance of clips: pixels (4 × 4 colours of a frame, without weights) or
                    resnet50 (trained on ImageNet). Both use single frames and their differences. Published FVD uses I3D
                    instead
    tracked_object  object whose reappearance after occlusion is measured, if the episodes have labels of it
    seed            seed of sampling
    """

    model_description = "A world model (Genie): a folder."
    example = "vitrail eval out/genie/final world --data out/episodes/coinrun --steps 2"
    output_files = {"contact_sheet": "An image to write: real frames above predicted ones"}

    data: Path
    split: Literal["train", "test", "all"] = "test"
    count: int = 128
    length: int = 24
    steps: tuple[int, ...] = (2, 4, 8)
    temperature: float = 0.5
    rollout_frames: int = 200
    network: Literal["pixels", "resnet50"] = "pixels"
    tracked_object: str = "walker"
    seed: int = 0

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.metrics.world_metrics import PixelFeatureNetwork
        from vitrail.evals.suites import long_rollout_benchmark, world_scores
        from vitrail.generate.rollout import RolloutConfig
        from vitrail.generate.sampling import SamplingConfig

        at_least = long_rollout_benchmark.MIN_VIDEOS, 2 * long_rollout_benchmark.CLIP_FRAMES
        if not self.steps or self.count < at_least[0] or self.length < at_least[1]:
            raise ConfigError(
                f"--count is {self.count}, --length is {self.length} and --steps is {self.steps}",
                "give at least {} videos, {} frames, and one number of steps".format(*at_least),
            )
        model = context.load_world_model()
        videos = world_scores.load_videos(self.data, self.split, self.count, self.length)
        check_frame_size(model, videos.frames, self.data)
        network = PixelFeatureNetwork() if self.network == "pixels" else context.load_resnet50()
        rollout_config = RolloutConfig(steps=self.steps[0], sampling=SamplingConfig(temperature=self.temperature))
        report = world_scores.score_world(
            model,
            videos,
            rollout_config,
            network,
            steps=self.steps,
            rollout_frames=self.rollout_frames,
            tracked_object=self.tracked_object,
            seed=self.seed,
        )
        settings = {
            "data": self.data,
            "split": self.split,
            "num_videos": len(videos.frames),
            "length": self.length,
            "rollout_frames": self.rollout_frames,
            "seed": self.seed,
            "steps": self.steps,
            "temperature": self.temperature,
            "network": report.network,
        }
        missing = f"object permanence is not measured: no {self.tracked_object} leaves the view and returns"
        warning = "" if report.measures_permanence else missing
        return EvaluationResult(report.scores, settings, warning=warning, details=report)


@SUITES.register("imitation")
class ImitationSuite(Suite):
    """Train policies from videos through latent actions and a few labels, and compare them with behavior cloning.

    Policies act in the real simulator of the world.

    data               expert episodes, such as those of `vitrail data make pocket --policy seeker`
    num_labels         number of steps with known controls. May be repeated
    max_videos         maximum number of episodes to learn from
    train_steps        training steps of every policy
    num_seeds          policies of each kind, with different labels, weights and levels. Intervals are over the episodes
                       of all policies; they do not include the variance between policies
    num_episodes       episodes that each policy plays
    max_episode_steps  maximum steps of an episode. Default: as in the recorded episodes
    """

    model_description = "A world model with latent actions (Genie): a folder."
    example = "vitrail eval out/genie/final imitation --data out/seeker --num-labels 32"

    data: Path
    num_labels: tuple[int, ...] = (32, 128)
    max_videos: int = 200
    train_steps: int = 600
    num_seeds: int = 3
    num_episodes: int = 50
    max_episode_steps: int | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.data.episodes import EpisodeDataset
        from vitrail.data.episodes.episode import DiscreteActions

        counts = (self.max_videos, self.train_steps, self.num_seeds, self.num_episodes, self.max_episode_steps or 1)
        if min(counts) < 1 or not self.num_labels:
            raise ConfigError("a count is less than 1, or --num-labels is empty", "give at least 1 of each")
        model = context.load_world_model()
        if model.latent is None:
            raise CheckpointError(
                f"{context.name} is not a world model with latent actions", "give a Genie with latent actions"
            )
        episodes = EpisodeDataset(self.data)
        manifest = episodes.manifest
        if not isinstance(manifest.actions, DiscreteActions):
            raise DataError(f"{self.data} has continuous actions", "give episodes with discrete actions")
        videos = self._load_videos(episodes)
        check_frame_size(model, videos[0][0], self.data)
        demonstrations = self._label(videos, model, len(manifest.actions.names))
        rows = self._train_and_play(demonstrations, episodes, context.device)
        settings = {
            "data": self.data,
            "world": manifest.world,
            "policy": manifest.policy,
            "repeat": manifest.repeat,
            "num_videos": len(videos),
            "num_steps": len(demonstrations.frames),
            "train_steps": self.train_steps,
            "num_seeds": self.num_seeds,
            "num_episodes": self.num_episodes,
        }
        message = f"training data: {len(demonstrations.frames):,} steps of {len(videos)} episodes"
        scores = [row.success_score for row in rows] + [row.return_score for row in rows]
        return EvaluationResult(scores, settings, [message])

    def _load_videos(self, episodes: "EpisodeDataset") -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Load frames uint8 (T, C, H, W) and actions (T − 1) of the first episodes."""
        import torch

        videos = []
        for number in range(min(self.max_videos, len(episodes))):
            one = episodes.read_window(number, 0, int(episodes.lengths[number]), ("frames", "actions"))
            videos.append((torch.from_numpy(one["frames"]).movedim(-1, 1), torch.from_numpy(one["actions"])))
        return videos

    def _label(
        self, videos: "list[tuple[torch.Tensor, torch.Tensor]]", model: "Genie", num_controls: int
    ) -> "Demonstrations":
        """Infer the latent actions of videos."""
        from vitrail.evals.suites.imitation_benchmark import label_demonstrations

        def infer(video: "torch.Tensor") -> "torch.Tensor":
            return model.infer_actions(model.codec.to_pixels(video))

        return label_demonstrations(videos, infer, model.num_actions, num_controls)

    def _train_and_play(
        self, demonstrations: "Demonstrations", episodes: "EpisodeDataset", device: str
    ) -> "list[ImitationResult]":
        from vitrail.control.behavior_cloning import BehaviorCloningConfig
        from vitrail.data.episodes.simulators import open_simulator
        from vitrail.evals.suites.imitation_benchmark import evaluate_imitation

        manifest = episodes.manifest
        simulator = open_simulator(manifest.world, manifest.side)
        try:
            return evaluate_imitation(
                demonstrations,
                simulator,
                self.num_labels,
                config=BehaviorCloningConfig(steps=self.train_steps),
                num_seeds=self.num_seeds,
                num_episodes=self.num_episodes,
                max_steps=self.max_episode_steps or manifest.steps,
                action_repeat=manifest.repeat,
                device=device,
            )
        finally:
            getattr(simulator, "close", lambda: None)()


def check_frame_size(model: "Genie", frames: "torch.Tensor", data: Path) -> None:
    """Refuse frames (…, H, W) of another size than the model's."""
    if tuple(frames.shape[-2:]) != model.codec.image_size:
        raise DataError(
            f"{data} has frames of {tuple(frames.shape[-2:])} pixels",
            f"give episodes with frames of {model.codec.image_size} pixels",
        )
