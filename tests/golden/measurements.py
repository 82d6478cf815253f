"""Measurements of behaviour that must not change: exact digests of data, and floats of models and of training.

Every function returns plain data for `golden.json`: strings and integers are compared exactly, floats within 1e-5.
"""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import vitrail
from vitrail import hub, recipe
from vitrail.config import set_by_path
from vitrail.data.augmentation import AugmentationConfig, augment_images
from vitrail.data.episodes.episode_dataset import EpisodeDataset
from vitrail.data.episodes.recorder import RecordConfig, record_episodes
from vitrail.data.examples import load_examples
from vitrail.data.image_captions import build_caption_source
from vitrail.data.image_readers import open_images
from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.language import (
    QA_DRAFTERS,
    SceneLanguage,
    generate_conversations,
    generate_preference_pairs,
    generate_prompts,
    generate_prompts_for_scenes,
    generate_questions,
    generate_swap_pairs,
)
from vitrail.data.language.dense_prompts import generate_dense_prompts
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS, EXTRA_TEMPLATES, SWAP_KINDS
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.data.qa import build_qa_dataset
from vitrail.data.question_graphs import QuestionGraph
from vitrail.data.sampler import MixtureConfig, MixtureSampler, permute_index
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.data.scenes.atlas import Atlas, Sprite
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites
from vitrail.data.sources import get_cache_folder
from vitrail.data.splits import collect_records, compute_fingerprints, split_images
from vitrail.data.text_source import TextSource, TextSourceConfig
from vitrail.generate.sampling import SamplingConfig
from vitrail.models.detector import normalize_images
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.registry import MODELS
from vitrail.serve.play import WorldPipeline

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "golden.json"
SEED = 7
SCENES = torch.arange(100, 148)
SIDE = 48  # pixels
EMOJI = ("twemoji", "noto", "fluent", "openmoji")
MORE_EMOJI = ("fluent-flat", "noto-v1", "emojione")


def environment() -> dict[str, str | int]:
    """The versions that the numbers depend on."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "pillow": PIL.__version__,
        "machine": platform.machine(),
    }


def missing_data(*names: str) -> list[str]:
    """The sources that `vitrail data get` has not fetched."""
    return [name for name in (*names, "emojibase") if not (get_cache_folder() / "data" / name / "files").is_dir()]


# ---- digests ----------------------------------------------------------------------------------------------------


def digest(*parts: Any) -> str:
    """A digest of tensors, arrays, texts and numbers, in nested lists and tuples."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous().numpy()
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, list | tuple):
            found.update(f"[{len(part)}".encode())
            for one in part:
                add(one)
        else:
            found.update(f"{type(part).__name__} {part!r};".encode())

    add(parts)
    return found.hexdigest()[:24]


def columns(table: Any) -> list[Any]:
    """The fields of a data class, in their order, without their names."""
    return [getattr(table, field.name) for field in fields(table)]


