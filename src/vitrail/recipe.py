"""A recipe: a TOML of parts and stages, read, checked as a whole, and only then built."""

import hashlib
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn

from vitrail import hub
from vitrail.backbones.decoder import Decoder
from vitrail.config import Config, lay
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.episodes.source import EpisodesConfig, EpisodeSource
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.text import TextConfig, TextWindows, read_text
from vitrail.devices import usable
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import pictures
from vitrail.hub.based import checksum, checksum_words
from vitrail.hub.configs import resolve
from vitrail.hub.families import MODELS
from vitrail.hub.packages import PACKAGES
from vitrail.models.named import fill_model, spell_out
from vitrail.processing.text import Tokenizer
from vitrail.tasks_known import TASKS, Sources
from vitrail.train import distributed
from vitrail.train.lora import LoRAConfig, add_lora, merge
from vitrail.train.optim import group_parameters
from vitrail.train.schedule import Constant
from vitrail.train.stage import StageConfig, choose_trainable
from vitrail.train.trainer import Trainer

END = "<|endoftext|>"  # of a tokenizer that is trained here


class StartPart(Config):
    """Where a part of the model starts from: a part of another one, by the same name unless told; "" is all of it. What
    of it is `fresh` is not taken."""

    start: str
    part: str | None = None
    fresh: tuple[str, ...] = ()


class ModelPart(Config):
    """A model by its config, or one that `hub.load` knows, to start from. `parts` start from parts of others.

    In a recipe a vision-language model may have a `preset`, with `config` laid over it (`vitrail.models.named`); what
    is read has the whole config, so that a run goes on with what it began with.
    """

    kind: str = "decoder"
    config: dict[str, Any] | None = None
    start: str | None = None
    parts: dict[str, StartPart] = {}

    def __post_init__(self) -> None:
        if (self.config is None) == (self.start is None):
            raise ConfigError("a model has a config or a start", "give [model.config], or start = a name or folder")


class TokenizerPart(Config):
    """A tokenizer from a folder or a model's name, or one trained on the recipe's training text and captions.

    `specials` are words of one trained here besides its end, whose ids follow that of the end: 1, 2, …
    """

    start: str | None = None
    train: int | None = None  # size of the vocabulary
    specials: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.start is None) == (self.train is None):
            raise ConfigError("a tokenizer is loaded or trained", "give start = a folder, or train = a vocabulary size")
        if self.specials and self.train is None:
            raise ConfigError("specials of a tokenizer that is loaded", "leave them out: it has its own")


SourceConfig = TextConfig | ScenesConfig | NamedConfig | EpisodesConfig | ConversationsConfig


