"""A Q-Former with a text beside it: what BLIP-2's first stage trains, and what its second takes the Q-Former from.

A tower that has learned to look stays as it is; queries find in its features what a text could say of them. Words and
queries meet in one Q-Former: to be compared, each by itself; to be matched, together; and to be written, word by word.

B pictures, M texts, T words, N features of a picture, D their width, Q queries, V width inside, E of the embedding
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn, tensor

from vitrail.config import Config
from vitrail.connectors import QFormer, QFormerConfig
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.nn import Work, cost
from vitrail.nn.learned import small, weigh
from vitrail.nn.norms import make_norm
from vitrail.objectives.queries import closest


class TextQFormerConfig(Config):
    """
    qformer        with `text`; what it gives is what is compared with a text
    vocab, context words that are known, and how many of them a text has at most, with what it begins and ends with
    cls, eos       what a text begins and ends with, as BERT's do
    dec            what it begins with where it is to be written; without one there is no head that writes
    layer, prefix  which features of the tower are read: those of another layer than the last; those of CLS too
    log_scale      of the similarities, at first; without one they are as they come
    """

    tower: ViTConfig
    qformer: QFormerConfig
    vocab: int
    context: int = 32
    cls: int = 101
    eos: int = 102
    dec: int | None = None
    layer: int | None = None
    prefix: bool = False
    log_scale: float | None = math.log(1 / 0.07)

    @property
    def seen(self) -> int:
        """Features of a picture."""
        return self.tower.side**2 + (self.tower.prefix if self.prefix else 0)

    def __post_init__(self) -> None:
        if not self.qformer.text:
            raise ConfigError("this Q-Former reads no text", "set qformer.text = true")
        if self.qformer.reads != self.tower.block.width:
            raise ConfigError(
                f"the Q-Former reads {self.qformer.reads}, and the tower gives {self.tower.block.width}",
                f"set qformer.reads = {self.tower.block.width}",
            )
        depth_of(self.layer, self.tower.layers)  # refuses a layer that is not there
        if self.context < 3:
            raise ConfigError(f"a context of {self.context} tokens", "a beginning, a word and an end are 3")
        named = {"cls": self.cls, "eos": self.eos} | ({} if self.dec is None else {"dec": self.dec})
        for name, id in named.items():
            if not 0 <= id < self.vocab:
                raise ConfigError(f"{name} is {id}, of {self.vocab} words", "give the id of a special token")
        if len(set(named.values())) < len(named):
            raise ConfigError(f"one token for two things: {named}", "give each its own: tokenizer.specials adds some")


class Writer(nn.Module):
    """BERT's head: one more layer, and the words' own embeddings, with a bias."""

    def __init__(self, width: int, vocab: int, eps: float):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = make_norm("layer", width, eps)
        self.bias = nn.Parameter(tensor(0.0).repeat(vocab))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """(…, V) → (…, vocab)"""
        return F.linear(self.norm(F.gelu(self.dense(x))), embeddings, self.bias)


class TextQFormer(nn.Module):
    """ids (M, T) begin with `cls` and end with `eos`; −1 is padding."""

    def __init__(self, config: TextQFormerConfig):
        super().__init__()
        self.config = config
        queries = config.qformer
        self.tower = ViT(config.tower)
        self.qformer = QFormer(queries)
        self.embed = nn.Embedding(config.vocab, queries.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = small(config.context, queries.width)
        self.text_projection = nn.Linear(queries.width, queries.gives)
        self.matcher = nn.Linear(queries.width, 2)
        self.writer = None if config.dec is None else Writer(queries.width, config.vocab, queries.eps)
        self.log_scale = None if config.log_scale is None else nn.Parameter(tensor([float(config.log_scale)]))

    def features(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D)"""
        look = self.tower.tokens if self.config.prefix else self.tower
        return look(pixels, layer=self.config.layer)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """(B, Q, E), not normalised"""
        return self.qformer(self.features(pixels))

    def encode_text(self, ids: Tensor) -> Tensor:
        """(M, E), not normalised: what is read at the beginning of a text that sees nothing else"""
        return self.text_projection(self.qformer.read(self._embedded(ids), ids >= 0)[:, 0])

    def match(self, features: Tensor, ids: Tensor) -> Tensor:
        """Features (B, N, D), each beside the text of its row → logits (B, 2): that they do not belong together, and
        that they do"""
        queries, _ = self.qformer.both(features, self._embedded(ids), "itm", real=ids >= 0)
        return self.matcher(queries).mean(1)

    def write(self, features: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries find (B, Q, V), as if there were no text, and behind each word what the next one is told
        from (B, T, V)"""
        if self.config.dec is None:
            raise ConfigError("this model has no head that writes", "set `dec` in its config")
        ids = ids.clone()
        ids[:, 0] = self.config.dec
        return self.qformer.both(features, self._embedded(ids), "itg", real=ids >= 0)

    def logits(self, words: Tensor) -> Tensor:
        """What `write` gives of words (…, V) → (…, vocab)"""
        assert self.writer is not None
        return self.writer(words, self.embed.weight)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Similarities (B, M): cosines, of each picture's queries the one that comes nearest"""
        return closest(*(F.normalize(x, dim=-1) for x in (self.encode_image(pixels), self.encode_text(ids))))

    def _embedded(self, ids: Tensor) -> Tensor:
        """(M, T) → (M, T, V)"""
        T, limit = ids.shape[1], self.config.context
        if T > limit:
            raise TextError(f"{T} tokens do not fit a Q-Former of {limit}", f"cut the text to {limit} tokens")
        return self.embed(ids.clamp_min(0)) + self.positions[:T]

    def work(self, batch: int = 1) -> Work:
        """So many pictures, each with a text as long as can be: the context."""
        texts = Work.full(self.config.context, batch)
        return self.tower.work(batch).with_(context=texts.tokens, context_pairs=texts.pairs)


@cost.flops.register
def _(module: Writer, work: Work) -> int:
    width = module.dense.out_features
    return cost.flops(module.dense, work) + 2 * width * len(module.bias) * work.tokens


@cost.flops.register
def _(module: TextQFormer, work: Work) -> int:
    """Of `model(pixels, ids)`, `work` as `TextQFormer.work` gives it."""
    B, qformer = work.rows, module.qformer
    looked = cost.flops(module.tower, Work(tokens=work.tokens, pairs=work.pairs, rows=B))
    compared = cost.flops(module.text_projection, Work(tokens=B, pairs=0))
    compared += 2 * qformer.config.gives * qformer.config.queries * B**2
    read = qformer.pass_flops("itc", B, module.config.seen, work.context // B)
    return looked + read + cost.flops(qformer.project, Work(tokens=B * qformer.config.queries, pairs=0)) + compared


@cost.bytes.register
def _(module: TextQFormer, work: Work) -> cost.Bytes:
    own = weigh(*module.children(), *module.parameters(recurse=False))
    return cost.Bytes(weights=own, read=own - weigh(module.matcher, module.writer))
