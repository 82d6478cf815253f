"""Vision-language model with a text encoder and a decoder (Florence-2).

The stream of a sample is a prompt, which ends with its first `end_of_prompt_id`, and then the answer with its start
tokens. The encoder reads the prompt, whose images are tokens, in both directions. The decoder reads the answer, and
attends to the outputs of the encoder.

Shapes: B rows, L tokens of a row, S samples, P tokens of the longest prompt, A of the longest answer, W width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.fusion import CrossAttentionFusionConfig, CrossAttentionInputs
from vitrail.config import LayerCount
from vitrail.errors import ConfigError, StreamError
from vitrail.models import vlm_cost
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.nn import AttentionPlan, Block, BlockConfig, KVCache, Workload, attention_plan, cost
from vitrail.nn.norms import make_norm
from vitrail.registry import MODELS
from vitrail.stream import PackedBatch, RowTemplate, Stream, split_by_sample


class EncoderDecoderVLMConfig(VLMConfig):
    """Config of an `EncoderDecoderVLM`: that of a `VLM`, whose decoder has a fusion with `encoder = true`.

    encoder_layers    blocks of the encoder
    encoder_block     its blocks; None: self-attention and MLP with the settings of the decoder
    end_of_prompt_id  id of the token that ends a prompt
    """

    encoder_layers: LayerCount = 6
    encoder_block: BlockConfig | None = None
    end_of_prompt_id: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.end_of_prompt_id < self.decoder.vocab_size:
            raise ConfigError(
                f"end_of_prompt_id is {self.end_of_prompt_id}, but the decoder embeds {self.decoder.vocab_size} ids",
                "set the id of the token that ends a text",
            )
        unsupported = {
            "queries": self.queries is not None,
            "voco_tokens": self.voco_tokens > 0,
            "stack": self.stack is not None,
            "rules.bidirectional_prompt": self.rules.bidirectional_prompt,
            "encoder_block of another width": self.prompt_block.width != self.decoder.block.width,
        }
        for name, is_used in unsupported.items():
            if is_used:
                raise ConfigError(f"an encoder-decoder model does not support {name}", "remove it")

    def check_fusion(self) -> None:
        fusion = self.decoder.fusion
        if not isinstance(fusion, CrossAttentionFusionConfig) or not fusion.encoder or fusion.context_width is not None:
            raise ConfigError(
                "decoder.fusion has no cross-attention to the outputs of an encoder",
                'set decoder.fusion = {kind = "cross", encoder = true, …} without context_width',
            )
        if not self.decoder.learned_positions or not self.decoder.norm_embeddings:
            raise ConfigError(
                "the encoder has learned positions and normalizes embeddings, and the decoder does not",
                "set decoder.learned_positions and decoder.norm_embeddings = true",
            )

    @property
    def prompt_block(self) -> BlockConfig:
        """Blocks of the encoder."""
        return self.encoder_block or self.decoder.block.replace(branches=("self", "mlp"))


class PromptEncoder(nn.Module):
    """Encoder of prompts: learned positions, a norm, and bidirectional blocks. (S, P, W) → (S, P, W)."""

    def __init__(self, config: EncoderDecoderVLMConfig):
        super().__init__()
        decoder, block = config.decoder, config.prompt_block
        self.context_length = decoder.context_length
        self.positions = nn.Embedding(decoder.learned_positions, block.width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.norm = make_norm(block.norm, block.width, block.eps)
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.encoder_layers)])

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        if x.shape[1] > self.context_length:
            raise StreamError(
                f"a prompt has {x.shape[1]} tokens, but the encoder has {self.context_length} positions",
                "give a shorter text or fewer images",
            )
        first = len(self.positions.weight) - self.context_length  # BART has two rows before them
        x = self.norm(x + self.positions.weight[first : first + x.shape[1]])
        for block in self.blocks:
            x = block(x, plan)
        return x


class SplitTokens(NamedTuple):
    """Indices (n,) of the tokens of each sample in the flattened batch (B·L): prompts, and answers."""

    prompts: list[Tensor]
    answers: list[Tensor]


@MODELS.register("encoder-decoder-vlm")
class EncoderDecoderVLM(VLM):
    """Vision-language model whose decoder attends to an encoded prompt.

    `model(batch, images)` returns logits (B, L, V) of a packed stream, which are zero in prompts.
    """

    Config = EncoderDecoderVLMConfig

    def __init__(self, config: EncoderDecoderVLMConfig):
        super().__init__(config)
        self.encoder, self.end_of_prompt_id = PromptEncoder(config), config.end_of_prompt_id

    def forward_hidden(
        self,
        batch: PackedBatch,
        images: VisionInputs | None = None,
        videos: VisionInputs | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, W) of answers before the output head; those of prompts are zero.

        With a cache, every row is one sample that ends with the first tokens of its answer.
        """
        if videos is not None:
            raise ConfigError("an encoder-decoder model takes no videos", "give the frames as images")
        embeds, _ = self.embed_stream(batch, {} if images is None else {"image": self.encode_images(images)})
        flat, split = embeds.flatten(0, 1), self.split_samples(batch)
        prompts, answers = (
            pad_sequence([flat[one.to(flat.device)] for one in tokens], batch_first=True) for tokens in split
        )
        plan = make_prompt_plan([len(one) for one in split.prompts]).to(flat.device)
        encoded = self.encoder(prompts, plan)
        counts = torch.tensor([len(one) for one in split.answers])
        if cache is not None and int(counts.min()) == 0:
            raise StreamError(
                "a prompt has no tokens after its end token, so the decoder has nothing to start with",
                "use the chat template of the model",
            )
        if not int(counts.max()):
            return torch.zeros_like(embeds) + 0 * encoded.sum()  # all parts take part, also without an answer
        attention: dict[str, Any] = {} if cache is None else {"cache": cache, "counts": counts}
        context_plan = make_prompt_plan([len(one) for one in split.prompts], answers.shape[1]).to(flat.device)
        hidden = self.decoder.forward_hidden(
            embeds=answers, fusion_inputs=CrossAttentionInputs(encoded, context_plan), **attention
        )
        rows = torch.cat([row[:count] for row, count in zip(hidden, counts.tolist(), strict=True)])
        places = torch.cat(split.answers).to(flat.device)
        return torch.zeros_like(flat).index_copy(0, places, rows).view_as(embeds)

    def split_samples(self, batch: PackedBatch) -> SplitTokens:
        """Split each sample after the first end-of-prompt token. A sample without one is a prompt."""
        ids = batch.ids.cpu()
        split = SplitTokens([], [])
        for indices in split_by_sample(batch, torch.arange(ids.numel()).view_as(ids)):
            length = self._count_prompt_tokens(ids.flatten()[indices])
            split.prompts.append(indices[:length])
            split.answers.append(indices[length:])
        return split

    def _count_prompt_tokens(self, ids: Tensor) -> int:
        ends = (ids == self.end_of_prompt_id).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(ids)

    def find_next_position(self, stream: Stream) -> int:
        """Return the position of the token that the decoder generates after a stream: it counts the answer only."""
        return len(stream) - self._count_prompt_tokens(stream.ids)

    def make_row_template(
        self,
        prefix_ids: Sequence[int],
        text_length: int,
        num_questions: int = 1,
        image_shape: tuple[int, int] | None = None,
    ) -> RowTemplate:
        raise ConfigError("an encoder-decoder model is trained without rows of one shape", 'use task = "chat"')

    # ---- costs --------------------------------------------------------------------------------------------------

    def workload(
        self,
        image_sizes: Sequence[tuple[int, int]],
        num_text_tokens: int,
        batch_size: int = 1,
        num_questions: int = 1,
        videos: Sequence[VisualLayout] = (),
        image_counts: Sequence[int] | None = None,
    ) -> vlm_cost.VLMWorkload:
        """Return the workload of a prompt with images, and of the first step of the decoder."""
        one = super().workload(image_sizes, num_text_tokens, batch_size, num_questions, videos, image_counts)
        length = one.tokens // batch_size
        vision = one.vision_workloads or (None, None)
        decoder = Workload.prefill(1, batch_size).with_context(length, batch_size)
        return vlm_cost.VLMWorkload.from_decoder_workload(decoder, *vision, Workload.full_attention(length, batch_size))

    def decode_step_workload(
        self, length: int, image_sizes: Sequence[tuple[int, int]], batch_size: int = 1
    ) -> Workload:
        """Return the workload of decoding one token after a prompt of `length` tokens, whose keys are cached."""
        return Workload.decode(1, batch_size).with_context(length, batch_size).replace(context_tokens=0)

    def cost_components(self, workload: Workload) -> dict[str, vlm_cost.CostComponent]:
        """Return the cost components of the model by name."""
        works = workload.vision_workloads if isinstance(workload, vlm_cost.VLMWorkload) else ()
        encoder = vlm_cost.CostComponent([self.encoder], works[2] if len(works) == 3 else None)
        *others, decoder = super().cost_components(workload).items()
        return dict([*others, ("encoder", encoder), decoder])


def make_prompt_plan(lengths: Sequence[int], queries: int | None = None) -> AttentionPlan:
    """Make the plan in which tokens attend to all tokens of their padded prompt.

    The tokens are those of the prompts themselves, or `queries` tokens for each.
    """
    size = torch.tensor(lengths)[:, None]
    padding = -(torch.arange(max(lengths)) >= size).long()  # (S, P): −1 at padding
    if queries is None:
        return attention_plan(padding)
    return attention_plan(torch.zeros(len(lengths), queries, dtype=torch.long), key_segments=padding)


@cost.count_flops.register
def _(module: PromptEncoder, work: Workload) -> int:
    return cost.count_flops(module.blocks, work)


cost.count_bytes.register(PromptEncoder, cost.sum_child_bytes)
cost.count_flops.register(EncoderDecoderVLM, vlm_cost.count_flops)
cost.count_bytes.register(EncoderDecoderVLM, vlm_cost.count_bytes)