class Recipe(Config):
    name: str
    says: str
    model: ModelPart
    sources: dict[str, SourceConfig]
    stages: tuple[StageConfig, ...]
    tokenizer: TokenizerPart | None = None
    seed: int = 0
    lora: LoRAConfig | None = None

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        return super().read({**data, "model": fill_model(data["model"])} if "model" in data else data)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError(f"recipe {self.name!r} has no stage", "add a [[stages]] table")
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ConfigError(f"recipe {self.name!r} has two stages of one name: {names}")
        for i, stage in enumerate(self.stages):
            if stage.task not in TASKS:
                raise ConfigError(f"stages[{i}].task is {stage.task!r}", f"known: {', '.join(TASKS)}")
            self.settings(i)
            kind = TASKS[stage.task]
            if stage.compile and not kind.even:
                raise ConfigError(
                    f"stages[{i}] is to be compiled, and every batch of the task {stage.task!r} has another shape",
                    "leave compile out",
                )
            for key, wanted in (("mixture.weights", stage.mixture.weights), ("judge", stage.judge)):
                for source in wanted:
                    if source not in self.sources:
                        raise ConfigError(
                            f"stages[{i}].{key} names {source!r}, which is no source",
                            f"sources: {', '.join(self.sources)}",
                        )
                    if not isinstance(self.sources[source], kind.sources):
                        kinds = " or ".join(str(config.__struct_config__.tag) for config in kind.sources)
                        raise ConfigError(
                            f"stages[{i}].{key} names {source!r}, which the task {stage.task!r} cannot read",
                            f"it reads sources of kind {kinds}",
                        )
        if self.tokenizer is None and any(isinstance(source, TextConfig) for source in self.sources.values()):
            raise ConfigError(f"recipe {self.name!r} reads text and has no tokenizer", "add a [tokenizer] table")
        if self.model.kind not in MODELS:
            raise ConfigError(f"model.kind is {self.model.kind!r}", f"known: {', '.join(MODELS)}")
        if self.lora is not None and any("*" in stage.train for stage in self.stages):
            raise ConfigError(
                f"recipe {self.name!r} adds LoRA, and a stage trains every weight",
                'set train = ["*.lora"] in its stages',
            )
        if self.model.config is not None:
            self._check_parts(self.model_config())

    def settings(self, i: int) -> Config:
        """What the i-th stage's task takes besides its sources."""
        try:
            return TASKS[self.stages[i].task].settings.read(self.stages[i].settings)
        except ConfigError as error:
            raise ConfigError(f"stages[{i}].settings: {error.problem}", error.remedy) from None

    def model_config(self) -> Config:
        try:
            return MODELS[self.model.kind][0].read(self.model.config)
        except ConfigError as error:
            raise ConfigError(f"model.config: {error.problem}", error.remedy) from None

    def _check_parts(self, config: Any) -> None:
        """What needs the model's names is checked on one without weights."""
        _check_vocabulary(config, 0 if self.tokenizer is None else self.tokenizer.train or 0)
        with torch.device("meta"):
            model = MODELS[self.model.kind][1](config)
        if self.lora is not None:
            add_lora(model, self.lora)
        self.check_stages(model)

    def check_stages(self, model: nn.Module) -> None:
        """Every stage's task and names are those of the model, before the first is trained."""
        for stage in self.stages:
            wanted = TASKS[stage.task].model
            if not isinstance(model, wanted):
                kinds = " or a ".join(kind.__name__ for kind in (wanted if isinstance(wanted, tuple) else (wanted,)))
                raise ConfigError(
                    f"stage {stage.name!r}: the task {stage.task!r} trains a {kinds}, and the model is a "
                    f"{type(model).__name__}",
                    "change the task, or model.kind",
                )
            choose_trainable(model, stage.train)
            group_parameters(model, stage.optim)
            decoder = getattr(model, "decoder", model)
            context = decoder.config.context if isinstance(decoder, Decoder) else None
            for name in (*stage.mixture.weights, *stage.judge):
                source = self.sources[name]
                if isinstance(source, TextConfig) and context is not None and source.length > context:
                    raise ConfigError(
                        f"texts of {source.length:,} tokens for a model that was made for {context:,}",
                        f"set sources.{name}.length to {context} or less, or the model's context to more",
                    )


# ---- reading ----------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where the recipes lie: inside an installed package, or beside the sources."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "recipes"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def untested() -> list[str]:
    """Recipes that can be trained, of which no result is kept."""
    return sorted(f"untested/{path.stem}" for path in (folder() / "untested").glob("*.toml"))


