"""Our computations of published figures, for `experiments.published_figures.figure_table`.

Shapes: N pairs, n tokens, D width.
"""

import torch
from torch.nn.functional import normalize

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.connectors import QFormer, QFormerConfig
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.encoders.vit import ViT
from vitrail.evals.metrics import compression_ratio
from vitrail.lab.cost_ledger import TRAINING_FLOPS_FACTOR, compute_ledger
from vitrail.lab.divergence import measure_divergence
from vitrail.lab.system_specs import GAIA_CONFIG, GAIA_FRAME_TOKENS, build_genie_dynamics, get_system_cost
from vitrail.models.presets import VLM_PRESETS
from vitrail.models.vlm import VLM
from vitrail.nn import Workload, cost
from vitrail.objectives.contrastive_loss import reference_clip_loss

GAIA_IMAGES, GAIA_HZ = 420e6, 6.25
"""Training images (4,700 hours at 25 frames/s), and frames per second that the world model generates."""

BERT_VOCAB_SIZE, BERT_POSITIONS = 30_522, 512
NUM_BATCHES = 400


def build_vit(name: str) -> ViT:
    with torch.device("meta"):
        return ViT(VIT_PRESETS[name])


def count_vit_parameters(name: str) -> int:
    return sum(p.numel() for p in build_vit(name).parameters())


def compute_compression_ratio(name: str) -> float:
    """Compute bits of the pixels of an image / bits of its codes, for a codec preset."""
    with torch.device("meta"):
        codec = Codec(CODEC_PRESETS[name])
    return compression_ratio(codec.bits, codec.workload().tokens, *codec.image_size)


def count_image_tokens(name: str, **options) -> int:
    return compute_ledger(name, devices=(), **options).image_tokens


def count_component_parameters(name: str, component: str) -> int:
    return compute_ledger(name, devices=()).components[component].parameters


def count_qformer_parameters() -> int:
    """Count the parameters of BLIP-2's Q-Former in its first training stage.

    It includes the text MLPs and embeddings (BERT's vocabulary, one start token, 512 positions), and excludes the
    projection to a language model.
    """
    config = VLM_PRESETS["blip2-opt-2.7b"].connector
    assert isinstance(config, QFormerConfig)
    with torch.device("meta"):
        model = QFormer(config.replace(use_text=True))
    texts = (BERT_VOCAB_SIZE + 1 + BERT_POSITIONS) * config.width
    return texts + sum(p.numel() for name, p in model.named_parameters() if not name.startswith("project."))


def compute_patch_compression(bits: int, factor: int) -> float:
    """Compute bits of the pixels of a patch / bits of its codes."""
    return compression_ratio(bits, 1, factor, factor)


# ---- token-scaling ----------------------------------------------------------------------------------------------


def compute_hd9_workload() -> tuple[Workload, int]:
    """Compute the tower's workload of an HD-9 image, and the tokens that the queries attend to."""
    config = VLM_PRESETS["token-scaling"]
    with torch.device("meta"):
        model = VLM(config)
    return model.workload([(1008, 1008)], 1).vision_workloads[0], config.count_connector_tokens(
        config.policy.layout(1008, 1008)
    )


def count_hd9_patches() -> int:
    tower, _ = compute_hd9_workload()
    return tower.tokens - tower.sequences * VIT_PRESETS["clip-l14-336"].num_prefix_tokens


def compute_patches_per_token() -> float:
    """Compute the number of patches merged into one token."""
    tower, tokens = compute_hd9_workload()
    return count_hd9_patches() / (tokens - tower.sequences)


def count_table_7_macs(queries: int) -> float:
    """Count the multiply-adds of the token-scaling model's prefill with 16 text tokens and all ten views."""
    config = VLM_PRESETS["token-scaling"]
    assert config.queries is not None
    config = config.replace(queries=config.queries.replace(first_queries=queries))
    return compute_ledger(config, context_length=16, devices=()).forward_flops / 2


def compute_table_7_slope() -> float:
    return (count_table_7_macs(384) - count_table_7_macs(1)) / (384 - 1)


def compute_squared_distance(degrees: float, n: int) -> float:
    """Compute D² after n unit states: the first is common, the others lie `degrees` to either side of it."""
    turn = torch.deg2rad(torch.tensor([0.0] + [degrees] * (n - 1), dtype=torch.float64))
    a, b = (torch.stack([turn.cos(), side * turn.sin()], -1)[None] for side in (1, -1))  # (1, n, 2)
    return float(measure_divergence(a, b).squared_distance[n - 1])


# ---- GAIA-1 and Genie -------------------------------------------------------------------------------------------


def count_gaia_training_flops() -> float:
    """Count the training FLOPs of all weight products for one epoch over all image tokens."""
    with torch.device("meta"):
        model = Decoder(GAIA_CONFIG)
    return (
        TRAINING_FLOPS_FACTOR
        * cost.count_flops(model, Workload(tokens=1, attention_pairs=0))
        * GAIA_IMAGES
        * GAIA_FRAME_TOKENS
    )


def compute_gaia_tokens_per_parameter() -> float:
    """Compute image tokens of training / parameters of the world model."""
    return (
        GAIA_IMAGES
        * GAIA_FRAME_TOKENS
        / get_system_cost("gaia-1", devices=(), context_lengths=()).components["world model"]
    )


def compute_gaia_frame_seconds(device: str) -> float:
    """Compute the roofline seconds of a frame at the full context."""
    found = get_system_cost("gaia-1", devices=[device], context_lengths=())
    return found.latency[device][found.own_context].seconds


def count_genie_parameters() -> int:
    """Count the parameters of the dynamics with an MLP of four times the width."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_genie_dynamics(4 * 5120).parameters())


# ---- others -----------------------------------------------------------------------------------------------------


def compute_two_tower_seconds() -> float:
    return compute_ledger("prismatic-224", devices=["orin"]).rooflines[0].forward.roofline


def count_system_parameters(name: str) -> int:
    return get_system_cost(name, devices=(), context_lengths=()).parameters


def count_codec_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Codec(CODEC_PRESETS[name]).parameters())


def compute_initial_clip_loss(N: int, D: int, scale: float) -> float:
    """Compute the mean CLIP loss over batches of random unit vectors."""
    generator = torch.Generator().manual_seed(0)
    u, v = (normalize(torch.randn(NUM_BATCHES, N, D, generator=generator), dim=-1) for _ in range(2))
    return sum(float(reference_clip_loss(a, b, scale)) for a, b in zip(u, v, strict=True)) / NUM_BATCHES
