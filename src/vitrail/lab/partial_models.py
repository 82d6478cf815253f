"""Wrappers for the ledger of models whose passes use only some components.

Unused components count as weights in memory. They are neither computed nor read.
"""

import math

from torch import nn

from vitrail.models.genie_model import Genie, GenieConfig
from vitrail.models.unified_model import UnifiedConfig, UnifiedModel
from vitrail.models.vlm_cost import CostComponent, VLMWorkload, count_bytes, count_flops
from vitrail.nn import Workload, cost


class UnifiedReadingModel(nn.Module):
    """A unified model that answers questions about images of its own size.

    The encoder of its codec is the tower and a linear layer the connector. The components for drawing are unused.
    """

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        self.config, self.model = config, UnifiedModel(config)

    def workload(self, num_images: int, num_words: int, batch_size: int = 1) -> VLMWorkload:
        """Return the workload of `batch_size` prompts of images and text.

        An image is a start token and its codes, with bidirectional attention among them.
        """
        one = 1 + math.prod(self.model.grid)
        prompt = Workload.prefill(num_images * one + num_words, batch_size)
        both = batch_size * num_images * one * (one - 1) // 2
        prompt = prompt.replace(
            attention_pairs=prompt.attention_pairs + both, context_tokens=batch_size * num_images * one
        )
        return VLMWorkload.from_decoder_workload(
            prompt, *([self.model.codec.workload(batch_size * num_images)] if num_images else [])
        )

    def cost_components(self, workload: Workload) -> dict[str, CostComponent]:
        model = self.model
        vision_workload = (
            workload.vision_workloads[0] if isinstance(workload, VLMWorkload) and workload.vision_workloads else None
        )
        codec, loose = model.codec, [*model.mark_embed.parameters(), *model.position_embedding.parameters()]
        draws = [
            codec.pre_quant_proj,
            codec.quantizer,
            codec.post_quant_proj,
            codec.decoder,
            model.code_proj,
            model.head,
        ]
        return {
            "tower": CostComponent([codec.encoder], vision_workload),
            "connector": CostComponent([model.image_proj], vision_workload, extra_parameters=loose),
            "drawing": CostComponent(draws, None),
            "decoder": CostComponent([model.decoder], workload),
        }


class WorldDynamicsModel(nn.Module):
    """The dynamics of a world model over a video as long as their memory. Codec and latent actions are unused."""

    def __init__(self, config: GenieConfig):
        super().__init__()
        self.config, self.model = config, Genie(config)

    def workload(self, batch_size: int = 1) -> Workload:
        return self.model.workload(self.config.dynamics.transformer.context_frames, batch_size)

    def cost_components(self, workload: Workload) -> dict[str, CostComponent]:
        rests = [part for part in (self.model.codec, self.model.latent) if part is not None]
        return {"dynamics": CostComponent([self.model.dynamics], workload), "the rest": CostComponent(rests, None)}


for _kind in (UnifiedReadingModel, WorldDynamicsModel):
    cost.count_flops.register(_kind, count_flops)
    cost.count_bytes.register(_kind, count_bytes)
