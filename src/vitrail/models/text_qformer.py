"""Q-Former with text: the model of BLIP-2's first training stage, from which the second stage takes the Q-Former.

The pretrained tower is frozen. Queries extract from its features what text describes. Text and queries pass through one
Q-Former: separately for contrastive learning, together for matching, and causally for caption generation.

Shapes: B images, M texts, T tokens, N features of an image, D their width, Q queries, V hidden width,
E width of the embedding.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn, tensor

from vitrail.config import Config
from vitrail.connectors import QFormer, QFormerConfig
from vitrail.encoders.layer_selection import resolve_depth
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.nn import Workload, cost
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import count_parameter_bytes, make_small_parameter
from vitrail.objectives.query_losses import max_query_similarity
from vitrail.registry import MODELS


class TextQFormerConfig(Config):
    """Config of a `TextQFormer`.

    qformer                       with `use_text`; its output is compared with texts
    vocab_size, context_length    vocabulary, and the maximum length of a text with its first and last token
    cls_token_id, eos_token_id    first and last token of a text, as in BERT
    decoder_start_token_id        first token for generation; None: no generation head
    vision_feature_layer          tower layer whose features are used; None: the last
    keep_prefix_tokens            keep CLS and register tokens
    log_scale                     initial log scale of similarities; None: no scale
    """

    tower: ViTConfig
    qformer: QFormerConfig
    vocab_size: int
    context_length: int = 32
    cls_token_id: int = 101
    eos_token_id: int = 102
    decoder_start_token_id: int | None = None
    vision_feature_layer: int | None = None
    keep_prefix_tokens: bool = False
    log_scale: float | None = math.log(1 / 0.07)

    @property
    def features_per_image(self) -> int:
        """Number of features of an image."""
        return self.tower.grid_size**2 + (self.tower.num_prefix_tokens if self.keep_prefix_tokens else 0)

    def __post_init__(self) -> None:
        if not self.qformer.use_text:
            raise ConfigError("qformer has no MLPs for text", "set qformer.use_text = true")
        if self.qformer.in_features != self.tower.block.width:
            raise ConfigError(
                f"qformer.in_features is {self.qformer.in_features}, but the tower has width {self.tower.block.width}",
                f"set qformer.in_features = {self.tower.block.width}",
            )
        resolve_depth(self.vision_feature_layer, self.tower.layers)  # raises if the layer does not exist
        if self.context_length < 3:
            raise ConfigError(
                f"context_length is {self.context_length}", "give at least 3: first token, text, last token"
            )
        named = {"cls_token_id": self.cls_token_id, "eos_token_id": self.eos_token_id}
        named |= {} if self.decoder_start_token_id is None else {"decoder_start_token_id": self.decoder_start_token_id}
        for name, id in named.items():
            if not 0 <= id < self.vocab_size:
                raise ConfigError(
                    f"{name} is {id}, but vocab_size is {self.vocab_size}", "give the id of a special token"
                )
        if len(set(named.values())) < len(named):
            raise ConfigError(f"special tokens share an id: {named}", "add tokens to the tokenizer, one for each")


class TextGenerationHead(nn.Module):
    """BERT's language model head: a dense layer and the tied embedding, with a bias."""

    def __init__(self, width: int, vocab_size: int, eps: float):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = make_norm("layer", width, eps)
        self.bias = nn.Parameter(tensor(0.0).repeat(vocab_size))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """Map hidden states (…, V) to logits (…, vocab_size)."""
        return F.linear(self.norm(F.gelu(self.dense(x))), embeddings, self.bias)


