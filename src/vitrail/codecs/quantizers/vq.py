"""Vector quantization: a table of codes, of which each vector takes the nearest.

N vectors, K codes, D width
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import digits, ranks
from vitrail.codecs.quantizers.base import Quantized, Quantizer, mean_square, wide
from vitrail.codecs.quantizers.gradients import Through, through
from vitrail.codecs.quantizers.search import nearest
from vitrail.config import Config
from vitrail.errors import ConfigError

LEAST = 1e-6  # a code used less than this keeps its place: 0 / 0 has none


class VQConfig(Config, tag="vq", tag_field="kind"):
    """learn    how codes move: to the running mean of what they stand for, or by the gradient of the codebook loss
    metric   nearest by distance, or by direction: then vectors and codes are normalised to length 1
    decay    of the running means and of the counts of use
    start    from vectors of the first training batch, by so many rounds of k-means; 0: at random
    revive   a code used less than this share of the average is put on a vector of the batch; 0: never
    through  the gradient that passes the choice
    """

    codes: int
    dim: int
    learn: Literal["ema", "gradient"] = "ema"
    metric: Literal["euclid", "cosine"] = "euclid"
    decay: float = 0.99
    start: int = 10
    revive: float = 0.0
    through: Through = "straight"

    def __post_init__(self) -> None:
        if self.codes < 1 or self.dim < 1:
            raise ConfigError(f"a codebook of {self.codes} codes of width {self.dim} is empty")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"a mean cannot decay by {self.decay}", "use 0 ≤ decay < 1, such as 0.99")
        if not 0 <= self.revive < 1 or self.start < 0:
            raise ConfigError(
                f"revive = {self.revive} and start = {self.start} cannot be",
                "revive is a share of the average use, such as 0.02; start a number of rounds, such as 10",
            )


class VQ(Quantizer[VQConfig]):
    """Losses: `commit`, mean (x − code)² that moves x; `codebook`, the same that moves the codes, if they learn by it.

    The codebook lies in float32 buffers, which stay float32 when the model is cast. What a gradient teaches is a
    parameter beside it, added to it, so that k-means and revival never write into what an optimizer owns.
    """

    Config = VQConfig

    def __init__(self, config: VQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = self.width = c.dim
        self.sizes = (c.codes,)
        self.radices = digits.of(c.codes)
        codebook = torch.randn(c.codes, c.dim) / c.dim**0.5
        self.codebook = nn.Buffer(F.normalize(codebook, dim=1) if c.metric == "cosine" else codebook)
        self.counts = nn.Buffer(torch.ones(c.codes))
        self.started = nn.Buffer(torch.tensor(c.start == 0))
        self._started = False  # what is known of it without asking the device
        if c.learn == "ema":
            self.sums = nn.Buffer(self.codebook.clone())
        else:
            self.learned = nn.Parameter(torch.zeros(c.codes, c.dim))

    @property
    def begun(self) -> bool:
        """Whether nothing is left to be made of a first batch. Asks the device, as long as that is not known."""
        self._started = self._started or bool(self.started)
        return self._started

    def table(self) -> Tensor:
        """The codes as they are now (K, D), float32."""
        if self.config.learn == "ema":
            return self.codebook
        table = self.codebook + self.learned.to(self.codebook.dtype)
        return F.normalize(table, dim=1) if self.config.metric == "cosine" else table

    def forward(self, x: Tensor) -> Quantized:
        z, hard, ids, losses = self.choose(x)
        return Quantized(through(z, hard, self.config.through).to(x.dtype), ids, losses)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """x as it is compared, the codes chosen for it, their ids, the losses; and one step of learning."""
        self.check(x)
        cosine = self.config.metric == "cosine"
        with torch.autocast(x.device.type, enabled=False):
            z = wide(x)
            z = F.normalize(z, dim=-1) if cosine else z
            flat = z.reshape(-1, self.dim)
            if self.training and not self._started:
                self.begin(flat.detach())
            table = self.table().to(z.dtype)
            ids = nearest(flat, table, product=cosine)
            hard = F.embedding(ids, table).view_as(z)
            losses = {"commit": mean_square(z, hard.detach())}
            if self.config.learn == "gradient":
                losses["codebook"] = mean_square(hard, z.detach())
            if self.training:
                self.learn(flat.detach(), ids)
        return z, hard, ids.view(x.shape[:-1]), losses

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return F.embedding(ids.long(), self.table())

    # ---- learning without a gradient --------------------------------------------------------------------------------

    @torch.no_grad()
    def learn(self, x: Tensor, ids: Tensor) -> None:
        """Counts and means of the whole batch, over all ranks, into the running ones; then codes nobody uses."""
        c = self.config
        if c.learn == "gradient" and not c.revive:
            return
        used, sums = tally(x, ids, c.codes)
        self.counts.lerp_(used.to(self.counts.dtype), 1 - c.decay)
        if c.learn == "ema":
            self.sums.lerp_(sums.to(self.sums.dtype), 1 - c.decay)
            self.codebook.copy_(centred(self.sums, self.counts, self.codebook, c.metric == "cosine"))
        if c.revive:
            self.revive(x, used.sum() > 0)

    def revive(self, x: Tensor, some: Tensor) -> None:
        fair = self.counts.mean() * self.config.revive
        dead = (self.counts < fair) & some
        drawn = ranks.drawn(x, dead).to(self.codebook.dtype)
        self.counts.copy_(torch.where(dead, fair, self.counts))
        dead = dead[:, None]
        if self.config.learn == "ema":
            self.codebook.copy_(torch.where(dead, drawn, self.codebook))
            self.sums.copy_(torch.where(dead, drawn * fair, self.sums))
        else:
            self.codebook.copy_(torch.where(dead, drawn - self.learned.to(drawn.dtype), self.codebook))

    @torch.compiler.disable  # once, and with a loop
    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Start the codebook with k-means over the batch of all ranks, unless it has been started."""
        self._started = True
        if bool(self.started):
            return
        c = self.config
        cosine = c.metric == "cosine"
        table = ranks.drawn(x, torch.ones(c.codes, dtype=torch.bool, device=x.device))
        used = torch.zeros(c.codes, dtype=x.dtype, device=x.device)
        for _ in range(c.start):
            used, sums = tally(x, nearest(x, table, cosine), c.codes)
            table = centred(sums, used, table, cosine)
        if not used.sum():  # not one vector anywhere
            self._started = False
            return
        self.codebook.copy_(table)
        if c.learn == "ema":
            self.counts.copy_(used)
            self.sums.copy_(table * used[:, None])
        else:
            self.codebook.sub_(self.learned.to(self.codebook.dtype))
        self.started.fill_(True)


def tally(x: Tensor, ids: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """How many vectors of all ranks each code has (K,), and their sum (K, D)."""
    both = x.new_zeros(codes, x.shape[1] + 1).index_add_(0, ids, torch.cat([x, x.new_ones(len(x), 1)], 1))
    both = ranks.total(both)
    return both[:, -1], both[:, :-1]


def centred(sums: Tensor, used: Tensor, otherwise: Tensor, cosine: bool) -> Tensor:
    """The mean of each code's vectors; where it has none, what it was."""
    means = F.normalize(sums, dim=1) if cosine else sums / used.clamp_min(LEAST)[:, None]
    return torch.where(used[:, None] > LEAST, means, otherwise)
