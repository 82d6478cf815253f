"""`vitrail data`: list, fetch and show datasets, generate scenes, and record episodes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from vitrail.cli.text_tables import align_columns
from vitrail.data.sources import SOURCES, get_cache_folder, is_fetched, verify_source
from vitrail.data.sources import fetch_source as fetch
from vitrail.errors import ConfigError, DataError, suggest_name

app = App(name="data")


@app.command(name="list", help_epilogue="Example: vitrail data list")
def list_sources() -> None:
    """List the data sources with their origin, licence and download size."""
    rows = [("name", "", "from", "licence", "to fetch", "what")]
    for name, row in SOURCES.items():
        mark = "✓" if is_fetched(name) else ""
        origin = f"{row.client} {row.package} {row.version}"
        rows.append((name, mark, origin, row.licence, f"{row.megabytes:.0f} MB", row.description))
    print(align_columns(rows, numbers=False))
    print(
        f"\n✓ fetched to {get_cache_folder() / 'data'}. "
        "Commands that take a source also accept a folder or hf:owner/name."
    )


@app.command(name="get", help_epilogue="Example: vitrail data get twemoji openmoji")
def fetch_sources(names: Annotated[list[str], Parameter(negative="")], /) -> None:
    """Download, verify and unpack data sources. Sources that are already present are skipped.

    Parameters
    ----------
    names
        Names of sources (see `vitrail data list`), or hf:owner/name.
    """
    for name in names:
        print(fetch(name))


@app.command(name="verify", help_epilogue="Example: vitrail data verify twemoji out/scenes")
def verify_data(names: Annotated[tuple[str, ...], Parameter(negative="")] = (), /) -> None:
    """Verify cached data by checksum, and exit with an error that names every damaged file. Nothing is downloaded.

    Parameters
    ----------
    names
        Names of sources, package models or hf:owner/name, or folders of shards. Default: all sources and package models
        that are fetched.
    """
    from vitrail.data.sources.verification import verify_shards
    from vitrail.hub.packages import PACKAGES, verify_package
    from vitrail.hub.packages import is_fetched as is_package_fetched

    if not names:
        names = (*(n for n in SOURCES if is_fetched(n)), *(n for n in PACKAGES if is_package_fetched(n)))
    damaged: list[str] = []
    for name in names:
        if Path(name).exists():
            result = verify_shards(Path(name))
        else:
            result = verify_package(name) if name in PACKAGES else verify_source(name)
        state = f"{len(result.damaged)} damaged" if result.damaged else "verified"
        print(f"{name}: {result.files:,} files, {result.bytes / 1e6:,.1f} MB: {state}")
        damaged += result.damaged
    if damaged:
        raise DataError(
            "\n  ".join([f"{len(damaged)} files are damaged:", *damaged]), "remove them and fetch them again"
        )
    print(f"{len(names)} verified")


@app.command(name="show", help_epilogue="Example: vitrail data show crowded --out crowded.png")
def draw_dataset(
    dataset: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/data.png"),
    count: int = 24,
    seed: int = 0,
    image_size: int = 192,
    image_folder: Path | None = None,
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    atlas: str = "emoji",
) -> None:
    """Draw a contact sheet of a dataset: images with their texts and boxes.

    Parameters
    ----------
    dataset
        A source (`vitrail data list`), a preset of scenes (plain, relations, inside, counting, counting-more, colours,
        small, crowded, transparent, moving, occluded, sub-patch, words, drawing, to-five, few, mixed), shards (a .tar,
        a folder of them, "train-{000..009}.tar"), a folder of episodes, or a file or folder in a supported format:
        LLaVA, COCO, VQA, GQA, TextVQA, POPE, MMBench, MME, images, videos.
    out
        The image to write. For episodes it may be a clip (.gif, .mp4) that plays them side by side.
    count
        Number of samples.
    seed
        Seed that selects the samples.
    image_size
        Side of the scenes in pixels.
    image_folder
        Folder of the images of a file. Default: the folder of the file.
    vendors
        Vendors whose sprites the scenes use. May be repeated. Default: all.
    atlas
        Sprites of the scenes: emoji, or a .safetensors file.
    """
    from vitrail.data.episodes.episode_dataset import is_episode_folder
    from vitrail.plots.dataset_sheet import draw_dataset
    from vitrail.plots.episode_sheet import CLIP_SUFFIXES, save_episode_clip
    from vitrail.plots.style import check_image_path, save_image

    if out.suffix.lower() in CLIP_SUFFIXES and is_episode_folder(Path(dataset)):
        save_episode_clip(Path(dataset), out, count=count, seed=seed)
        print(out)
        return
    check_image_path(out)
    sheet = draw_dataset(
        dataset, count=count, seed=seed, image_size=image_size, image_folder=image_folder, vendors=vendors, atlas=atlas
    )
    save_image(sheet, out)
    print(out)


@app.command(name="make", help_epilogue="Example: vitrail data make pocket -o out/pocket --episodes 50 --num-workers 2")
def make_dataset(
    preset: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    count: Annotated[int | None, Parameter(name=("--count", "--episodes"))] = None,
    image_size: int | None = None,
    seed: int = 0,
    start: int | None = None,
    num_questions: int | None = None,
    held_out: bool | None = None,
    combinations: Literal["train", "test", "all"] | None = None,
    vendors: Annotated[tuple[str, ...] | None, Parameter(negative="")] = None,
    atlas: str | None = None,
    policy: str | None = None,
    steps: int | None = None,
    frame_skip: int | None = None,
    video_quality: Literal["lossless", "small"] | None = None,
    num_workers: int | None = None,
) -> None:
    """Generate annotated scenes as WebDataset shards, or record episodes of a world.

    A sample of a scene holds the image, a caption, and JSON with all boxes, names, colours, questions and answers. The
    command prints the majority and the blind baseline of every kind of question. A world whose simulator is not
    installed gets its own environment once. The same command resumes an interrupted run.

    Parameters
    ----------
    preset
        Scenes: plain, relations, inside, counting, counting-more, colours, small, crowded, transparent, moving,
        occluded, sub-patch, words, drawing, to-five, few or mixed. Worlds: pocket, pocket-plain, pocket-curtain,
        coinrun, coinrun-hard, pusht, carracing, doom.
    out
        Folder for the shards.
    count
        Number of scenes (default 1000) or episodes (default 100).
    image_size
        Side in pixels. Default: 128 for scenes, the world's own size for episodes.
    seed
        Seed of the scenes or episodes. Different seeds give disjoint data.
    start
        Scenes: index of the first scene.
    num_questions
        Scenes: questions of each scene, of different kinds. Default: 6.
    held_out
        Scenes: use question templates that training never uses.
    combinations
        Scenes: which colours things have: those of training, the one reserved for testing, or all.
    vendors
        Scenes: vendors of the sprites. May be repeated. Default: all.
    atlas
        Scenes: sprites: emoji, or a .safetensors file.
    policy
        Worlds: the policy that acts: random, seeker (pocket), onward or strolling (coinrun), pusher (pusht), driver
        (carracing), explorer (doom). Default: random for pocket, onward for coinrun, otherwise the scripted one.
    steps
        Worlds: maximum actions of an episode.
    frame_skip
        Worlds: simulator steps an action.
    video_quality
        Worlds: lossless, or small, which changes colours slightly.
    num_workers
        Worlds: number of parallel simulators.
    """
    from vitrail.data.episodes import WORLDS
    from vitrail.data.scenes.config import PRESETS

    ours = {"policy": policy, "steps": steps, "frame_skip": frame_skip, "video_quality": video_quality}
    scenes = {"start": start, "num_questions": num_questions, "held_out": held_out, "combinations": combinations}
    scenes |= {"vendors": vendors, "atlas": atlas}
    if preset in WORLDS:
        _reject_options(preset, scenes, "a world")
        _record_episodes(
            preset,
            out,
            100 if count is None else count,
            seed,
            image_size,
            1 if num_workers is None else num_workers,
            ours,
        )
    elif preset not in PRESETS:
        raise ConfigError(
            f"there is no preset of scenes and no world {preset!r}", suggest_name(preset, [*PRESETS, *WORLDS])
        )
    else:
        _reject_options(preset, ours | {"num_workers": num_workers}, "scenes")
        options: dict[str, Any] = {name: value for name, value in scenes.items() if value is not None}
        _make_scenes(
            preset, out, 1000 if count is None else count, seed, 128 if image_size is None else image_size, **options
        )


def _reject_options(name: str, options: dict[str, Any], kind: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} is {kind} and has no option --{option.replace('_', '-')}", "remove the option")


def _record_episodes(
    world: str, out: Path, episodes: int, seed: int, image_size: int | None, num_workers: int, options: dict[str, Any]
) -> None:
    from vitrail.data.episodes import EpisodeDataset, RecordConfig, record_episodes

    settings = {name: value for name, value in options.items() if value is not None}
    config = RecordConfig(world=world, seed=seed, image_size=image_size, **settings)
    shards = record_episodes(config, out, episodes=episodes, num_workers=num_workers)
    dataset = EpisodeDataset(out)
    ended = sum(episode.ended for episode in dataset.metadata)
    print(f"{len(dataset):,} episodes of {world}, {dataset.lengths.sum():,} frames in {len(shards)} shards: {out}")
    mean = sum(episode.reward for episode in dataset.metadata) / len(dataset)
    print(f"{ended:,} terminated before the step limit; mean reward {mean:.3g}")


def _make_scenes(
    preset: str,
    out: Path,
    count: int,
    seed: int,
    image_size: int,
    *,
    start: int = 0,
    num_questions: int = 6,
    held_out: bool = False,
    combinations: str = "train",
    vendors: tuple[str, ...] = (),
    atlas: str = "emoji",
) -> None:
    from vitrail.data.language import format_baselines
    from vitrail.data.scene_annotations import SceneAnnotator
    from vitrail.data.scenes.atlas_library import open_atlas
    from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
    from vitrail.data.shards import write_shards

    scene: dict[str, object] = {"combinations": combinations, "vendors": list(vendors)}
    config = SceneSourceConfig(atlas=atlas, preset=preset, scene=scene, image_size=image_size, seed=seed)
    annotator = SceneAnnotator(SceneSource(config, open_atlas(atlas)), num_questions=num_questions, held_out=held_out)
    if not 0 <= start < start + count <= config.num_samples:
        raise ConfigError(
            f"--start {start} with --count {count} is out of range",
            f"give a count of at least 1, and indices from 0 to {config.num_samples - 1}",
        )
    stop = min(start + max(count, 2000), config.num_samples)
    shards = write_shards(
        (annotation.to_sample() for annotation in annotator.annotate(start, start + count)), out, name=preset
    )
    print(f"{count:,} scenes in {len(shards)} shards: {out}")
    print(f"\nbaselines without the image, over {stop - start:,} scenes:")
    print(format_baselines(annotator.compute_baselines(start, stop)))


app.command(
    "vitrail.cli.instruct_command:make_instruction_data",
    name="instruct",
    help="Generate instruction data in LLaVA's format from captions and boxes with a language model.",
    help_epilogue="Example: vitrail data instruct mixed --out out/instruct --model smollm2-135m --count 100",
)