@MODELS.register("text-qformer")
class TextQFormer(nn.Module):
    """Q-Former with text. Texts are ids (M, T) that start with CLS and end with EOS, padded with −1."""

    Config = TextQFormerConfig

    def __init__(self, config: TextQFormerConfig):
        super().__init__()
        self.config = config
        queries = config.qformer
        self.tower = ViT(config.tower)
        self.qformer = QFormer(queries)
        self.embed = nn.Embedding(config.vocab_size, queries.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = make_small_parameter(config.context_length, queries.width)
        self.text_projection = nn.Linear(queries.width, queries.out_features)
        self.matcher = nn.Linear(queries.width, 2)
        self.writer = (
            None
            if config.decoder_start_token_id is None
            else TextGenerationHead(queries.width, config.vocab_size, queries.eps)
        )
        self.log_scale = None if config.log_scale is None else nn.Parameter(tensor([float(config.log_scale)]))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, C, H, W) to tower features (B, N, D)."""
        encode = self.tower.forward_tokens if self.config.keep_prefix_tokens else self.tower
        return encode(pixels, layer=self.config.vision_feature_layer)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Encode pixels to query embeddings (B, Q, E), not normalized."""
        return self.qformer(self.forward_features(pixels))

    def encode_text(self, ids: Tensor) -> Tensor:
        """Encode texts to embeddings (M, E) from the CLS position, not normalized."""
        return self.text_projection(self.qformer.encode_text(self._embed_text(ids), ids >= 0)[:, 0])

    def compute_match_logits(self, features: Tensor, ids: Tensor) -> Tensor:
        """Return matching logits (B, 2), no match and match, of features (B, N, D) with the text of the same row."""
        queries, _ = self.qformer.encode_jointly(features, self._embed_text(ids), "itm", text_mask=ids >= 0)
        return self.matcher(queries).mean(1)

    def encode_for_generation(self, features: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query states (B, Q, V), unaffected by text, and causal text states (B, T, V) for next-token
        prediction.
        """
        if self.config.decoder_start_token_id is None:
            raise ConfigError("this model has no generation head", "set `decoder_start_token_id` in its config")
        ids = ids.clone()
        ids[:, 0] = self.config.decoder_start_token_id
        return self.qformer.encode_jointly(features, self._embed_text(ids), "itg", text_mask=ids >= 0)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Map text states (…, V) of `encode_for_generation` to logits (…, vocab_size)."""
        assert self.writer is not None
        return self.writer(states, self.embed.weight)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Return similarities (B, M): the highest cosine of a text with any query of the image."""
        return max_query_similarity(
            *(F.normalize(x, dim=-1) for x in (self.encode_image(pixels), self.encode_text(ids)))
        )

    def _embed_text(self, ids: Tensor) -> Tensor:
        """Embed ids (M, T) to (M, T, V)."""
        T, limit = ids.shape[1], self.config.context_length
        if T > limit:
            raise TextError(f"a text has {T} tokens, but context_length is {limit}", f"truncate it to {limit} tokens")
        return self.embed(ids.clamp_min(0)) + self.positions[:T]

    def workload(self, batch_size: int = 1) -> Workload:
        """Return the workload of images with texts of maximum length; the texts are the context of the workload."""
        texts = Workload.full_attention(self.config.context_length, batch_size)
        return self.tower.workload(batch_size).replace(context_tokens=texts.tokens, context_pairs=texts.attention_pairs)


@cost.count_flops.register
def _(module: TextGenerationHead, work: Workload) -> int:
    width = module.dense.out_features
    return cost.count_flops(module.dense, work) + 2 * width * len(module.bias) * work.tokens


@cost.count_flops.register
def _(module: TextQFormer, work: Workload) -> int:
    """Count `model(pixels, ids)`, with the workload of `TextQFormer.workload`."""
    B, qformer = work.sequences, module.qformer
    tower_flops = cost.count_flops(
        module.tower, Workload(tokens=work.tokens, attention_pairs=work.attention_pairs, sequences=B)
    )
    similarity_flops = cost.count_flops(module.text_projection, Workload(tokens=B, attention_pairs=0))
    similarity_flops += 2 * qformer.config.out_features * qformer.config.num_queries * B**2
    qformer_flops = qformer.count_pass_flops("itc", B, module.config.features_per_image, work.context_tokens // B)
    return (
        tower_flops
        + qformer_flops
        + cost.count_flops(qformer.project, Workload(tokens=B * qformer.config.num_queries, attention_pairs=0))
        + similarity_flops
    )


@cost.count_bytes.register
def _(module: TextQFormer, work: Workload) -> cost.MemoryBytes:
    own = count_parameter_bytes(*module.children(), *module.parameters(recurse=False))
    return cost.MemoryBytes(weights=own, read=own - count_parameter_bytes(module.matcher, module.writer))
