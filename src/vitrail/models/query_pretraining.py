"""Pretraining of fused queries: a vision-language model with queries, and a text tower that encodes the answers.

This is the first training stage of the token-scaling paper, before the language model is trained.

Shapes: B images, K questions, T tokens of a question, M answers, L their tokens, V width of the queries,
E width of the embedding.
"""

import math

import torch
from torch import Tensor, nn

from vitrail.config import Config, PositiveInt
from vitrail.connectors.fused_queries import FusedQueryOutput
from vitrail.encoders.text_tower import TextTower, TextTowerConfig
from vitrail.errors import ConfigError
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.registry import MODELS


class QueryPretrainingConfig(Config):
    """Config of a `QueryPretrainingModel`. `embed_dim` is the width of the shared embedding of queries and answers."""

    vlm: VLMConfig
    text: TextTowerConfig
    embed_dim: PositiveInt
    log_scale: float = math.log(1 / 0.07)

    def __post_init__(self) -> None:
        if self.vlm.queries is None:
            raise ConfigError("vlm has no fused queries", "set [model.config.vlm.queries]")
        if self.text.pool != "eos":
            raise ConfigError(f"text.pool is {self.text.pool!r}", 'set text.pool = "eos"')


@MODELS.register("query-pretraining")
class QueryPretrainingModel(nn.Module):
    """Vision-language model with fused queries, and a text tower for answers. `final_model` is the vision-language
    model.
    """

    Config = QueryPretrainingConfig

    def __init__(self, config: QueryPretrainingConfig):
        super().__init__()
        self.config = config
        self.vlm = VLM(config.vlm)
        self.text = TextTower(config.text)
        assert config.vlm.queries is not None
        self.end_projection = nn.Linear(config.vlm.queries.width, config.embed_dim, bias=False)
        self.text_projection = nn.Linear(config.text.pooled_width, config.embed_dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor([float(config.log_scale)]))

    @property
    def final_model(self) -> VLM:
        return self.vlm

    def encode_queries(self, pixels: Tensor, questions: Tensor) -> FusedQueryOutput:
        """Encode pixels and questions (B, K, T), padded with −1, to query and end states of each question."""
        assert self.vlm.queries is not None
        return self.vlm.queries.encode_queries(self.vlm.encode_views(pixels), None, questions.unbind(1))

    def encode_answers(self, ids: Tensor) -> Tensor:
        """Encode answers (M, L) to embeddings (M, E), not normalized."""
        return self.text_projection(self.text.forward_pooled(ids))
