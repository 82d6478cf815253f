"""Unified model (UM³): one decoder that reads and generates text and images, as codes, in one sequence.

An input image enters as its projected codes, or as the encoder features before quantization. An output image is
generated as codes, each in a few groups of digits, one group after the other. Positions are encoded twice: by rotary
embeddings, which are relative, and by a learned embedding of each grid position, which is absolute.

Shapes: B batch, L tokens, n tokens of a piece, h × w codes of an image, N = h·w, W width, d width of a code, G groups.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import LearnedPositionEmbedding, Workload, cost
from vitrail.registry import MODELS
from vitrail.stream import RowLayout, RowPart, TokenRun, build_rows

# Rows of `marks`: token before an input image, before an output image, and masked code.
INPUT_IMAGE, OUTPUT_IMAGE, MASKED_CODE = range(3)


class UnifiedConfig(Config):
    """Config of a `UnifiedModel`.

    id_groups         groups into which the id of a generated code is split, with one vocabulary each
    generation_order  "raster" generates code by code; "masked" predicts masked codes with attention to the whole image
    image_input       representation of input images: their codes, or the encoder's features
    """

    decoder: DecoderConfig
    codec: CodecConfig
    id_groups: int = 1
    generation_order: Literal["raster", "masked"] = "raster"
    image_input: Literal["codes", "features"] = "codes"


class GroupHead(nn.Module):
    """Output head (…, W) for the parts of an id, each part given the ones before."""

    def __init__(self, width: int, sizes: tuple[int, ...]):
        super().__init__()
        self.vocab_sizes = sizes
        self.part_embeds = nn.ModuleList([nn.Embedding(size, width) for size in sizes[:-1]])
        self.mix = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in sizes[1:]])
        self.out = nn.ModuleList([nn.Linear(width, size) for size in sizes])

    def compute_logits(self, x: Tensor, before: Tensor) -> Tensor:
        """Compute logits (…, size) of the next part, from x (…, W) and the g parts so far (…, g)."""
        g = before.shape[-1]
        for i in range(g):
            x = x + self.mix[i](x + self.part_embeds[i](before[..., i]))
        return self.out[g](x)

    def forward(self, x: Tensor, parts: Tensor) -> list[Tensor]:
        """Compute the logits of all parts with teacher forcing, from x (…, W) and parts (…, G)."""
        logits = [self.out[0](x)]
        for g in range(1, len(self.vocab_sizes)):
            x = x + self.mix[g - 1](x + self.part_embeds[g - 1](parts[..., g - 1]))
            logits.append(self.out[g](x))
        return logits


@MODELS.register("unified")
class UnifiedModel(nn.Module):
    """Unified model: pieces of text and images through one decoder. The codec is a frozen part."""

    Config = UnifiedConfig

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        self.config = config
        self.decoder, self.codec = Decoder(config.decoder), Codec(config.codec)
        quantizer, W = self.codec.quantizer, config.decoder.block.width
        if len(quantizer.vocab_sizes) != 1:
            raise ConfigError(
                f"{type(quantizer).__name__} has {len(quantizer.vocab_sizes) or 'no'} ids a code, but one is generated",
                "use a quantizer with one id for each code, such as FSQ, BSQ or VQ",
            )
        input_width = self.codec.feature_width if config.image_input == "features" else quantizer.width
        self.image_proj, self.code_proj = nn.Linear(input_width, W), nn.Linear(quantizer.width, W)
        self.mark_embed = nn.Embedding(3, W)
        self.head = GroupHead(W, quantizer.group_sizes(config.id_groups))
        self.position_embedding = LearnedPositionEmbedding(self.grid, W)
        nn.init.normal_(self.mark_embed.weight, std=0.02)
        nn.init.zeros_(self.position_embedding.table)

    @property
    def pretrained_parts(self) -> tuple[str, ...]:
        """Parts that are not trained here and need pretrained weights."""
        return ("codec",)

    def train(self, mode: bool = True) -> "UnifiedModel":
        super().train(mode)
        self.codec.eval()  # codebook statistics do not change
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Codes of an image of the codec's size: rows and columns."""
        height, width = self.codec.image_size
        return height // self.codec.downsample_factor, width // self.codec.downsample_factor

    # ---- images -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_images(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels (B, C, H, W) in −1 … 1 to input features (B, h, w, ·) and ids (B, h, w)."""
        features = self.codec.forward_features(pixels.to(self.code_proj.weight.dtype))
        output = self.codec.quantize(features)
        assert output.ids is not None
        return (features if self.config.image_input == "features" else output.codes), output.ids

    def split_ids(self, ids: Tensor) -> Tensor:
        """Split ids (…) into parts (…, G)."""
        return self.codec.quantizer.split_ids(ids, self.config.id_groups)

    def join_ids(self, parts: Tensor) -> Tensor:
        """Join parts (…, G) to ids (…)."""
        return self.codec.quantizer.join_ids(parts)

    @torch.no_grad()
    def decode_pixels(self, ids: Tensor) -> Tensor:
        """Decode ids (B, h, w) to pixels (B, C, H, W) in −1 … 1."""
        return self.codec.decode(self.codec.lookup(ids)).clamp(-1, 1)

    # ---- pieces -------------------------------------------------------------------------------------------------

    def make_text_piece(self, ids: Tensor, counts: Tensor | None = None, turn_starts: Tensor | None = None) -> RowPart:
        """Make a text piece of ids (B, n).

        The first `counts` (B,) tokens of each row are valid. `turn_starts` (B, n) is where each token's turn starts;
        turns do not attend to each other.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        return RowPart(
            self.decoder.embed(ids), mask=None if counts is None else places < counts[:, None], turn_starts=turn_starts
        )

    def make_input_image_piece(self, features: Tensor) -> RowPart:
        """Make the piece of an input image from the features (B, h, w, ·) of `encode_images`."""
        return self._make_image_piece(INPUT_IMAGE, self.image_proj(features), both=True)

    def make_output_image_piece(self, ids: Tensor, masked: Tensor | None = None) -> RowPart:
        """Make the piece of an output image from ids (B, h, w); `masked` (B, h, w) marks codes that are not generated
        yet.
        """
        codes = self.codec.quantizer.lookup(ids.where(~masked, 0) if masked is not None else ids)
        x = self.code_proj(codes.detach().to(self.code_proj.weight.dtype))
        if masked is not None:
            x = torch.where(masked[..., None], self.mark_embed.weight[MASKED_CODE], x)
        return self._make_image_piece(OUTPUT_IMAGE, x, both=self.config.generation_order == "masked")

    def embed_codes(self, ids: Tensor, positions: Tensor, grid: tuple[int, int]) -> Tensor:
        """Embed codes (…) at positions (…) of an output image, in raster order, to (…, W)."""
        codes = self.codec.quantizer.lookup(ids)
        return self.code_proj(codes.to(self.code_proj.weight.dtype)) + self.position_embedding(*grid)[positions]

    def _make_image_piece(self, mark: int, x: Tensor, *, both: bool) -> RowPart:
        B, h, w, _ = x.shape
        first = self.mark_embed.weight[mark].expand(B, 1, -1)
        embeds = torch.cat([first, x.flatten(1, 2) + self.position_embedding(h, w)], 1)
        return RowPart(embeds, TokenRun(1, h, w), bidirectional=both)

    def build_layout(self, *pieces: RowPart) -> RowLayout:
        """Concatenate pieces, with positions and attention plan."""
        return build_rows(pieces, is_1d=self.config.decoder.rotary.layout == "1d")

    def forward_hidden(self, layout: RowLayout, start: int = 0) -> Tensor:
        """Return hidden states (B, L − start, W) of the tokens from `start`."""
        if self.decoder.can_trim_last_layer:
            return self.decoder.forward_embeddings(layout.embeds, layout.positions, layout.plan, output_positions=start)
        return self.decoder.forward_embeddings(layout.embeds, layout.positions, layout.plan)[:, start:]

    # ---- losses -------------------------------------------------------------------------------------------------

    def compute_code_losses(self, hidden: Tensor, ids: Tensor, z_loss: float = 0.0) -> Tensor:
        """Compute the loss of each code from hidden states (…, W) and ids (…): −log p over all groups.

        `z_loss` weights logsumexp² of each group.
        """
        parts = self.split_ids(ids)
        total = hidden.new_zeros(ids.shape, dtype=torch.float32)
        for g, logits in enumerate(self.head(hidden, parts)):
            logits = logits.float()
            lse = logits.logsumexp(-1)
            total = total + lse - logits.gather(-1, parts[..., g, None])[..., 0] + z_loss * lse.square()
        return total

    def get_code_states(self, layout: RowLayout, hidden: Tensor) -> Tensor:
        """Return the states (B, N, W) that predict each code of the last piece: in raster order the one before it, else
        its own.
        """
        first, last = (layout.ends[-2] if len(layout.ends) > 1 else 0), layout.ends[-1]
        return hidden[:, first : last - 1] if self.config.generation_order == "raster" else hidden[:, first + 1 : last]

    def forward(self, *pieces: RowPart) -> Tensor:
        return self.forward_hidden(self.build_layout(*pieces))

    def workload(self, batch_size: int = 1, num_text_tokens: int = 0) -> Workload:
        """Return the workload of a causal sequence with one image and a number of text tokens."""
        h, w = self.grid
        return Workload.causal_attention(1 + h * w + num_text_tokens, batch_size)


@cost.count_flops.register
def _(module: UnifiedModel, work: Workload) -> int:
    """Count the decoder; the codec and the small heads are counted separately."""
    return cost.count_flops(module.decoder, work)


cost.count_bytes.register(UnifiedModel, cost.sum_tensor_bytes)
