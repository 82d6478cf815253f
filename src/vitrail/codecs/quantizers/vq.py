"""Vector quantization: each vector takes the nearest code of a codebook.

Shapes: N vectors, K codes, D width.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import mixed_radix, rank_statistics
from vitrail.codecs.quantizers.gradient_estimators import GradientEstimator, pass_gradient
from vitrail.codecs.quantizers.nearest_codes import find_nearest_codes
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, mean_squared_error, upcast
from vitrail.config import Config, FractionBelowOne, NonNegativeInt, PositiveInt
from vitrail.registry import QUANTIZERS

MIN_COUNT = 1e-6  # a code used less than this keeps its value, to avoid 0 / 0


class VQConfig(Config, tag="vq", tag_field="kind"):
    """Config of `VQ`.

    codebook_update      "ema": running means of the assigned vectors; "gradient": the gradient of the codebook loss
    metric               "euclid", or "cosine": vectors and codes are normalized to length 1
    ema_decay            of the running means and usage counts
    kmeans_iters         k-means iterations on the first training batch; 0: random initialization
    dead_code_threshold  replace a code whose usage is below this fraction of the average; 0: never
    gradient_estimator   "straight" or "rotation"
    """

    codebook_size: PositiveInt
    dim: PositiveInt
    codebook_update: Literal["ema", "gradient"] = "ema"
    metric: Literal["euclid", "cosine"] = "euclid"
    ema_decay: FractionBelowOne = 0.99
    kmeans_iters: NonNegativeInt = 10
    dead_code_threshold: FractionBelowOne = 0.0
    gradient_estimator: GradientEstimator = "straight"


@QUANTIZERS.register("vq")
class VQ(Quantizer[VQConfig]):
    """Vector quantizer. Losses: `commit`, mean (x − code)² with gradients to x; `codebook`, the same with gradients to
    the codes, if `codebook_update` is "gradient".

    The codebook is a float32 buffer, also when the model is cast. Learned offsets are a separate parameter that is
    added to it, so that k-means and dead-code replacement never write to optimizer-owned weights.
    """

    Config = VQConfig

    def __init__(self, config: VQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = c.dim
        self.width = self.dim
        self.vocab_sizes = (c.codebook_size,)
        self.radices = mixed_radix.make_radices(c.codebook_size)
        codebook = torch.randn(c.codebook_size, c.dim) / c.dim**0.5
        self.codebook = nn.Buffer(F.normalize(codebook, dim=1) if c.metric == "cosine" else codebook)
        self.counts = nn.Buffer(torch.ones(c.codebook_size))
        self.started = nn.Buffer(torch.tensor(c.kmeans_iters == 0))
        self._known_started = False  # host-side copy of `started`, to avoid synchronization
        if c.codebook_update == "ema":
            self.sums = nn.Buffer(self.codebook.clone())
        else:
            self.learned = nn.Parameter(torch.zeros(c.codebook_size, c.dim))

    @property
    def is_initialized(self) -> bool:
        """Whether the codebook is initialized. This synchronizes with the device until it is."""
        self._known_started = self._known_started or bool(self.started)
        return self._known_started

    def get_codebook(self) -> Tensor:
        """Current codes (K, D), float32."""
        if self.config.codebook_update == "ema":
            return self.codebook
        table = self.codebook + self.learned.to(self.codebook.dtype)
        return F.normalize(table, dim=1) if self.config.metric == "cosine" else table

    def forward(self, x: Tensor) -> QuantizerOutput:
        z, hard, ids, losses = self.assign_codes(x)
        return QuantizerOutput(pass_gradient(z, hard, self.config.gradient_estimator).to(x.dtype), ids, losses)

    def assign_codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Assign codes: return the compared vectors, their codes, ids and losses; in training, update the codebook."""
        self.check_input(x)
        cosine = self.config.metric == "cosine"
        with torch.autocast(x.device.type, enabled=False):
            z = upcast(x)
            z = F.normalize(z, dim=-1) if cosine else z
            flat = z.reshape(-1, self.dim)
            if self.training and not self._known_started:
                self.initialize_codebook(flat.detach())
            table = self.get_codebook().to(z.dtype)
            ids = find_nearest_codes(flat, table, by_dot_product=cosine)
            hard = F.embedding(ids, table).view_as(z)
            losses = {"commit": mean_squared_error(z, hard.detach())}
            if self.config.codebook_update == "gradient":
                losses["codebook"] = mean_squared_error(hard, z.detach())
            if self.training:
                self.update_codebook(flat.detach(), ids)
        return z, hard, ids.view(x.shape[:-1]), losses

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return F.embedding(ids.long(), self.get_codebook())

    # ---- codebook updates without gradients -------------------------------------------------------------------------

    @torch.no_grad()
    def update_codebook(self, x: Tensor, ids: Tensor) -> None:
        """Update running counts and means from the batch of all ranks, then replace dead codes."""
        c = self.config
        if c.codebook_update == "gradient" and not c.dead_code_threshold:
            return
        used, sums = sum_by_code(x, ids, c.codebook_size)
        self.counts.lerp_(used.to(self.counts.dtype), 1 - c.ema_decay)
        if c.codebook_update == "ema":
            self.sums.lerp_(sums.to(self.sums.dtype), 1 - c.ema_decay)
            self.codebook.copy_(compute_centroids(self.sums, self.counts, self.codebook, c.metric == "cosine"))
        if c.dead_code_threshold:
            self.replace_dead_codes(x, used.sum() > 0)

    def replace_dead_codes(self, x: Tensor, some: Tensor) -> None:
        """Replace codes that are used too rarely by vectors of the batch."""
        fair = self.counts.mean() * self.config.dead_code_threshold
        dead = (self.counts < fair) & some
        replacements = rank_statistics.sample_over_ranks(x, dead).to(self.codebook.dtype)
        self.counts.copy_(torch.where(dead, fair, self.counts))
        dead = dead[:, None]
        if self.config.codebook_update == "ema":
            self.codebook.copy_(torch.where(dead, replacements, self.codebook))
            self.sums.copy_(torch.where(dead, replacements * fair, self.sums))
        else:
            self.codebook.copy_(torch.where(dead, replacements - self.learned.to(replacements.dtype), self.codebook))

    @torch.compiler.disable  # runs once, and has a loop
    @torch.no_grad()
    def initialize_codebook(self, x: Tensor) -> None:
        """Initialize the codebook with k-means over the batch of all ranks, unless it is initialized."""
        self._known_started = True
        if bool(self.started):
            return
        c = self.config
        cosine = c.metric == "cosine"
        table = rank_statistics.sample_over_ranks(x, torch.ones(c.codebook_size, dtype=torch.bool, device=x.device))
        used = torch.zeros(c.codebook_size, dtype=x.dtype, device=x.device)
        for _ in range(c.kmeans_iters):
            used, sums = sum_by_code(x, find_nearest_codes(x, table, cosine), c.codebook_size)
            table = compute_centroids(sums, used, table, cosine)
        if not used.sum():  # no rank has a vector
            self._known_started = False
            return
        self.codebook.copy_(table)
        if c.codebook_update == "ema":
            self.counts.copy_(used)
            self.sums.copy_(table * used[:, None])
        else:
            self.codebook.sub_(self.learned.to(self.codebook.dtype))
        self.started.fill_(True)


def sum_by_code(x: Tensor, ids: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """Return the number of vectors of all ranks for each code (K,), and their sum (K, D)."""
    both = x.new_zeros(codes, x.shape[1] + 1).index_add_(0, ids, torch.cat([x, x.new_ones(len(x), 1)], 1))
    both = rank_statistics.sum_over_ranks(both)
    return both[:, -1], both[:, :-1]


def compute_centroids(sums: Tensor, used: Tensor, otherwise: Tensor, cosine: bool) -> Tensor:
    """Mean of each code's vectors; `otherwise` for codes without vectors."""
    means = F.normalize(sums, dim=1) if cosine else sums / used.clamp_min(MIN_COUNT)[:, None]
    return torch.where(used[:, None] > MIN_COUNT, means, otherwise)
