"""A stage: what trains, at which rate, on which mixture, for how long."""

from typing import Any, Literal

from torch import nn

from vitrail.config import Config
from vitrail.data.order import Mixture
from vitrail.errors import ConfigError
from vitrail.train.names import matches, refuse_idle
from vitrail.train.optim import OptimConfig
from vitrail.train.schedule import Constant, Schedule


class StageConfig(Config):
    """
    steps        optimizer steps          batch       samples a step, over all ranks and micro-batches
    accumulate   micro-batches a step     train       names of the parts that train; the rest is frozen
    settings     what the task takes besides its sources
    mixture      where samples come from  judge       sources the live model is judged on, every `judge_every` steps
    judge_first  whether it is judged before the first step as well
    dtype        of the weights that compute; fp32 masters are kept beside bfloat16 ones
    ema          decay of an average of the weights that is kept, judged and saved beside them
    recompute    keep no activations inside blocks and compute them again in the backward pass
    compile      the pass of a step; "graphs" also records it as CUDA graphs, for models so small that launching their
                 kernels takes longer than running them
    """

    name: str
    task: str
    steps: int
    batch: int
    mixture: Mixture
    optim: OptimConfig
    schedule: Schedule = Constant()
    settings: dict[str, Any] = {}
    train: tuple[str, ...] = ("*",)
    accumulate: int = 1
    judge: tuple[str, ...] = ()
    judge_every: int = 0
    judge_first: bool = False
    save_every: int = 100
    dtype: Literal["float32", "bfloat16"] = "float32"
    ema: float | None = None
    recompute: bool = False
    compile: bool | Literal["graphs"] = False
    workers: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or self.accumulate < 1 or self.save_every < 1:
            raise ConfigError(f"stage {self.name!r}: steps, batch, accumulate and save_every are at least 1")
        if self.batch % self.accumulate:
            raise ConfigError(
                f"stage {self.name!r}: a batch of {self.batch} does not divide into {self.accumulate} micro-batches",
                "make batch a multiple of accumulate",
            )
        if self.compile == "graphs" and self.accumulate > 1 and self.dtype == "float32":
            raise ConfigError(
                f"stage {self.name!r}: gradients in float32 add up where the next recorded pass writes its own",
                'set compile = true, or dtype = "bfloat16"',
            )
        self.schedule.check(self.steps)


def choose_trainable(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Freeze all but the named parts; a name that matches nothing is refused."""
    refuse_idle("train: part", parts, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(matches(part, name) for part in parts))