class Question(NamedTuple):
    """A question of a graph, with the class and field names that are part of the golden digests."""

    id: int
    category: str
    text: str
    depends: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A question graph, with the class and field names that are part of the golden digests."""

    id: str
    prompt: str
    questions: tuple[Question, ...]


def to_golden_graph(graph: QuestionGraph) -> Graph:
    """Return the graph under the names of the golden digests, which include the `repr` of each part."""
    return Graph(graph.id, graph.prompt, tuple(Question(*question) for question in graph.questions))


def floats(tensor: Tensor, count: int = 8) -> list[float]:
    """Mean, standard deviation, and some values at equal distances."""
    flat = tensor.detach().double().flatten()
    at = torch.linspace(0, len(flat) - 1, count).long()
    return [float(flat.mean()), float(flat.std()), *flat[at].tolist()]


def numbers(data: Any) -> list[float]:
    """Every numeric leaf of nested data."""
    if isinstance(data, dict):
        return [value for part in data.values() for value in numbers(part)]
    if isinstance(data, list | tuple):
        return [value for part in data for value in numbers(part)]
    return [float(data)] if isinstance(data, int | float) and not isinstance(data, bool) else []


def digest_numbers(data: Any) -> str:
    """How many numeric leaves there are, and a digest of them in ascending order."""
    values = sorted(numbers(data), key=lambda value: (value != value, value))
    return f"{len(values)} {digest(*values)}"


# ---- data that needs no download --------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, tuple[int, ...]], None]] = {
    "square": lambda d, c: d.rectangle((14, 14, 113, 113), c),
    "bar": lambda d, c: d.rectangle((4, 40, 123, 79), c),
    "tower": lambda d, c: d.rectangle((50, 4, 80, 123), c),
    "ball": lambda d, c: d.ellipse((10, 10, 117, 117), c),
    "egg": lambda d, c: d.ellipse((30, 6, 97, 121), c, (20, 20, 20, 255), 6),
    "tent": lambda d, c: d.polygon([(4, 110), (64, 10), (123, 110)], c),
    "ring": lambda d, c: (d.ellipse((6, 6, 121, 121), c), d.ellipse((36, 36, 91, 91), (0, 0, 0, 0)))[0],
    "step": lambda d, c: (d.rectangle((10, 60, 117, 117), c), d.rectangle((60, 10, 117, 117), c))[0],
    "house": lambda d, c: (d.rectangle((20, 60, 107, 119), c), d.polygon([(6, 62), (64, 8), (121, 62)], "brown"))[0],
    "stripe": lambda d, c: (d.rectangle((8, 8, 119, 60), c), d.rectangle((8, 61, 119, 119), (240, 240, 240, 255)))[0],
    "moon": lambda d, c: (d.ellipse((6, 6, 121, 121), c), d.ellipse((46, 0, 150, 100), (0, 0, 0, 0)))[0],
    "post": lambda d, c: d.rectangle((30, 20, 60, 120), c),
}


def drawn_atlas() -> Atlas:
    """Shapes of two vendors, frames, and words in three fonts."""
    sprites = []
    for number, (name, draw) in enumerate(SHAPES.items()):
        for vendor, red in (("left", 40), ("right", 120)):
            image = Image.new("RGBA", (128, 128))
            draw(ImageDraw.Draw(image), (red, (37 * number) % 200 + 20, 250 - 15 * number, 255))
            sprites.append(Sprite(f"{vendor}/{name}", vendor, name, "thing", name, "shape", np.asarray(image)))
    words = draw_word_sprites(["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"], BUILT_IN_FONTS[:3])
    return Atlas.build([*sprites, *draw_frame_sprites(), *words])


def scene_source(atlas: Atlas, preset: str, **scene: object) -> SceneSource:
    config = SceneSourceConfig(atlas="emoji", preset=preset, scene=scene, image_size=SIDE, seed=SEED)
    return SceneSource(config, atlas, "scenes")


VARIANTS: dict[str, dict[str, object]] = {
    "looks": {"flip_probability": 0.5, "shape_jitter": 0.4, "colour_jitter": 0.3},
    "motion": {"motion_blur": 0.3},
    "wide": {"aspect_ratio": [3, 2]},
    "snapped": {"grid_size": 12, "num_backgrounds": 4, "repeat_probability": 0.5, "tint_probability": 1.0},
    "words": {"word_probability": 0.7, "inside_probability": 0.5},
    "test": {"combinations": "test"},
}


def measure_scenes(atlas: Atlas) -> dict[str, str]:
    """Layouts and pixels of every preset, and of some variants of one."""
    chosen: dict[str, tuple[str, dict[str, object]]] = {preset: (preset, {}) for preset in PRESETS}
    chosen |= {f"few {name}": ("few", scene) for name, scene in VARIANTS.items()}
    found = {"atlas": digest(atlas.table.id, atlas.table.names, atlas.table.plurals, atlas.table.aspect)}
    for name, (preset, scene) in chosen.items():
        made = scene_source(atlas, preset, **scene).render_indices(SCENES)
        found[name] = digest(*columns(made.scenes), made.pixels)
    return found


def measure_language(atlas: Atlas) -> dict[str, str]:
    """Questions, answers, captions, prompts, swaps and preferences: texts, and token ids of `mini`."""
    tokenizer = hub.load_tokenizer("mini")
    assert tokenizer.eos_token_id is not None
    found = {}
    source = scene_source(atlas, "mixed", repeat_probability=0.5, tint_probability=0.6, word_probability=0.2)
    for wordings in ("usual", "many"):
        words = SceneLanguage.build(
            atlas.table, max_objects=8, sprite_rows=source.sprite_rows, extra_templates=wordings == "many"
        )
        scenes, read = source.sample_scenes(SCENES), words.pieces.to_texts
        table = words.pieces.tokenize(tokenizer, [tokenizer.eos_token_id])

        def texts(rows: Tensor) -> tuple[Any, ...]:
            return read(rows), *table.to_ids(rows, 320, 0)  # noqa: B023

        for held_out in (False, True):
            for kind in QA_DRAFTERS:
                output = generate_questions(words, scenes, SEED, kind, held_out=held_out)
                parts = (output.label, output.box, output.valid, output.kind, output.template)
                found[f"{wordings} {kind} {held_out}"] = digest(texts(output.question), texts(output.answer), *parts)
            output = generate_conversations(words, scenes, SEED, held_out=held_out)
            found[f"{wordings} conversation {held_out}"] = digest(
                texts(output.question), texts(output.answer), output.valid
            )
            pair = generate_preference_pairs(words, scenes, SEED, held_out=held_out)
            found[f"{wordings} preference {held_out}"] = digest(
                texts(pair.true_caption), texts(pair.false_caption), pair.valid
            )
            for sort in SWAP_KINDS:
                pair = generate_swap_pairs(words, scenes, SEED, sort, held_out=held_out)
                found[f"{wordings} swap {sort} {held_out}"] = digest(
                    texts(pair.true_caption), texts(pair.false_caption), pair.valid
                )
            for kind in DRAWING_PROMPT_KINDS:
                one = generate_prompts_for_scenes(words, scenes, SEED, kind, held_out=held_out)
                found[f"{wordings} prompt {kind} {held_out}"] = digest(texts(one.text), *columns(one.spec), one.valid)
                one = generate_prompts(words, kind, 12, SEED, held_out=held_out)
                found[f"{wordings} prompts {kind} {held_out}"] = digest(texts(one.text), *columns(one.spec))
            made = generate_dense_prompts(words, scenes, SEED, held_out=held_out)
            found[f"{wordings} dense {held_out}"] = digest(*map(to_golden_graph, made.graphs))
    found["templates"] = digest(
        sorted(QA_DRAFTERS), sorted(DRAWING_PROMPT_KINDS), sorted(SWAP_KINDS), sorted(EXTRA_TEMPLATES)
    )
    return found


def measure_samples(atlas: Atlas) -> dict[str, Any]:
    """What training reads of scenes: questions, drawing prompts, caption pairs and written records."""
    source = scene_source(atlas, "few", repeat_probability=0.5, tint_probability=0.6)
    found: dict[str, Any] = {}
    for name, many, last in (("usual", False, "caption_long"), ("many", True, None)):
        torch.manual_seed(SEED)
        result = build_qa_dataset(source, 4, final_kind=last, extra_templates=many)
        found[f"questions {name}"] = digest(*result.sample_qa(SCENES), result.pieces.texts)
        found[f"drawing prompts {name}"] = digest(*result.sample_drawing_prompts(SCENES))
    torch.manual_seed(SEED)
    made = build_caption_source(source)
    for swapped in (False, True):
        found[f"captions {swapped}"] = digest(*made.make_batch(SCENES, swap_negatives=swapped))
    found["captions again"] = digest(made.resample_captions(SCENES))
    for held_out in (False, True):
        records = list(SceneAnnotator(source, num_questions=5, held_out=held_out).annotate(0, 12))
        found[f"records {held_out}"] = digest(
            *((one.key[9:], one.pixels, json.dumps(one.ground_truth)) for one in records)
        )
    torch.manual_seed(SEED)
    config = AugmentationConfig(
        crop_area=(0.6, 1.4),
        max_aspect_ratio=1.25,
        max_shift=0.5,
        max_rotation=12,
        flip_probability=0.5,
        colour_jitter=0.2,
        log_gamma=(-0.1, 0.1),
        blur_probability=0.3,
        sharpness=(-0.7, 0.5),
        max_noise=0.03,
        erase_probability=0.3,
        grayscale_probability=0.2,
        recolour_probability=0.2,
        background_probability=0.7,
    )
    found["views"] = floats(augment_images(source.pixels(SCENES), config, (32, 32)), 32)
    return found


def measure_splits(folder: Path) -> dict[str, str]:
    """The order of samples, permutations, windows of text, and episodes of the pocket world."""
    found = {"permutation": digest(*(permute_index(item, 1000, SEED) for item in range(200)))}
    mixture = MixtureConfig(
        weights={"a": 3, "b": 1, "c": 0.5}, final_weights={"a": 1, "b": 1, "c": 2}, anneal_samples=2000
    )
    order = MixtureSampler(mixture, {"a": 700, "b": 90, "c": 31}, SEED)
    found["order"] = digest(*(tuple(order[index]) for index in range(0, 3000, 7)))
    tokenizer = hub.load_tokenizer("mini")
    text = "\n".join(f"line {number} of {number * number} in a text that is split" for number in range(4000))
    (folder / "text.txt").write_text(text)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {n} ends"}) + "\n" for n in range(200)))
    for part in ("train", "test"):
        files = (str(folder / "text.txt"), str(folder / "texts.jsonl"))
        windows = TextSource(TextSourceConfig(files=files, window_length=32, split=part), tokenizer)
        found[f"text {part}"] = digest(windows.ids, len(windows))
    known = [
        ImageRecord(id=f"{vendor}/{n}", vendor=vendor, key=f"1f{n:03x}", name=f"thing {n}", category="objects")
        for vendor in ("twemoji", "noto")
        for n in range(150)
    ]
    exact = np.arange(len(known), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for kind, more in (("concepts", {"test_fraction": 0.2, "seed": SEED}), ("vendor", {"vendor": "noto"})):
        parts = split_images(known, kind, type(compute_fingerprints())(exact, exact), **more)
        found[f"split {kind}"] = digest(*parts)
    record_episodes(
        RecordConfig(world="pocket", seed=SEED, steps=24, image_size=16), folder / "episodes", episodes=6, quiet=True
    )
    episodes = EpisodeDataset(folder / "episodes")
    found["episodes"] = digest(*((one.frames, one.actions, one.rewards) for one in episodes))
    return found


# ---- recipes and results ----------------------------------------------------------------------------------------


def measure_recipes() -> dict[str, str]:
    """The numbers of every recipe as it is read, with all defaults, and the sizes of the models that it describes."""
    found = {}
    for name in (*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()):
        read = recipe.load_recipe(name)
        found[name] = digest_numbers(read.to_dict())
        if read.model.config is not None:
            with torch.device("meta"):
                model = MODELS[read.model.kind](read.build_model_config())
            found[name] += f" {sum(p.numel() for p in model.parameters())}"
    return found


def measure_results() -> dict[str, str]:
    """Every number of every results file, whatever its key is called."""
    files = sorted((ROOT / "results").rglob("*.json"))
    return {str(file.relative_to(ROOT)): digest_numbers(json.loads(file.read_text())) for file in files}


# ---- data that is fetched ---------------------------------------------------------------------------------------


def measure_emoji() -> dict[str, Any]:
    """Scenes, language and samples of the real atlas, pictures with names, and their splits."""
    atlas = open_atlas("emoji")
    found: dict[str, Any] = {"sprites": len(atlas.table.id), "ids": digest(*atlas.table.id)}
    for preset in ("mixed", "few", "drawing", "words"):
        made = scene_source(atlas, preset, vendors=["noto", "openmoji"], flip_probability=0.5).render_indices(SCENES)
        found[preset] = digest(*columns(made.scenes), made.pixels)
    hundred = scene_source(atlas, "few", vendors=["twemoji"], things=["hundred"])
    found["hundred"] = digest(*columns(hundred.render_indices(SCENES).scenes), hundred.sprite_rows)
    torch.manual_seed(SEED)
    result = build_qa_dataset(hundred, 4, final_kind="caption_long", extra_templates=True)
    found["questions"] = digest(*result.sample_qa(SCENES), result.pieces.texts)
    found["drawing prompts"] = digest(*result.sample_drawing_prompts(SCENES))
    config = NamedImagesConfig(
        datasets=("noto", "twemoji"), include_categories=("animals-nature", "food-drink"), image_size=32, trim=True
    )
    named = NamedImageSource(config, "named")
    found["named"] = digest(named.fingerprint, named.sample_texts(SCENES), named.concepts)
    sets = [open_images(vendor) for vendor in ("noto-v1", "emojione")]
    known, looks = collect_records(*sets), compute_fingerprints(*sets)
    found["prints"] = digest(*looks)
    for kind, more in (("concepts", {"seed": SEED}), ("vendor", {"vendor": "emojione"})):
        found[f"split {kind}"] = digest(*split_images(known, kind, looks, **more))
    return found


# ---- training ---------------------------------------------------------------------------------------------------

LOSSES = 20  # steps

SMALL = {"batch_size": "8", "steps": str(LOSSES), "num_workers": "0", "compile": "false", "validate": "[]"}
SMALL |= {"validate_every": "0", "validate_first": "false", "gradient_accumulation_steps": "1"}
SMALL |= {"dtype": "float32", "schedule": "{ kind = 'constant' }"}
MINI = {
    "tokenizer": {"checkpoint": "mini"},
    "model.parts.codec": {"checkpoint": "mini", "part": "codec"},
    "model.config.decoder.layers": "2",
}
MINI_SOURCES = {
    "learn": {"read": 1, "words": 1, "older": 1, "named": 1, "draw": 4},
    "finetune": {"few": 2, "counts": 1, "few-older": 1, "drawn": 1, "draw": 3},
    "anneal": {"few-looks": 2, "counts-looks": 1, "older-looks": 1, "flat-looks": 1, "draw": 3},
}
MINI_VLM_PARTS = ("tower", "connector", "position_embedding", "decoder")
MINI_VLM_SOURCES = {
    "tune": {"scenes": 4, "emoji": 1, "text": 2},
    "replay": {"lettered": 4, "emoji": 1, "text": 2},
    "anneal": {"lettered": 2, "few": 2, "few-older": 1, "few-flat": 1, "text": 1},
}


def losses_of(name: str, stage: int, weights: dict[str, float], changes: dict[str, Any], out: Path) -> list[float]:
    """The training losses of one stage of a recipe, at a small batch."""
    whole = recipe.load_recipe(name)
    changes = {**changes, **{f"stages.0.{key}": value for key, value in SMALL.items()}}
    changes["stages.0.mixture"] = {"weights": weights}
    plain = json.loads(json.dumps(whole.to_dict()))
    plain["stages"] = plain["stages"][stage : stage + 1]
    plain["sources"] = {key: value for key, value in plain["sources"].items() if key in weights}
    for source in plain["sources"].values():
        if source["kind"] == "named":
            source["datasets"] = source["datasets"][:1]
    for key, value in changes.items():
        set_by_path(plain, key, value)
    chosen = recipe.Recipe.from_dict(plain)
    recipe.train_recipe(chosen, out / "run", device="cpu", quiet=True)
    log = next((out / "run").glob("*/log.jsonl"))
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def measure_mini_losses(out: Path) -> dict[str, list[float]]:
    found = {}
    for stage, (name, weights) in enumerate(MINI_SOURCES.items()):
        (out / name).mkdir()
        found[name] = losses_of("mini", stage, weights, dict(MINI), out / name)
    return found


def measure_mini_vlm_losses(out: Path) -> dict[str, list[float]]:
    parts = {f"model.parts.{part}": {"checkpoint": "mini-vlm"} for part in MINI_VLM_PARTS}
    found = {}
    for stage, (name, weights) in enumerate(MINI_VLM_SOURCES.items()):
        (out / name).mkdir()
        found[name] = losses_of("mini-vlm", stage, weights, dict(parts), out / name)
    return found


def measure_smoke_losses(out: Path) -> list[float]:
    """A text model from random weights, with a tokenizer trained on the spot."""
    return losses_of("smoke", 0, {"docs": 1}, {"tokenizer.vocab_size": "300", "sources.docs.window_length": "64"}, out)


# ---- shipped models ---------------------------------------------------------------------------------------------


def measure_mini() -> dict[str, Any]:
    """Answers, captions, codes, likelihoods and drawings of `mini`."""
    unified_pipeline = UnifiedPipeline.load("mini", device="cpu", dtype=torch.float32)
    scenes = load_examples()
    files = [scene.file for scene in scenes]
    ids = unified_pipeline.tokenize(files)
    asked = [(scene.file, one["question"], [one["answer"], "no", "two"]) for scene in scenes for one in scene.questions]
    drawn = unified_pipeline.draw_ids(["two dogs", "a red apple left of a cat"], seed=3, steps=6)
    sampled = unified_pipeline.ask(files[0], asked[0][1], temperature=0.8, seed=5)
    kept = torch.zeros(1, *ids.shape[1:], dtype=torch.bool)
    kept[:, :6] = True
    return {
        "ids": digest(ids),
        "answers": [unified_pipeline.ask(file, question) for file, question, _ in asked],
        "sampled": sampled,
        "captions": unified_pipeline.caption(files),
        "drawn": digest(drawn),
        "drawn in part": digest(unified_pipeline.draw_ids(["a cat"], seed=4, steps=4, fixed_codes=(ids[:1], kept))),
        "drawn away": digest(
            unified_pipeline.draw_ids(["a fish"], seed=4, steps=4, negative_prompt="two dogs", guidance_scale=2.0)
        ),
        "pixels": floats(unified_pipeline.model.decode_pixels(ids[:2])),
        "embedding": floats(unified_pipeline.embed_images(files)),
        "likelihoods": [value for row in unified_pipeline.loglikelihoods(asked[:4]) for value in row],
        "parameters": sum(p.numel() for p in unified_pipeline.model.parameters()),
    }


def measure_mini_vlm() -> dict[str, Any]:
    """Answers, likelihoods and image features of `mini-vlm`."""
    chat_pipeline = ChatPipeline.load("mini-vlm", device="cpu")
    scenes = load_examples()
    asked = [(scene.file, one["question"], [one["answer"], "no", "two"]) for scene in scenes for one in scene.questions]
    files, questions = [one[0] for one in asked], [one[1] for one in asked]
    first = chat_pipeline.build_prompt([chat_pipeline.build_message(files[0], questions[0])])
    return {
        "dtype": str(next(chat_pipeline.model.parameters()).dtype),
        "answers": chat_pipeline.ask_batch(files, questions, max_new_tokens=24),
        "chat": chat_pipeline.ask(
            files[0], questions[0], max_new_tokens=12, sampling=SamplingConfig(temperature=0.8, seed=5)
        ),
        "text alone": chat_pipeline.ask([], "What is red?", max_new_tokens=12),
        "tokens": len(first.stream),
        "likelihoods": [value for row in chat_pipeline.loglikelihoods(asked[:6]) for value in row],
        "parameters": sum(p.numel() for p in chat_pipeline.model.parameters()),
    }


def measure_mini_world() -> dict[str, Any]:
    """Codes, frames and logits of `mini-world`, in float64: rounding differs between processors."""
    shipped = vitrail.load("mini-world", device="cpu")
    world = WorldPipeline(hub.load("mini-world", dtype=torch.float64), shipped.start_images, shipped.controls)
    actions = [world.controls.codes[name] for name in ("right", "right", "right up", "nothing", "left")]
    frames = world.generate_frames(actions, seed=3, temperature=0.0)
    greedy = world.generate_frames(actions, seed=3, temperature=0.0, steps=1)
    ids = world.tokenize(list(world.start_images[:4].numpy()))
    shifted_actions = torch.full((4, 1), world.model.num_actions)
    with torch.no_grad():
        logits = world.model.dynamics(ids[:, None], shifted_actions).float()
    return {
        "codes": sorted(world.controls.codes.values()),
        "ids": digest(ids),
        "greedy frames": digest(*(np.asarray(frame) for frame in frames)),
        "greedy frames in one step": digest(*(np.asarray(frame) for frame in greedy)),
        "logits": floats(logits),
        "parameters": sum(p.numel() for p in world.model.parameters()),
    }


def measure_judge() -> dict[str, Any]:
    """What the detector finds in the example scenes."""
    detector = hub.load("judge", dtype=torch.float32).eval()
    side = detector.config.image.image_size
    files = [Image.open(scene.file).convert("RGB").resize((side, side)) for scene in load_examples()]
    pixels = torch.stack([torch.from_numpy(np.array(file)).permute(2, 0, 1) for file in files])
    with torch.no_grad():
        found = detector.detect_objects(normalize_images(pixels), threshold=0.2)
    return {
        "count": found.count.tolist(),
        "concepts": digest(found.concept),
        "colours": digest(found.colour),
        "scores": floats(found.score),
        "boxes": floats(found.box),
    }


# ---- all of it --------------------------------------------------------------------------------------------------


def with_atlas(measure: Callable[[Atlas], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: measure(drawn_atlas())


def without_folder(measure: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda folder: measure()


#: name → the measurement, given an empty folder; FETCHED names the sources that must be there
MEASUREMENTS: dict[str, Callable[[Path], Any]] = {
    "scenes": with_atlas(measure_scenes),
    "language": with_atlas(measure_language),
    "samples": with_atlas(measure_samples),
    "splits": measure_splits,
    "recipes": without_folder(measure_recipes),
    "results": without_folder(measure_results),
    "mini-world": without_folder(measure_mini_world),
    "judge": without_folder(measure_judge),
    "mini": without_folder(measure_mini),
    "mini-vlm": without_folder(measure_mini_vlm),
    "emoji": without_folder(measure_emoji),
    "smoke losses": measure_smoke_losses,
    "mini losses": measure_mini_losses,
    "mini-vlm losses": measure_mini_vlm_losses,
}
FETCHED = {
    "emoji": (*EMOJI, *MORE_EMOJI),
    "mini losses": (*EMOJI, *MORE_EMOJI),
    "mini-vlm losses": (*EMOJI, *MORE_EMOJI),
}
