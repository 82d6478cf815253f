"""Config of a training stage: trainable parts, optimizer, schedule, data mixture and length."""

from typing import Any, Literal

from torch import nn

from vitrail.config import Config, PositiveInt, WorkerCount, check_name
from vitrail.data.sampler import MixtureConfig
from vitrail.errors import ConfigError
from vitrail.training.lr_schedule import ConstantSchedule, Schedule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.parameter_names import check_patterns_match, matches_pattern

RESERVED_NAMES = ("final", "tokenizer", "tests")  # other folders of a run


class StageConfig(Config):
    """One training stage of a recipe.

    name                         name of the stage, and of its folder
    task                         name of the task: the loss, and what a batch is made of
    steps                        optimizer steps
    batch_size                   samples of a step, over all ranks and micro-batches
    gradient_accumulation_steps  micro-batches of a step
    mixture                      mixture of data sources
    optim                        optimizer
    schedule                     schedule of the learning rate
    settings                     settings of the task
    trainable                    names of the trainable parts; all other parameters are frozen
    validate                     sources to validate on; they need validate_every or validate_first
    validate_every               steps between two validations; 0 for none
    validate_first               whether to validate before the first step too
    save_every                   steps between two checkpoints
    dtype                        dtype of the weights in the forward pass; bfloat16 weights have fp32 master copies
    ema_decay                    decay of an EMA of the weights, which is also validated and saved; None for no EMA
    gradient_checkpointing       recompute the activations of each block in the backward pass
    compile                      compile the forward pass; "graphs" also records CUDA graphs, for small models whose
                                 kernel launches take longer than the kernels
    num_workers                  worker processes of the dataloader
    """

    name: str
    task: str
    steps: PositiveInt
    batch_size: PositiveInt
    mixture: MixtureConfig
    optim: OptimConfig
    schedule: Schedule = ConstantSchedule()
    settings: dict[str, Any] = {}
    trainable: tuple[str, ...] = ("*",)
    gradient_accumulation_steps: PositiveInt = 1
    validate: tuple[str, ...] = ()
    validate_every: int = 0
    validate_first: bool = False
    save_every: PositiveInt = 100
    dtype: Literal["float32", "bfloat16"] = "float32"
    ema_decay: float | None = None
    gradient_checkpointing: bool = False
    compile: bool | Literal["graphs"] = False
    num_workers: WorkerCount = 0

    def __post_init__(self) -> None:
        check_name(self.name, "stages.name", RESERVED_NAMES)
        if self.batch_size % self.gradient_accumulation_steps:
            raise ConfigError(
                f"stage {self.name!r}: batch_size {self.batch_size} does not divide into "
                f"{self.gradient_accumulation_steps} micro-batches",
                "make batch_size a multiple of gradient_accumulation_steps",
            )
        if self.compile == "graphs" and self.gradient_accumulation_steps > 1 and self.dtype == "float32":
            raise ConfigError(
                f"stage {self.name!r}: CUDA graphs overwrite accumulated float32 gradients",
                'set compile = true, or dtype = "bfloat16"',
            )
        self._check_validation()
        self.schedule.check_length(self.steps)

    def _check_validation(self) -> None:
        if self.validate_every < 0:
            raise ConfigError(f"stage {self.name!r}: validate_every is {self.validate_every}", "give steps, or 0")
        if self.validate and not (self.validate_every or self.validate_first):
            raise ConfigError(
                f"stage {self.name!r}: validate names {', '.join(self.validate)}, but validate_every is 0 and "
                "validate_first is false, so nothing is validated",
                "set validate_every to a number of steps, or set validate = []",
            )
        if not self.validate and (self.validate_every or self.validate_first):
            key = "validate_every" if self.validate_every else "validate_first"
            raise ConfigError(
                f"stage {self.name!r}: {key} is {getattr(self, key)}, but validate names no source",
                f"name sources in validate, or remove {key}",
            )


def set_trainable_parts(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Make the named parts trainable and freeze the rest. Raise if a name matches nothing."""
    check_patterns_match("trainable: part", parts, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(matches_pattern(part, name) for part in parts))
