"""Models of which a pass leaves parts alone, for the ledger: what rests is weighed, and neither computed nor read."""

import math

from torch import nn

from vitrail.models.genie import Genie, GenieConfig
from vitrail.models.seeing import Leg, SeeingWork, bytes, flops
from vitrail.models.unified import Unified, UnifiedConfig
from vitrail.nn import Work, cost


class Reading(nn.Module):
    """A unified model that is asked about pictures of its own size: its codec's encoder is the tower, a linear layer
    the connector, and what draws rests."""

    def __init__(self, config: UnifiedConfig):
        super().__init__()
        self.config, self.model = config, Unified(config)

    def work(self, pictures: int, words: int, batch: int = 1) -> SeeingWork:
        """Of a prompt of so many pictures and words, `batch` times. A picture is a mark and its codes, which all see
        each other."""
        one = 1 + math.prod(self.model.grid)
        prompt = Work.prefill(pictures * one + words, batch)
        both = batch * pictures * one * (one - 1) // 2
        prompt = prompt.with_(pairs=prompt.pairs + both, context=batch * pictures * one)
        return SeeingWork.of(prompt, *([self.model.codec.work(batch * pictures)] if pictures else []))

    def legs(self, work: Work) -> dict[str, Leg]:
        model = self.model
        seen = work.looks[0] if isinstance(work, SeeingWork) and work.looks else None
        codec, loose = model.codec, [*model.marks.parameters(), *model.place.parameters()]
        draws = [codec.into, codec.quantizer, codec.out_of, codec.decoder, model.code, model.head]
        return {
            "tower": Leg([codec.encoder], seen),
            "connector": Leg([model.read], seen, loose=loose),
            "drawing": Leg(draws, None),
            "decoder": Leg([model.decoder], work),
        }


class Playing(nn.Module):
    """A world whose dynamics are shown a video as long as their memory. The codec and latent actions rest."""

    def __init__(self, config: GenieConfig):
        super().__init__()
        self.config, self.model = config, Genie(config)

    def work(self, batch: int = 1) -> Work:
        return self.model.work(self.config.dynamics.transformer.memory, batch)

    def legs(self, work: Work) -> dict[str, Leg]:
        rests = [part for part in (self.model.codec, self.model.latent) if part is not None]
        return {"dynamics": Leg([self.model.dynamics], work), "the rest": Leg(rests, None)}


for _kind in (Reading, Playing):
    cost.flops.register(_kind, flops)
    cost.bytes.register(_kind, bytes)
