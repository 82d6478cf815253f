"""What a stage of a recipe may train: which task, on which model, from which sources."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.codec import Codec
from vitrail.codecs.video import VideoCodec
from vitrail.config import Config
from vitrail.data.captions import captions
from vitrail.data.conversations import ConversationsConfig
from vitrail.data.episodes.source import EpisodesConfig
from vitrail.data.named import NamedConfig
from vitrail.data.scenes.source import ScenesConfig
from vitrail.data.talks import talks
from vitrail.data.text import TextConfig
from vitrail.data.words.pieces import Pieces
from vitrail.hub.lpips import load_lpips
from vitrail.models.answered import Answered
from vitrail.models.clip import Contrastive
from vitrail.models.detector import Detector
from vitrail.models.dino import Dino
from vitrail.models.genie import Genie
from vitrail.models.latent_actions import LatentActions
from vitrail.models.looking import LookingVLM
from vitrail.models.masked import Masked
from vitrail.models.qformer import TextQFormer
from vitrail.models.qlip import QLIP, TaughtCodec
from vitrail.models.unified import Unified
from vitrail.models.vlm import VLM
from vitrail.processing.text import Tokenizer
from vitrail.talker.speech import speech_of
from vitrail.tasks.chat import ChatSettings, ChatTask
from vitrail.tasks.codec import CodecSettings, CodecTask
from vitrail.tasks.contrast import ContrastSettings, ContrastTask
from vitrail.tasks.detect import DetectTask
from vitrail.tasks.dino import DinoSettings, DinoTask
from vitrail.tasks.fuse import FuseSettings, FuseTask
from vitrail.tasks.genie import DynamicsSettings, DynamicsTask, FramesSettings, make_frames_task
from vitrail.tasks.mim import MimSettings, MimTask
from vitrail.tasks.qformer import QFormerSettings, QFormerTask
from vitrail.tasks.qlip import QlipSettings, QlipTask
from vitrail.tasks.text import TextTask
from vitrail.tasks.unified import UnifiedSettings, UnifiedTask
from vitrail.tasks.vlm import VLMSettings, VLMTask
from vitrail.train.task import Task

Sources = dict[str, Any]
PICTURES = (NamedConfig, ScenesConfig)


class TaskKind(NamedTuple):
    """How a stage's task is made: of the model, the sources its samples come from, the tokenizer, and settings."""

    make: Callable[[Any, Sources, Tokenizer | None, Any], Task]
    model: type[nn.Module] | tuple[type[nn.Module], ...]
    sources: tuple[type[Config], ...]
    settings: type[Config] = Config
    told: Callable[[Any], Pieces] | None = None  # what is said of a source's pictures, to train a tokenizer on
    even: bool = True  # whether batches have one shape, or few, as a compiler needs


def _captions(source: Any) -> Pieces:
    return captions(source).pieces


def _chat(model: VLM, sources: Sources, words: Tokenizer | None, settings: ChatSettings) -> ChatTask:
    ended = words is None or settings.template == "ended"
    speech = None if ended else speech_of(model, words, settings.template)
    return ChatTask(model, sources, words, settings, speech)


TASKS: dict[str, TaskKind] = {
    "text": TaskKind(lambda m, sources, words, settings: TextTask(m), Decoder, (TextConfig,)),
    "detect": TaskKind(lambda m, sources, words, settings: DetectTask(m, sources), Detector, (ScenesConfig,)),
    "contrast": TaskKind(ContrastTask, Contrastive, PICTURES, ContrastSettings, _captions),
    "qformer": TaskKind(QFormerTask, TextQFormer, PICTURES, QFormerSettings, _captions),
    "mim": TaskKind(lambda m, sources, words, settings: MimTask(m, sources, settings), Masked, PICTURES, MimSettings),
    "codec": TaskKind(
        lambda m, sources, words, settings: CodecTask(m, sources, settings, load_lpips),
        (Codec, TaughtCodec),
        PICTURES,
        CodecSettings,
    ),
    "qlip": TaskKind(
        lambda m, sources, words, settings: QlipTask(m, sources, words, settings, load_lpips),
        QLIP,
        PICTURES,
        QlipSettings,
        _captions,
    ),
    "unified": TaskKind(
        UnifiedTask,
        Unified,
        (*PICTURES, TextConfig),
        UnifiedSettings,
        lambda source: talks(source, 1).pieces,
    ),
    "vlm": TaskKind(
        VLMTask,
        (VLM, LookingVLM),
        (*PICTURES, TextConfig),
        VLMSettings,
        lambda source: talks(source, 1).pieces,
    ),
    "fuse": TaskKind(FuseTask, Answered, PICTURES, FuseSettings, lambda source: talks(source, 1).pieces),
    "chat": TaskKind(_chat, VLM, (ConversationsConfig,), ChatSettings, lambda source: source.pieces, even=False),
    "video-codec": TaskKind(
        lambda m, sources, words, settings: make_frames_task(m, "codec", settings),
        (Genie, VideoCodec),
        (EpisodesConfig,),
        FramesSettings,
    ),
    "latent-actions": TaskKind(
        lambda m, sources, words, settings: make_frames_task(m, "latent", settings),
        (Genie, LatentActions),
        (EpisodesConfig,),
        FramesSettings,
    ),
    "dynamics": TaskKind(
        lambda m, sources, words, settings: DynamicsTask(m, settings), Genie, (EpisodesConfig,), DynamicsSettings
    ),
    "dino": TaskKind(lambda m, sources, words, settings: DinoTask(m, sources, settings), Dino, PICTURES, DinoSettings),
}
