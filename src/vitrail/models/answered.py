"""A vision-language model with fused queries beside a text tower that reads the answers: what the token-scaling paper
trains first, before the language model is asked.

B pictures, K questions, T words of a question, M answers, L their words, V width of the queries, E of the embedding
"""

import math

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.connectors.fused import Groups
from vitrail.encoders.text import TextConfig, TextTower
from vitrail.errors import ConfigError
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig


class AnsweredConfig(Config):
    """`vlm` has queries, `text` reads answers in its words, and `embed` is the width in which the two meet."""

    vlm: VLMConfig
    text: TextConfig
    embed: int
    log_scale: float = math.log(1 / 0.07)

    def __post_init__(self) -> None:
        if self.vlm.queries is None:
            raise ConfigError("no queries are fused with the question", "give [model.config.vlm.queries]")
        if self.embed < 1:
            raise ConfigError(f"an embedding of {self.embed} numbers", "give at least 1")
        if self.text.pool != "eos":
            raise ConfigError(f"answers are compared by their ends, not by pool {self.text.pool!r}", "pool at eos")


class Answered(nn.Module):
    """`product` is the vision-language model: the text tower stays behind."""

    def __init__(self, config: AnsweredConfig):
        super().__init__()
        self.config = config
        self.vlm = VLM(config.vlm)
        self.text = TextTower(config.text)
        assert config.vlm.queries is not None
        self.end_projection = nn.Linear(config.vlm.queries.width, config.embed, bias=False)
        self.text_projection = nn.Linear(config.text.pooled, config.embed, bias=False)
        self.log_scale = nn.Parameter(torch.tensor([float(config.log_scale)]))

    @property
    def product(self) -> VLM:
        return self.vlm

    def fuse(self, pixels: Tensor, asked: Tensor) -> Groups:
        """pixels as the tower reads them, questions (B, K, T), −1 behind each → queries and ends of each question"""
        assert self.vlm.queries is not None
        return self.vlm.queries.fuse(self.vlm.soft(pixels), None, asked.unbind(1))

    def encode_answers(self, ids: Tensor) -> Tensor:
        """(M, L) → (M, E), not normalised"""
        return self.text_projection(self.text.pool(ids))
