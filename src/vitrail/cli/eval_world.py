"""`vitrail eval MODEL world`: what a world keeps of frames, whether its actions steer, and how far it can be played."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, Common, device_of, tell
from vitrail.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from vitrail.data.episodes.episode import Manifest
    from vitrail.evals.metrics.estimate import Estimate
    from vitrail.evals.metrics.frechet import Network
    from vitrail.evals.shares import Score
    from vitrail.evals.suites.worlds import WorldReport
    from vitrail.generate.rollout import Rolling
    from vitrail.models.genie import Genie


def world(
    model: str,
    /,
    *,
    data: Path,
    part: Literal["train", "test", "all"] = "test",
    count: int = 128,
    length: int = 24,
    steps: Annotated[tuple[int, ...], Parameter(negative="")] = (2, 4, 8),
    temperature: float = 0.5,
    frames: int = 200,
    network: Literal["pixels", "resnet50"] = "pixels",
    thing: str = "walker",
    seed: int = 0,
    sheet: Path | None = None,
    common: Common = COMMON,
) -> None:
    """Roll worlds out from real frames, by the actions that were taken and by others, and hold them against the truth.

    Parameters
    ----------
    model
        A world model (Genie): a folder.
    data
        Episodes, as `vitrail data make` records them.
    part
        Of the episodes: test is the tenth of them that training does not read.
    count
        Videos at most, one an episode, so that intervals are over episodes.
    length
        Frames of a video.
    steps
        Passes that draw a frame. All figures are of the first; the others show what more passes are worth. May be
        repeated.
    temperature
        Of the choice of codes; as `vitrail play` has it unless given.
    frames
        How far worlds are rolled out.
    network
        Whose features the Fréchet distance of clips is of: pixels, which are 4 × 4 colours of a frame and need no
        weights, or ResNet-50, trained on ImageNet. Both see single frames, and their changes; neither is the I3D of
        published FVD.
    thing
        What should come back after it was out of sight, where the episodes have labels of it.
    seed
        Of all that is drawn by chance.
    sheet
        A picture to write: real frames above imagined ones.
    """
    from vitrail import hub
    from vitrail.evals.suites.worlds import judge_world
    from vitrail.evals.suites.worlds_far import CLIP, LEAST, judge_far, judge_steps
    from vitrail.generate.rollout import Rolling
    from vitrail.generate.sampling import Sampling
    from vitrail.models.genie import Genie

    if not steps or count < LEAST or length < 2 * CLIP:
        raise ConfigError(f"{count} videos of {length} frames", f"{LEAST} or more, of {2 * CLIP}, and steps")
    loaded = hub.load(model, device=device_of(common))
    if not isinstance(loaded, Genie):
        raise CheckpointError(f"{model} is a {type(loaded).__name__}, not a world model", "give a Genie")
    video, controls, labels, manifest = _videos(data, part, count, length)
    if tuple(video.shape[-2:]) != loaded.codec.size:
        raise DataError(f"{data} has frames of {tuple(video.shape[-2:])}", f"the model's are {loaded.codec.size}")
    known = controls if not controls.is_floating_point() else None
    rolling = Rolling(steps=steps[0], sampling=Sampling(temperature=temperature))
    near = judge_world(loaded, video, known, rolling, names=manifest.actions.names, seed=seed)
    actions = known if loaded.latent is None else loaded.infer(loaded.codec.pixels(video)).cpu()
    assert actions is not None
    far = judge_far(loaded, video, actions, _network(network), rolling, frames=frames, seed=seed)
    scores = [_points(near.codec), _points(near.still), _points(near.control)]
    scores += _meaning(near, far.read, actions, known, loaded)
    for one in far.strayed:
        scores += [] if one.psnr is None else [_points(one.psnr, "psnr", at=one.at)]
    apart, chance = {"the videos' first clips": far.apart.value}, {"real clips": far.chance.value}
    title = f"FVD, {far.apart.name}"
    scores += [_points(one.frechet, title, beside=apart, at=one.at) for one in far.strayed]
    scores += [_points(one.halves, f"{title}, to other videos", beside=chance, at=one.at) for one in far.strayed]
    for pace in judge_steps(loaded, video, actions, steps, rolling, seed=seed):
        speed = {"frames a second, one world": pace.fps}
        scores += [_points(pace.psnr, steps=pace.steps, beside=speed), _points(pace.control, steps=pace.steps)]
    hidden: list[Score] = []
    if labels is not None and thing in manifest.labels:
        hidden = _permanence(loaded, video, labels, actions, manifest.labels.index(thing), thing, rolling, seed)
    settings = {"data": str(data), "part": part, "videos": len(video), "length": length, "frames": frames, "seed": seed}
    settings |= {"steps": steps, "temperature": temperature, "network": far.apart.name}
    said = "" if hidden else f"no {thing} was seen to go out of sight and come back: permanence is not measured"
    tell("world", model, settings, scores + hidden, common, said)
    if sheet is not None:
        _draw(sheet, model, video, far.drawn)


def _videos(
    data: Path, part: Literal["train", "test", "all"], count: int, length: int
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Manifest]":
    """uint8 (B, T, C, H, W), what was done (B, T − 1), what every pixel shows (B, T, H, W), and what has the names of
    both; one window an episode, anywhere in it."""
    import numpy as np
    import torch

    from vitrail.data.episodes import EpisodesConfig, EpisodeSource
    from vitrail.data.episodes.read import read_manifest
    from vitrail.data.order import permuted

    manifest = read_manifest(data)
    fields = ("frames", "actions", *(("labels",) if "labels" in manifest.tracks else ()))
    config = EpisodesConfig(folder=str(data), length=length, stride=length, part=part, fields=fields, hold=0)
    source = EpisodeSource(config)
    taken: dict[int, int] = {}  # episode → window
    for item in (permuted(i, len(source), 0) for i in range(len(source))):
        if len(taken) < count:
            taken.setdefault(source.place(item)[0], item)
    windows = [source[item] for item in sorted(taken.values())]
    made = {name: torch.from_numpy(np.stack([window[name] for window in windows])) for name in fields}
    return made["frames"].movedim(-1, 2), made["actions"], made.get("labels"), manifest


def _network(name: str) -> "Network":
    from vitrail.evals.metrics.worlds import Pixels
    from vitrail.hub.resnet50 import load_resnet50

    return Pixels() if name == "pixels" else load_resnet50().eval()


def _points(found: "Estimate", name: str | None = None, beside: dict[str, float] | None = None, **part: int) -> "Score":
    from vitrail.evals.shares import Score

    return Score(name or found.name, found.value, found.interval, found.of, beside or {}, part=part, points=True)


def _meaning(
    near: "WorldReport",
    read: "Estimate | None",
    actions: "torch.Tensor",
    known: "torch.Tensor | None",
    model: "Genie",
) -> "list[Score]":
    """What latent actions stand for, and whether they do what they are read as."""
    from vitrail.evals.metrics.estimate import estimate
    from vitrail.evals.shares import Score

    found, pure, sides = [], near.purity, near.sides
    if pure is not None and known is not None:
        right = (pure.meaning[actions] == known).float().mean(1)
        by_video = estimate("purity", right)
        beside = {"majority": pure.majority}
        found.append(Score("purity of latent actions", pure.value, by_video.interval, by_video.of, beside))
    if sides is not None:
        title = "left told from right by latent actions"
        found.append(Score(title, sides.value, sides.interval, sides.of, {"chance": 0.5}))
    if read is not None:
        chance = {"chance": 1 / model.actions}
        found.append(Score("actions read back from frames", read.value, read.interval, read.of, chance))
    return found


def _permanence(
    model: "Genie",
    video: "torch.Tensor",
    labels: "torch.Tensor",
    actions: "torch.Tensor",
    thing: int,
    name: str,
    rolling: "Rolling",
    seed: int,
) -> "list[Score]":
    from vitrail.evals.shares import Score
    from vitrail.evals.suites.worlds_far import judge_permanence

    found = judge_permanence(model, video, labels, actions, thing, rolling, seed)
    if found is None:
        return []
    beside = {"codec": found.codec.value, "never having seen it": found.forgetful.value}
    title = f"the {name} comes back where it should"
    split = [Score(title, s.value, s.interval, s.of, part={"frames away": n}) for n, s in found.by_length.items()]
    return [Score.counted(title, found.remembered, **beside), *split]


def _draw(path: Path, name: str, video: "torch.Tensor", drawn: "torch.Tensor") -> None:
    """For a few videos a row of what happened, and below it a row of what was imagined."""
    from PIL import Image

    from vitrail.show.sheet import Tile, draw_sheet

    far = drawn.shape[1]
    times = sorted({t for t in (1, 2, 4, 8, 16, 64, far) if t <= far})
    tiles = []
    for real, imagined in zip(video[:4], drawn[:4], strict=True):
        for says, frames, first in (("real", real, 0), ("imagined", imagined, 1)):
            for t in times:
                if t - first < len(frames):
                    picture = Image.fromarray(frames[t - first].movedim(0, -1).contiguous().numpy())
                    tiles.append(Tile(picture, [f"{says}, frame {t}"]))
                else:
                    tiles.append(
                        Tile(Image.new("RGB", (frames.shape[-1], frames.shape[-2]), "white"), ["not recorded"])
                    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_sheet(tiles, f"{name}: from frame 0 on, by the actions that were taken", columns=len(times)).save(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", "give another file, such as sheet.png") from None
    print(path)
