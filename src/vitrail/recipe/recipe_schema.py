"""The schema of recipes: a model, its tokenizer, its data sources and the stages that train it.

A recipe is checked completely before any data is read or any weight is allocated.
"""

from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder
from vitrail.config import Config, Seed, check_name, make_registered_type
from vitrail.data.source_spec import DataSourceSpec
from vitrail.errors import ConfigError, ConfigKeyError, suggest_name
from vitrail.models.preset_expansion import expand_model_presets
from vitrail.registry import DATA_SOURCES, MODELS, TASKS
from vitrail.training.lora import LoRAConfig, add_lora
from vitrail.training.optimizer import build_param_groups
from vitrail.training.stage_config import StageConfig, set_trainable_parts


class PretrainedPartConfig(Config):
    """Pretrained weights of one part of the model.

    checkpoint    the model that the weights come from
    part          the part of that model; the same name by default, "" is the whole model
    reinitialize  sub-modules of the part that keep their random initialization
    upcycle       copy the MLPs of a dense model to all experts of a mixture of experts (sparse upcycling); routers keep
                  their random initialization
    """

    checkpoint: str
    part: str | None = None
    reinitialize: tuple[str, ...] = ()
    upcycle: bool = False


class ModelConfig(Config):
    """The model: either a `config` or a `checkpoint` that `hub.load` accepts.

    `parts` are loaded from other checkpoints. A vision-language model may name a `preset`, which `config` overrides
    (see `vitrail.models.preset_expansion`). The recipe stores the expanded config, so a resumed run does not depend on
    later changes of a preset.

    kind        kind of the model, such as vlm, codec or genie
    config      config of that kind
    checkpoint  a folder, the name of a bundled model or a hub id to start from
    parts       name of a part → the checkpoint that it starts from
    """

    kind: str = "decoder"
    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    parts: dict[str, PretrainedPartConfig] = {}

    def __post_init__(self) -> None:
        if (self.config is None) == (self.checkpoint is None):
            raise ConfigError(
                "a model needs either a config or a checkpoint",
                "add [model.config], or set checkpoint = a model name or folder",
            )


class TokenizerConfig(Config):
    """A tokenizer: either that of a `checkpoint`, or one of `vocab_size` trained on the recipe's texts and captions.

    checkpoint      a folder, the name of a bundled model or a hub id
    vocab_size      size of the vocabulary to train
    special_tokens  tokens added to a trained tokenizer. Their ids follow the id of the end token: 1, 2, …
    """

    checkpoint: str | None = None
    vocab_size: int | None = None
    special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.vocab_size is None):
            raise ConfigError(
                "a tokenizer needs either a checkpoint or a vocab_size",
                "set checkpoint = a folder to load one, or vocab_size to train one",
            )
        if self.special_tokens and self.vocab_size is None:
            raise ConfigError(
                "tokenizer.special_tokens is set for a tokenizer that is loaded",
                "remove special_tokens: a loaded tokenizer has its own",
            )


if TYPE_CHECKING:
    SourceConfig: TypeAlias = Config
else:
    SourceConfig = make_registered_type(DATA_SOURCES, Config, lambda spec: spec.config)


def get_source_spec(config: Config) -> DataSourceSpec:
    """Return the specification of a source by its config."""
    return DATA_SOURCES[str(config.__struct_config__.tag)]