def read(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by name or file, with changes laid over it: dotted keys, and values as they are or, in text, as TOML."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = folder() / f"{name_or_path}.toml"
    if not path.is_file():
        if Path(name_or_path).exists():
            raise ConfigError(f"{name_or_path} is no recipe", "recipes are .toml files")
        raise ConfigError(
            f"no recipe {str(name_or_path)!r}", f"known: {', '.join((*names(), *untested()))}; or give a .toml file"
        )
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    for key, value in (overrides or {}).items():
        spell_out(data.get("model"))  # a key may lead into a part that a name stands for
        lay(data, key, value)
    return Recipe.read(data)


# ---- building and running ---------------------------------------------------------------------------------------


def tiny(recipe: Recipe) -> Recipe:
    """The same recipe at one step of two samples: what a test of every recipe runs."""
    stages = tuple(
        stage.with_(
            steps=1, batch=2, accumulate=1, schedule=Constant(), judge=(), judge_every=0, workers=0, compile=False
        )
        for stage in recipe.stages
    )
    return recipe.with_(stages=stages)


def begun(recipe: Recipe, since: str, start: str) -> Recipe:
    """What is left of a recipe from a stage on, for a model that has been through those before: out/STAGE/final of a
    run that stopped behind one. Weights are all that stages hand on: it ends where one that never stopped does."""
    left = recipe.stages[_place(recipe, since) :]
    read = {name for stage in left for name in (*stage.mixture.weights, *stage.judge)}
    return recipe.with_(
        stages=left,
        model=ModelPart(kind=recipe.model.kind, start=start),
        tokenizer=None if recipe.tokenizer is None else TokenizerPart(start=start),
        sources={name: source for name, source in recipe.sources.items() if name in read},
    )


def starting_from(recipe: Recipe, places: Mapping[str, str]) -> Recipe:
    """The same recipe, its starts looked for in other places."""
    model, words = recipe.model, recipe.tokenizer
    parts = {name: part.with_(start=places.get(part.start, part.start)) for name, part in model.parts.items()}
    model = model.with_(parts=parts, start=places.get(model.start or "", model.start))
    if words is not None:
        words = words.with_(start=places.get(words.start or "", words.start))
    return recipe.with_(model=model, tokenizer=words)


# What may change between a start and the next without changing what is learned.
HOW = ("workers", "save_every", "judge", "judge_every", "judge_first", "compile", "recompute")


def started_from(recipe: Recipe) -> dict[str, str]:
    """What starts → the model that its weights or words start from."""
    model, words = recipe.model, recipe.tokenizer
    named = {"the model": model.start, "the tokenizer": None if words is None else words.start}
    named |= {name: part.start for name, part in model.parts.items()}
    return {what: start for what, start in named.items() if start is not None}


def refuse_untrained(recipe: Recipe) -> None:
    """What another recipe leaves in its folder, and has not yet, is named with the command that makes it."""
    known = {name.rpartition("/")[2]: name for name in (*names(), *untested())}
    for what, start in started_from(recipe).items():
        path = Path(start)
        if path.name == "final" and not path.exists() and path.parent.name in known:
            raise ConfigError(
                f"{what} starts from {start}, which is not there",
                f"train it first: vitrail train {known[path.parent.name]} --out {path.parent}",
            )


def starts(recipe: Recipe) -> dict[str, str]:
    """Every model that weights or words start from, with a digest of what it holds: one that is trained anew is
    another. What a package holds is pinned, and not fetched to be told."""
    found = {}
    for start in sorted(set(started_from(recipe).values())):
        if start in PACKAGES and not Path(start).exists():
            found[start] = " ".join(part.sha256 for part in PACKAGES[start].parts)
        else:
            path = resolve(start)
            found[start] = f"{checksum(path)} {checksum_words(path)}"
    return found


def identity(recipe: Recipe, sources: Sources) -> str:
    """What a run must share with the one it goes on from: the recipe, its starts, and what its sources hold."""
    plain: dict[str, Any] = {**recipe.plain(), **({"starts": found} if (found := starts(recipe)) else {})}
    plain["stages"] = [{k: v for k, v in stage.items() if k not in HOW} for stage in plain["stages"]]
    plain["sources"] = {name: (plain["sources"][name], source.fingerprint) for name, source in sources.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def train(
    recipe: Recipe, out: Path, *, until: str | None = None, device: str | None = None, quiet: bool = False
) -> nn.Module:
    """Run every stage in turn; the end's weights are in out/final. The same call goes on where it stopped. With
    `until` it stops behind a stage, whose weights are then in out/STAGE/final; without, it goes on.

    Under torchrun the processes share the work, and any number of them can go on with what others began; the model that
    comes back is whole in the first of them, and in shards in the others.
    """
    final = kept_in(recipe, out, until)
    stages = recipe.stages if until is None else recipe.stages[: 1 + _place(recipe, until)]
    refuse_untrained(recipe)
    device = usable(device)
    out.mkdir(parents=True, exist_ok=True)
    with distributed.joined(device):
        shown = None
        if distributed.rank() == 0:  # what is made once, by one
            shown = _pictures(recipe)
            _tokenizer(recipe, out, shown)
        distributed.wait()
        shown = _pictures(recipe) if shown is None else shown
        words = _tokenizer(recipe, out, shown)
        sources = {name: shown.get(name) or _text(config, words) for name, config in recipe.sources.items()}
        model = _model(recipe, words)
        recipe.check_stages(model)
        more = {"seed": recipe.seed, "device": device, "identity": identity(recipe, sources), "quiet": quiet}
        spoken = words  # with the way that a task speaks to the model, where it has one
        for i, stage in enumerate(stages):
            task = TASKS[stage.task].make(model, _named(sources, stage), words, recipe.settings(i))
            spoken = getattr(task, "spoken", spoken)
            trainer = Trainer(stage, task, sources, out / stage.name, **more)
            trainer.train()
            if distributed.size() > 1:  # the next stage shares the weights out anew; the end is for one alone
                wanted = stage is not stages[-1] or distributed.rank() == 0
                whole = _model(recipe, words) if wanted else None
                distributed.put_together(model, whole, trainer.optimizer.masters())
                model = model if whole is None else whole
        if distributed.rank() == 0:
            if recipe.lora is not None:
                merge(model)
            _keep(model, final, spoken)
        distributed.wait()
    return model


def kept_in(recipe: Recipe, out: Path, until: str | None = None) -> Path:
    """The folder that a run's weights are in when it ends, or when it stops behind a stage."""
    if until is None or _place(recipe, until) == len(recipe.stages) - 1:
        return out / "final"
    return out / until / "final"


def _place(recipe: Recipe, stage: str) -> int:
    names = [one.name for one in recipe.stages]
    if stage not in names:
        raise ConfigError(f"recipe {recipe.name!r} has no stage {stage!r}", f"stages: {', '.join(names)}")
    return names.index(stage)


def _pictures(recipe: Recipe) -> Sources:
    """The sources that show something."""
    shown: Sources = {}
    atlas = cache(open_atlas)  # sources of one atlas share what is made of it
    for name, config in recipe.sources.items():
        if isinstance(config, ScenesConfig):
            shown[name] = SceneSource(config, atlas(config.atlas), name)
        elif isinstance(config, NamedConfig):
            shown[name] = NamedSource(config, name)
        elif isinstance(config, EpisodesConfig):
            shown[name] = EpisodeSource(config)
        elif isinstance(config, ConversationsConfig):
            shown[name] = ConversationSource(config, name)
    return shown


def _text(config: SourceConfig, words: Tokenizer | None) -> TextWindows:
    assert isinstance(config, TextConfig) and words is not None
    return TextWindows(config, words)


def _tokenizer(recipe: Recipe, out: Path, shown: Sources) -> Tokenizer | None:
    part = recipe.tokenizer
    if part is None:
        return None
    if part.start is not None:
        return hub.tokenizer(part.start)
    sources = [source for source in recipe.sources.values() if isinstance(source, TextConfig)]
    texts = [read_text(source) for source in sources if source.part == "train"]
    told = {
        name: TASKS[stage.task].told
        for stage in recipe.stages
        for name in stage.mixture.weights
        if TASKS[stage.task].told is not None  # a later stage may show the same pictures without a word
    }
    for name, source in shown.items():
        if (pieces := told.get(name)) is not None:
            texts += pieces(source).texts[1:]
    made_of = hashlib.sha256(repr((part.train, texts, *part.specials)).encode()).hexdigest()
    kept, note = out / "tokenizer", "made-of"
    if not (kept / note).is_file() or (kept / note).read_text() != made_of:
        assert part.train is not None
        partial = out / ".partial-tokenizer"
        shutil.rmtree(partial, ignore_errors=True)
        Tokenizer.train(texts, part.train, specials=(END, *part.specials), eos=END).save(partial)
        (partial / note).write_text(made_of)
        shutil.rmtree(kept, ignore_errors=True)
        partial.rename(kept)
    return Tokenizer.load(kept)


def _keep(model: nn.Module, folder: Path, words: Tokenizer | None) -> None:
    try:
        hub.save(getattr(model, "product", model), folder, words)  # without what only training needs
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the end's weights could not be written to {folder}: {error}",
            "make room and start the same command again; the last checkpoint is whole",
        ) from error


def _named(sources: Sources, stage: StageConfig) -> Sources:
    """The sources a stage reads."""
    return {name: sources[name] for name in (*stage.mixture.weights, *stage.judge)}


def _model(recipe: Recipe, words: Tokenizer | None) -> Any:
    """The model as a stage finds it: from its start or its seed, with adapters where the recipe has them."""
    torch.manual_seed(recipe.seed)
    part = recipe.model
    if part.start is not None:
        model = hub.load(part.start, dtype=torch.float32)
        if (tower := pictures.tower_of(model)) is not None:
            pictures.read_as(model, tower, pictures.OURS)  # it will be trained on views, whatever it was prepared for
    else:
        model = MODELS[part.kind][1](recipe.model_config())
        for name in getattr(model, "borrowed", ()):
            if name not in part.parts:
                raise ConfigError(f"the model's {name} would be left to chance", f"add a [model.parts.{name}] table")
    for name, other in part.parts.items():
        _start(model, name, other)
    if words is not None:
        _check_vocabulary(model.config, words.size)
    return model if recipe.lora is None else add_lora(model, recipe.lora)


# What a part may have that the one it starts from has not: of a tower, and of a decoder what pictures reach it by.
FRESH = ("mask", "head", "pooler", "fusion")


def _start(model: nn.Module, name: str, other: StartPart) -> None:
    """Put weights of another model's part into one of this model's."""
    whole = hub.load(other.start, dtype=torch.float32)
    try:
        mine, theirs = model.get_submodule(name), whole.get_submodule(name if other.part is None else other.part)
    except AttributeError as error:
        raise ConfigError(f"model.parts.{name}: {error}", f"does {other.start} have such a part?") from None
    pictures.see_alike(model, mine, whole, theirs, other.fresh)
    have = {key: tensor for key, tensor in mine.state_dict().items() if key.split(".")[0] not in other.fresh}
    for part in other.fresh:
        if not hasattr(mine, part):
            raise ConfigError(f"model.parts.{name}.fresh names {part!r}, which it has not", "leave it out")
    give = theirs.state_dict()
    alone = sorted(key for key in have if key not in give)
    for key in (key for key in have if key.split(".")[0] not in FRESH or key not in alone):
        if key in alone or have[key].shape != give[key].shape:
            theirs_is = "missing there" if key in alone else f"of {tuple(give[key].shape)} there"
            raise ConfigError(
                f"model.parts.{name} cannot start from {other.start}: {key} is {theirs_is}",
                f'give both the same config, or leave it to chance: fresh = ["{key.split(".")[0]}"]',
            )
    mine.load_state_dict({key: give[key] for key in have if key in give}, strict=False)
    if isinstance(mine, Decoder) and any(key.startswith("fusion.") for key in alone):
        mine.fuse(mine.config.fusion)  # made anew of the weights that are there now
    if alone:
        fresh = dict.fromkeys(key.split(".")[0] for key in alone)
        sys.stderr.write(f"{name} starts from {other.start} but for {', '.join(fresh)}\n")


def _check_vocabulary(config: Any, size: int) -> None:
    part = next((name for name in ("text", "decoder") if hasattr(config, name)), "")
    vocab = getattr(getattr(config, part, config), "vocab", size)
    if vocab < size:
        raise ConfigError(
            f"the model knows {vocab} tokens and the tokenizer has {size}",
            f"set model.config.{part + '.' if part else ''}vocab to {size} or more",
        )
