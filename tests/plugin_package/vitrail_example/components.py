"""A connector, a quantizer, a data source, a task and a benchmark of a third-party package."""

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput
from vitrail.config import Config
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import count_features
from vitrail.data.source_spec import DataSourceSpec
from vitrail.evals.metrics.short_answer_metrics import make_mean_scorer
from vitrail.evals.suites.benchmarks import QUESTION_PROMPT, Benchmark
from vitrail.nn import cost
from vitrail.registry import BENCHMARKS, CONNECTORS, DATA_SOURCES, QUANTIZERS, TASKS
from vitrail.tasks.task_spec import TaskSpec


class LinearConfig(ConnectorConfig, tag="example-linear", tag_field="kind"):
    """One linear layer."""

    def count_tokens(self, layout):
        return count_features(layout)


@CONNECTORS.register("example-linear")
class LinearConnector(Connector[LinearConfig]):
    Config = LinearConfig

    def __init__(self, config: LinearConfig):
        super().__init__(config)
        self.linear = nn.Linear(config.in_features, config.out_features)

    def forward(self, features: Tensor, layout=None) -> Tensor:
        self.resolve_layouts(features, layout)
        return self.linear(features)


class SignConfig(Config, tag="example-sign", tag_field="kind"):
    bits: int


@QUANTIZERS.register("example-sign")
class SignQuantizer(Quantizer[SignConfig]):
    """The sign of every channel, with a straight-through gradient."""

    Config = SignConfig

    def __init__(self, config: SignConfig):
        super().__init__(config)
        self.dim, self.width, self.vocab_sizes = config.bits, config.bits, (2**config.bits,)

    def forward(self, x: Tensor) -> QuantizerOutput:
        bits = x > 0
        codes = bits.to(x.dtype) * 2 - 1
        ids = (bits.long() << torch.arange(self.dim, device=x.device)).sum(-1)
        return QuantizerOutput(codes.detach() + (x - x.detach()), ids, {})

    def lookup(self, ids: Tensor) -> Tensor:
        return (ids[..., None] >> torch.arange(self.dim, device=ids.device) & 1).float() * 2 - 1


class StripesConfig(Config, tag="example-stripes", tag_field="kind"):
    """`count` striped images of 8 × 8 pixels."""

    count: int = 16


class Stripes:
    def __init__(self, config: StripesConfig):
        self.config = config
        self.fingerprint = f"stripes {config.count}"

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, item: int) -> np.ndarray:
        rows = np.arange(8) * (item + 1) * 32 % 256
        return np.broadcast_to(rows[None, :, None], (3, 8, 8)).astype(np.uint8)


DATA_SOURCES.register(
    "example-stripes", DataSourceSpec(StripesConfig, lambda config, context: Stripes(config), ("stripes",))
)


class ReconstructionTask:
    """Squared error of a codec's reconstruction."""

    def __init__(self, model: Codec):
        self.model = model
        self.loss_weights = {"squared_error": 1.0}

    def collate(self, samples):
        return {"images": torch.from_numpy(np.stack(samples))}

    def count_loss_terms(self, batch):
        return {"squared_error": batch["images"].numel()}

    def __call__(self, batch):
        pixels = self.model.to_pixels(batch["images"])
        return {"squared_error": (self.model(pixels)[0] - pixels).square().sum()}

    def count_flops(self, batch):
        return cost.count_flops(self.model, self.model.workload(len(batch["images"]), 8, 8))


TASKS.register(
    "example-reconstruction",
    TaskSpec(lambda model, sources, tokenizer, settings: ReconstructionTask(model), Codec, ("stripes",)),
)


def match_first_letters(table, answers, *, num_letters: int = 1):
    """Whether the first letters of each answer are those of a reference.

    num_letters  letters that are compared
    """
    starts = [{reference[:num_letters] for reference in references} for references in table.references]
    return [float(answer[:num_letters] in letters) for answer, letters in zip(answers, starts, strict=True)]


BENCHMARKS.register(
    "example-vqa",
    Benchmark("vqa", QUESTION_PROMPT, make_mean_scorer("accuracy", match_first_letters), match_first_letters),
)
