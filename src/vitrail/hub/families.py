"""The table of families: how a Hugging Face config.json becomes one of our configs, and back."""

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.video import VideoCodec, VideoCodecConfig
from vitrail.encoders import SAM, Hybrid, HybridConfig, PackedViT, PackedViTConfig, SAMConfig, TiledViT, TiledViTConfig
from vitrail.hub.autoencoders import AUTOENCODER_KL, VQ_MODEL
from vitrail.hub.blip2 import BLIP2, BLIP2_TEXT, BLIP2_TOWER
from vitrail.hub.decoders import DECODERS
from vitrail.hub.deepseek_vl import DEEPSEEK_VL
from vitrail.hub.encoders import ENCODER_MODELS, ENCODERS
from vitrail.hub.eva02 import EVA02
from vitrail.hub.family import Family
from vitrail.hub.idefics import IDEFICS
from vitrail.hub.internvl import INTERNVL
from vitrail.hub.llava import LLAVA
from vitrail.hub.llava_next_video import LLAVA_NEXT_VIDEO
from vitrail.hub.llava_onevision import LLAVA_ONEVISION
from vitrail.hub.mllama import MLLAMA
from vitrail.hub.opt import OPT
from vitrail.hub.qlip import QLIP as QLIP_FAMILY
from vitrail.hub.qwen_vl import QWEN_VL
from vitrail.hub.towers_vl import TOWERS_VL
from vitrail.models.answered import Answered, AnsweredConfig
from vitrail.models.detector import Detector, DetectorConfig
from vitrail.models.dino import Dino, DinoConfig
from vitrail.models.genie import Genie, GenieConfig
from vitrail.models.latent_actions import LatentActions, LatentActionsConfig
from vitrail.models.looking import LookingVLM, LookingVLMConfig
from vitrail.models.masked import Masked, MaskedConfig
from vitrail.models.qformer import TextQFormer, TextQFormerConfig
from vitrail.models.qlip import QLIP, QLIPConfig, TaughtCodec, TaughtCodecConfig
from vitrail.models.unified import Unified, UnifiedConfig
from vitrail.models.vlm import VLM, VLMConfig

MODELS: dict[str, tuple[type, type]] = {
    "codec": (CodecConfig, Codec),
    "decoder": (DecoderConfig, Decoder),
    "detector": (DetectorConfig, Detector),
    "masked": (MaskedConfig, Masked),
    "qlip": (QLIPConfig, QLIP),
    "text-qformer": (TextQFormerConfig, TextQFormer),
    "taught-codec": (TaughtCodecConfig, TaughtCodec),
    "dino": (DinoConfig, Dino),
    "unified": (UnifiedConfig, Unified),
    "genie": (GenieConfig, Genie),
    "video-codec": (VideoCodecConfig, VideoCodec),
    "latent-actions": (LatentActionsConfig, LatentActions),
    "vlm": (VLMConfig, VLM),
    "answered-vlm": (AnsweredConfig, Answered),
    "looking-vlm": (LookingVLMConfig, LookingVLM),
    "packed_vit": (PackedViTConfig, PackedViT),
    "tiled_vit": (TiledViTConfig, TiledViT),
    "sam": (SAMConfig, SAM),
    "hybrid": (HybridConfig, Hybrid),
    **ENCODER_MODELS,
}
"""Kinds of our own format → config and model."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(*DECODERS, OPT, *ENCODERS, *TOWERS_VL, BLIP2_TOWER, *LLAVA, *QWEN_VL, MLLAMA, IDEFICS, BLIP2, INTERNVL),
        *(LLAVA_NEXT_VIDEO, LLAVA_ONEVISION, *DEEPSEEK_VL, BLIP2_TEXT, EVA02, AUTOENCODER_KL, VQ_MODEL, QLIP_FAMILY),
    )
}
"""model_type, or the first word of timm's architecture → family; a model is exported as the first that fits."""
