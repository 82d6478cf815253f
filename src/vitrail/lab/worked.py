"""Figures that texts tell, worked out: what `vitrail.lab.told` holds them against.

N pairs, n tokens, D width
"""

import torch
from torch.nn.functional import normalize

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODECS
from vitrail.connectors import QFormer, QFormerConfig
from vitrail.encoders.presets import VITS
from vitrail.encoders.vit import ViT
from vitrail.evals.metrics import times_smaller
from vitrail.lab.audit import GAIA, GAIA_FRAME
from vitrail.lab.divergence import measure
from vitrail.lab.ledger import TRAINING, ledger
from vitrail.lab.systems import genie_dynamics, system
from vitrail.models.presets import VLMS
from vitrail.models.vlm import VLM
from vitrail.nn import Work, cost
from vitrail.objectives.contrastive import plain_clip_loss

GAIA_IMAGES, GAIA_HZ = 420e6, 6.25
"""4,700 hours at 25 frames a second; frames a second that the world model dreams in."""

BERT_WORDS, BERT_POSITIONS = 30_522, 512
DRAWS = 400


def vit(name: str) -> ViT:
    with torch.device("meta"):
        return ViT(VITS[name])


def vit_parameters(name: str) -> int:
    return sum(p.numel() for p in vit(name).parameters())


def seen(name: str, **more) -> int:
    return ledger(name, devices=(), **more).seen


def part(name: str, of: str) -> int:
    return ledger(name, devices=()).parts[of].parameters


def whole_qformer() -> int:
    """BLIP-2's Q-Former as it is first trained: MLPs and embeddings for texts too (BERT's words and one that begins a
    caption, 512 positions), and no projection to a language model yet."""
    config = VLMS["blip2-opt-2.7b"].connector
    assert isinstance(config, QFormerConfig)
    with torch.device("meta"):
        model = QFormer(config.with_(text=True))
    texts = (BERT_WORDS + 1 + BERT_POSITIONS) * config.width
    return texts + sum(p.numel() for name, p in model.named_parameters() if not name.startswith("project."))


def fewer(bits: int, factor: int) -> float:
    """Times fewer bits than the pixels of a patch."""
    return times_smaller(bits, 1, factor, factor)


# ---- token-scaling ----------------------------------------------------------------------------------------------


def views() -> tuple[Work, int]:
    """The tower's work for a picture in HD-9, and the tokens that queries then read."""
    config = VLMS["token-scaling"]
    with torch.device("meta"):
        model = VLM(config)
    return model.work([(1008, 1008)], 1).looks[0], config.given(config.policy.cut(1008, 1008))


def patches() -> int:
    tower, _ = views()
    return tower.tokens - tower.rows * VITS["clip-l14-336"].prefix


def merged() -> float:
    """Patches that become one token."""
    tower, tokens = views()
    return patches() / (tokens - tower.rows)


def table_7(queries: int) -> float:
    """Multiply-adds of token-scaling's prefill with so many queries, 16 words and all ten views."""
    config = VLMS["token-scaling"]
    assert config.queries is not None
    config = config.with_(queries=config.queries.with_(first=queries))
    return ledger(config, context=16, devices=()).forward / 2


def slope() -> float:
    return (table_7(384) - table_7(1)) / (384 - 1)


def squared_distance(degrees: float, n: int) -> float:
    """D² behind n unit states: the first that both branches share, others so far to either side of it."""
    turn = torch.deg2rad(torch.tensor([0.0] + [degrees] * (n - 1), dtype=torch.float64))
    a, b = (torch.stack([turn.cos(), side * turn.sin()], -1)[None] for side in (1, -1))  # (1, n, 2)
    return float(measure(a, b).square[n - 1])


# ---- GAIA-1 and Genie -------------------------------------------------------------------------------------------


def gaia_training() -> float:
    """FLOPs of all products with weights for every token of every image, once."""
    with torch.device("meta"):
        model = Decoder(GAIA)
    return TRAINING * cost.flops(model, Work(tokens=1, pairs=0)) * GAIA_IMAGES * GAIA_FRAME


def gaia_ratio() -> float:
    """Tokens of the images to parameters of the world model."""
    return GAIA_IMAGES * GAIA_FRAME / system("gaia-1", devices=(), lengths=()).parts["world model"]


def gaia_seconds(device: str) -> float:
    """A frame at the full context, at least."""
    found = system("gaia-1", devices=[device], lengths=())
    return found.reach[device][found.own].seconds


def genie() -> int:
    """Parameters of the dynamics with an MLP of four times the width."""
    with torch.device("meta"):
        return sum(p.numel() for p in genie_dynamics(4 * 5120).parameters())


# ---- others -----------------------------------------------------------------------------------------------------


def two_towers() -> float:
    return ledger("prismatic-224", devices=["orin"]).floors[0].forward.floor


def parameters(name: str) -> int:
    return system(name, devices=(), lengths=()).parameters


def codec_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Codec(CODECS[name]).parameters())


def clip_at_start(N: int, D: int, scale: float) -> float:
    """The mean of CLIP's loss over batches of unrelated unit vectors."""
    chance = torch.Generator().manual_seed(0)
    u, v = (normalize(torch.randn(DRAWS, N, D, generator=chance), dim=-1) for _ in range(2))
    return sum(float(plain_clip_loss(a, b, scale)) for a, b in zip(u, v, strict=True)) / DRAWS