class Recipe(Config):
    """A model, its tokenizer, its data sources and the stages that train it.

    name         name of the recipe
    description  one line about the recipe
    model        the model
    sources      name → data source
    stages       stages of the training, in their order
    tokenizer    the tokenizer, for models with text
    seed         seed of the weights, the data order and the random numbers of a step
    lora         low-rank adapters
    """

    name: str
    description: str
    model: ModelConfig
    sources: dict[str, SourceConfig]
    stages: tuple[StageConfig, ...]
    tokenizer: TokenizerConfig | None = None
    seed: Seed = 0
    lora: LoRAConfig | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return super().from_dict({**data, "model": expand_model_presets(data["model"])} if "model" in data else data)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError(f"recipe {self.name!r} has no stages", "add a [[stages]] table")
        check_name(self.name, "name")
        for source in self.sources:
            check_name(source, "a name under sources")
        names = [stage.name for stage in self.stages]
        if len({name.lower() for name in names}) != len(names):  # the names are folders, which may ignore the case
            raise ConfigError(f"recipe {self.name!r} has two stages with the same name: {names}", "rename one of them")
        for i, stage in enumerate(self.stages):
            if stage.task not in TASKS:
                remedy = suggest_name(stage.task, TASKS, TASKS.describe())
                raise ConfigError(f"stages.{i}.task: there is no task {stage.task!r}", remedy)
            self.task_settings(i)
            kind = TASKS[stage.task]
            if stage.compile and not kind.fixed_shape:
                raise ConfigError(
                    f"stages.{i}.compile is set, but batches of the task {stage.task!r} have varying shapes",
                    "remove compile",
                )
            for key, wanted in (("mixture.weights", stage.mixture.weights), ("validate", stage.validate)):
                for source in wanted:
                    if source not in self.sources:
                        raise ConfigError(
                            f"stages.{i}.{key} names {source!r}, which is not a source",
                            suggest_name(source, self.sources),
                        )
                    if not set(kind.source_contents) & set(
                        get_source_spec(self.sources[source]).get_contents(self.sources[source])
                    ):
                        kinds = [
                            k for k, spec in DATA_SOURCES.items() if set(kind.source_contents) & set(spec.contents)
                        ]
                        raise ConfigError(
                            f"stages.{i}.{key} names {source!r}, which the task {stage.task!r} does not support",
                            f"use sources of kind {' or '.join(kinds)}",
                        )
        if self.tokenizer is None and any(
            get_source_spec(source).needs_tokenizer(source) for source in self.sources.values()
        ):
            raise ConfigError(f"recipe {self.name!r} has a source of texts but no tokenizer", "add a [tokenizer] table")
        if self.model.kind not in MODELS:
            remedy = suggest_name(self.model.kind, MODELS, MODELS.describe())
            raise ConfigError(f"model.kind: there is no model kind {self.model.kind!r}", remedy)
        if self.lora is not None and any("*" in stage.trainable for stage in self.stages):
            raise ConfigError(
                f"recipe {self.name!r} adds LoRA, but a stage trains all weights",
                'set trainable = ["*.lora"] in its stages',
            )
        if self.model.config is not None:
            self._check_model_names(self.build_model_config())

    def stage_index(self, name: str) -> int:
        """Return the index of a stage by its name."""
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise ConfigError(f"recipe {self.name!r} has no stage {name!r}", suggest_name(name, names))
        return names.index(name)

    def task_settings(self, i: int) -> Config:
        """Return the parsed task settings of a stage."""
        return self._read_config(
            TASKS[self.stages[i].task].settings_config, self.stages[i].settings, f"stages.{i}.settings"
        )

    def build_model_config(self) -> Config:
        return self._read_config(MODELS[self.model.kind].Config, self.model.config or {}, "model.config")

    def _read_config(self, config: type[Config], data: dict[str, Any], key: str) -> Config:
        """Read a config inside the recipe. Errors name the full key."""
        try:
            return config.from_dict(data)
        except ConfigKeyError as error:
            raise error.move_to(type(self), key) from None
        except ConfigError as error:
            raise error.with_prefix(key) from None

    def _check_model_names(self, config: Any) -> None:
        """Check parameter names and the vocabulary size on a model on the meta device."""
        check_vocab_size(config, 0 if self.tokenizer is None else self.tokenizer.vocab_size or 0)
        with torch.device("meta"):
            model = MODELS[self.model.kind](config)
        if self.lora is not None:
            add_lora(model, self.lora)
        self.check_stages(model)

    def check_stages(self, model: nn.Module) -> None:
        """Check that the task, the trainable parts and the optimizer groups of every stage fit the model."""
        for stage in self.stages:
            wanted = TASKS[stage.task].model_types
            if not isinstance(model, wanted):
                kinds = " or a ".join(kind.__name__ for kind in (wanted if isinstance(wanted, tuple) else (wanted,)))
                raise ConfigError(
                    f"stage {stage.name!r}: the task {stage.task!r} trains a {kinds}, but the model is a "
                    f"{type(model).__name__}",
                    "change stages.task or model.kind",
                )
            set_trainable_parts(model, stage.trainable)
            build_param_groups(model, stage.optim)
            decoder = getattr(model, "decoder", model)
            context = decoder.config.context_length if isinstance(decoder, Decoder) else None
            for name in (*stage.mixture.weights, *stage.validate):
                length = getattr(self.sources[name], "window_length", 0)
                if context is not None and length > context:
                    raise ConfigError(
                        f"sources.{name} has windows of {length:,} tokens, but the model's context is {context:,}",
                        f"set sources.{name}.window_length to at most {context}, or increase the context_length of "
                        "the model",
                    )


def check_vocab_size(config: Any, size: int) -> None:
    """Refuse a model whose vocabulary is smaller than that of the tokenizer."""
    part = next((name for name in ("text", "decoder") if hasattr(config, name)), "")
    vocab = getattr(getattr(config, part, config), "vocab_size", size)
    if vocab < size:
        raise ConfigError(
            f"the vocabulary of the model has {vocab} tokens, but the tokenizer has {size}",
            f"set model.config.{part + '.' if part else ''}vocab_size to at least {size}",
        )
