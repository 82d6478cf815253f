"""Training task for vision-language models on conversations with any number of images and videos.

Data workers load the media and pack conversations into rows, one segment per conversation. This works for every
resolution policy and tower: one view, any-resolution, tiles, and native sizes with DeepStack.

B rows, L tokens of a row, P images, M videos, F token positions that features fill
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.config import Config, NonNegativeFloat
from vitrail.data.conversations import ConversationSource
from vitrail.data.formats import Sample
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.chat_layout import (
    ChatFormat,
    build_chat_parts,
    build_image_parts,
    encode_questions,
    place_questions,
    prepend_bos,
    resolve_template_source,
)
from vitrail.models.video_inputs import Video, VideoFrames, read_video_frames
from vitrail.models.vision_inputs import VisionInputs, get_image_layouts, prepare_images, prepare_videos
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.models.vlm_cost import VLMWorkload
from vitrail.pipelines.chat_settings import build_training_chat_format
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.grid import Grid
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.video_sampling import VideoSamplingConfig
from vitrail.registry import TASKS
from vitrail.stream import TOKEN_KINDS, Part, Stream, build_stream, pack_streams, text_part, voco_groups
from vitrail.stream import PackedBatch as Packed
from vitrail.stream.packing import IGNORE_INDEX, FeaturePlacement
from vitrail.tasks.expert_balance import ExpertBalance
from vitrail.tasks.qa_tokens import answer_loss, step_flops, to_chat_tokenizer
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

BATCH_FIELDS = (
    "ids",
    "kinds",
    "positions",
    "segments",
    "spans",
    "targets",
)  # fields of the packed stream that the forward pass needs
PLACES_PREFIX, ROWS_PREFIX = "places/", "rows/"  # key prefixes: token positions (F,) and feature rows (F,) of a feed
NUM_CHECKED = 8  # conversations per source that are checked before training, besides the longest
GREY_IMAGE = Image.new("RGB", (32, 32), (128, 128, 128))


class ChatSettings(Config):
    """Settings of the chat task.

    max_length      tokens of a row; each row packs as many conversations as fit
    overflow        what happens to a longer conversation: "refuse" stops the run with an error that names it; "cut"
                    truncates it, never inside an image or video, and logs the fraction of truncated conversations
    chat_template   a preset of `ChatTemplate`. Default: the tokenizer's own template, else that of the model's family
                    if the tokenizer has its tokens, else "ended": every turn followed by the end token
    num_frames      frames sampled from every video, or all if it has fewer
    fps             frames sampled per second, instead of `num_frames`
    max_pixels      pixels per frame at most, for towers that read native aspect ratios. Defaults of these three come
                    from the model's video sampling config, which training does not change
    z_loss          weight of logsumexp² of all logits, in training only
    balancing_loss  weight of the load-balancing loss of a mixture of experts, in training only; default: the
                    router_aux_loss_coef of the model's config
    """

    max_length: int = 2048
    overflow: Literal["refuse", "cut"] = "refuse"
    chat_template: str | None = None
    num_frames: int | None = None
    fps: float | None = None
    max_pixels: int | None = None
    z_loss: NonNegativeFloat = 0.0
    balancing_loss: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        if self.max_length < 8:
            raise ConfigError(f"max_length is {self.max_length}", "give at least 8")
        if self.num_frames is not None and self.fps is not None:
            raise ConfigError(f"num_frames = {self.num_frames} and fps = {self.fps} are both set", "set one of the two")

    def video_sampling(self, config: VLMConfig) -> VideoSamplingConfig | None:
        """Video sampling of a model with these settings; None if the model does not support videos."""
        default = config.resolved_video_sampling
        if default is None:
            if (self.num_frames, self.fps, self.max_pixels) != (None, None, None):
                raise ConfigError(
                    "video settings are given, but the model does not support videos",
                    "remove num_frames, fps and max_pixels",
                )
            return None
        sampling = default
        if self.fps is not None:
            sampling = sampling.replace(fps=self.fps, num_frames=None)
        elif self.num_frames is not None:
            sampling = sampling.replace(num_frames=self.num_frames)
        if self.max_pixels is not None:
            if not isinstance(config.tower, PackedViTConfig):
                raise ConfigError(
                    f"max_pixels = {self.max_pixels:,}, but the model resizes frames to "
                    f"{default.square_size} × {default.square_size} pixels",
                    "remove max_pixels",
                )
            min_pixels = min(default.min_pixels, self.max_pixels)
            # max_pixels of these rules is a budget for all frames; max_tokens limits one frame.
            if default.rule in ("qwen3-vl", "glm4v"):
                max_tokens = max(1, self.max_pixels // (config.tower.patch_size * config.tower.spatial_merge_size) ** 2)
                sampling = sampling.replace(min_pixels=min_pixels, max_tokens=max_tokens)
            else:
                sampling = sampling.replace(min_pixels=min_pixels, max_pixels=self.max_pixels)
        return sampling


class EncodedConversation(NamedTuple):
    """A conversation as model inputs."""

    stream: Stream
    images: VisionInputs | None
    image_sizes: list[tuple[int, int]]  # (height, width) of its images
    truncated: bool
    questions: tuple[
        list[Tensor], ...
    ] = ()  # token ids (T,) of the questions about each image, for models whose queries are fused with questions
    videos: VisionInputs | None = None
    num_images: int = 1  # of the whole conversation, also if it is truncated


class ChatTask:
    """Next-token loss on the assistant's turns, end tokens included; other tokens have no loss.

    The loss is a sum, so a token has the same weight in every row, micro-batch and rank.

    A batch without images gets a grey image in a separate sample without targets. So every forward pass runs all
    parts of the model. Videos are a second pass through the tower. If another rank has videos, a batch without any
    gets a grey video whose features fill no token.

    `chat_tokenizer` is the tokenizer with the chat template used in training, for saving with the model.
    """

    def __init__(
        self,
        model: VLM,
        sources: Mapping[str, ConversationSource],
        tokenizer: Tokenizer | None,
        settings: ChatSettings,
        chat_format: ChatFormat | None = None,
    ):
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                "answers need an end token, but there is no tokenizer with one", "add a [tokenizer] table"
            )
        self.model, self.config, self.settings, self.tokenizer = model, model.config, settings, tokenizer
        self.image_token_id = model.config.rules.fill_id
        self.chat_tokenizer = to_chat_tokenizer(tokenizer, model.config.rules.fill_id)
        self.chat_format = (
            ChatFormat(ChatTemplate.from_tokenizer(self.chat_tokenizer)) if chat_format is None else chat_format
        )
        if chat_format is not None:
            self.chat_tokenizer = copy.copy(tokenizer)
            if chat_format.template.source != tokenizer.chat_template:
                self.chat_tokenizer.chat_template = resolve_template_source(chat_format.template, tokenizer)
        self.video_config = model.config.replace(video_sampling=settings.video_sampling(model.config))
        self.balance = ExpertBalance(model, settings.balancing_loss)
        self._sample_losses = ("answers", "cut") if settings.overflow == "cut" else ("answers",)
        self.loss_weights = {name: float(name == "answers") for name in self._sample_losses} | self.balance.loss_weights
        context = model.config.decoder.context_length
        if settings.max_length > context:
            raise ConfigError(
                f"max_length = {settings.max_length} exceeds the decoder's context length of {context}",
                "lower settings.max_length, or use a decoder with a longer context",
            )
        if len(self._grey_conversation.stream) > settings.max_length:
            raise ConfigError(
                f"a small image takes {len(self._grey_conversation.stream)} tokens, "
                f"but max_length is {settings.max_length}",
                "raise settings.max_length, or reduce the tokens per image",
            )
        for name, source in sources.items():
            self._check_source(name, source)

    # ---- samples, in the data workers ---------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pack conversations into a batch of tensors.

        The batch holds the fields of the packed stream and:

        pixels     pixel values of all images
        pictures   (P, 4) height, width, number of images of its conversation, and feature rows of each image
        cut        (B,) whether each conversation was truncated
        frames     pixel values of all video frames, if there are videos
        videos     (M, 4) temporal patches (or frames), patch rows, patch columns and feature rows of each video
        questions  (P,) number of questions about each image, if queries are fused with questions
        asked      (Q, T) token ids of these questions, padded with −1
        """
        conversations = [self.encode_conversation(sample) for sample in samples]
        padded = (
            conversations
            if any(conversation.image_sizes for conversation in conversations)
            else [*conversations, self._grey_conversation]
        )
        packed = pack_streams([conversation.stream for conversation in padded], self.settings.max_length, trim=True)
        batch = {field: getattr(packed, field) for field in BATCH_FIELDS}
        for feed, fill in packed.feature_placements.items():
            batch |= {PLACES_PREFIX + feed: fill.token_indices, ROWS_PREFIX + feed: fill.rows}
        batch["pixels"] = torch.cat(
            [conversation.images.pixels for conversation in padded if conversation.images is not None]
        )
        sizes = [(*size, one.num_images) for one in padded for size in one.image_sizes]
        rows = [rows for rows, _ in packed.feature_placements["image"].blocks]
        batch["image_sizes"] = torch.tensor([(*size, row) for size, row in zip(sizes, rows, strict=True)])
        videos = [conversation.videos for conversation in conversations if conversation.videos is not None]
        if videos:
            rows = [rows for rows, _ in packed.feature_placements["video"].blocks]
            layouts_and_rows = zip((shape for inputs in videos for shape in inputs.layouts), rows, strict=True)
            batch["frames"] = torch.cat([inputs.pixels for inputs in videos])
            batch["videos"] = torch.tensor([(*_video_extent(shape), row) for shape, row in layouts_and_rows])
        batch["cut"] = torch.tensor([conversation.truncated for conversation in conversations])
        if self.model.queries is not None:
            questions = [image_questions for conversation in padded for image_questions in conversation.questions]
            batch["questions"] = torch.tensor([len(image_questions) for image_questions in questions])
            batch["question_ids"] = pad_sequence(
                [ids for image_questions in questions for ids in image_questions], batch_first=True, padding_value=-1
            )
        return batch

    def encode_conversation(self, sample: Sample) -> EncodedConversation:
        """Encode a conversation and load its images and videos, in the order in which they appear."""
        try:
            content = [part for turn in sample.turns for part in turn.parts]
            videos = self._sample_videos(sample, [part.index for part in content if part.kind == "video"])
            video_inputs = prepare_videos(self.config, [video.pixels for video in videos]) if videos else None
            video_parts = [] if video_inputs is None else list(zip(video_inputs.layouts, videos, strict=True))
            fused = None if self.model.queries is None else place_questions(sample.to_messages())
            messages = sample.to_messages() if fused is None else fused.messages
            encoded = prepend_bos(
                self.chat_format.template.encode(messages, self.tokenizer), self.tokenizer, self.image_token_id
            )
            images = [sample.load_image(part.index) for part in content if part.kind == "image"]
            sizes = [(image.height, image.width) for image in images]
            image_parts = build_image_parts(
                self.config,
                get_image_layouts(self.config, sizes),
                fused,
                self.chat_format.image_text,
                self.tokenizer,
            )
            parts = build_chat_parts(encoded, image_parts, self.config, self.chat_format, video_parts, self.tokenizer)
            length, capacity = sum(part.num_tokens for part in parts), self.settings.max_length
            if length > capacity:
                if self.settings.overflow == "refuse":
                    raise ConfigError(
                        f"{length:,} tokens exceed max_length = {capacity:,}",
                        "raise settings.max_length, reduce the tokens per image, sample fewer or smaller video frames "
                        '(settings.num_frames, settings.max_pixels), or set settings.overflow = "cut"',
                    )
                indivisible_kinds = ("video",) if fused is not None else ("video", "image")
                parts = _truncate_parts(parts, capacity, self.config.voco_tokens, indivisible_kinds)
            num_videos, num_images = (
                len({part.source or number for number, part in enumerate(parts) if part.kind == kind})
                for kind in ("video", "image")
            )
            if fused is not None:  # the groups of queries about an image share its features
                num_images = sum(part.kind == "image" for part in parts)
            fused = None if fused is None else fused.truncate_placements(num_images)
            num_images = num_images if fused is None else len(fused.questions)
            stream = build_stream(parts, self.config.rules, name=f"conversation {sample.id:.80}")
        except VitrailError as error:
            raise error.with_prefix(f"conversation {sample.id:.80}") from None
        questions = () if fused is None else encode_questions(fused, self.tokenizer)
        if num_videos < len(videos):
            video_inputs = (
                prepare_videos(self.config, [video.pixels for video in videos[:num_videos]]) if num_videos else None
            )
        image_inputs = prepare_images(self.config, images[:num_images], len(images)) if num_images else None
        return EncodedConversation(
            stream, image_inputs, sizes[:num_images], length > capacity, questions, video_inputs, len(images)
        )

    def _sample_videos(self, sample: Sample, indices: Sequence[int]) -> list[VideoFrames]:
        """Load the sampled frames of the videos."""
        if indices and self.chat_format.video_token_id is None:
            supports_videos = self.config.resolved_video_sampling is not None
            raise ConfigError(
                "the conversation has a video, but "
                + ("the tokenizer has no video token" if supports_videos else "the model does not support videos"),
                "use the tokenizer and chat template of the model's family; some families need <video> among the "
                "special tokens"
                if supports_videos
                else "use a model that supports videos (docs/vlm-video.md), or remove the video",
            )
        return [read_video_frames(Video(sample.videos[index]), self.video_config) for index in indices]

    @cached_property
    def _grey_conversation(self) -> EncodedConversation:
        inputs, size = prepare_images(self.config, [GREY_IMAGE]), (GREY_IMAGE.height, GREY_IMAGE.width)
        stream = build_stream(self.config.make_parts(inputs.layouts[0]), self.config.rules, name="grey")
        # There is no question about it.
        return EncodedConversation(stream, inputs, [size], False, ([torch.zeros(0, dtype=torch.long)],))

    @cached_property
    def _grey_video(self) -> tuple[VisionInputs, int]:
        """A grey video of two frames, and the number of its feature rows."""
        frames = Video([GREY_IMAGE, GREY_IMAGE], timestamps=[0.0, 1.0])
        inputs = prepare_videos(self.config, [read_video_frames(frames, self.video_config).pixels])
        stream = build_stream([self.config.make_video_part(inputs.layouts[0])], self.config.rules, name="grey")
        return inputs, pack_streams([stream], len(stream)).feature_placements["video"].blocks[0][0]

    def _check_source(self, name: str, source: ConversationSource) -> None:
        """Raise an error if no conversation of a source has a target token: its loss would always be 0."""
        indices = {*range(min(len(source), NUM_CHECKED)), *source.extreme_items}
        conversations = [self.encode_conversation(source[item]) for item in sorted(indices)]
        if not any(conversation.stream.num_target_tokens for conversation in conversations):
            raise ConfigError(
                f"no answer within {self.settings.max_length} tokens in {len(conversations)} conversations of {name!r}",
                "raise settings.max_length, or reduce the tokens per image",
            )

    # ---- ranks --------------------------------------------------------------------------------------------------

    def used_parts(self, batch: Batch) -> dict[str, bool]:
        """Videos need a second pass through the tower."""
        return {"video": "videos" in batch}

    def fill_part(self, batch: Batch, part: str) -> Batch:
        (inputs, rows), ids = self._grey_video, batch["ids"]
        video_fields = {
            "frames": inputs.pixels.to(ids.device),
            "videos": ids.new_tensor([(*_video_extent(inputs.layouts[0]), rows)]),
        }
        return batch | {
            **video_fields,
            PLACES_PREFIX + "video": ids.new_zeros(0),
            ROWS_PREFIX + "video": ids.new_zeros(0),
        }

    # ---- losses -------------------------------------------------------------------------------------------------

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count target tokens, and conversations."""
        num_terms = {"answers": int((batch["targets"] != IGNORE_INDEX).sum()), "cut": len(batch["cut"])}
        return {name: num_terms[name] for name in self._sample_losses} | self.balance.count_loss_terms()

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        self.balance.exclude_padding(batch["segments"] >= 0)
        hidden = self.model.forward_hidden(*self._unpack_batch(batch))
        losses = {"answers": self._answer_loss(hidden, batch["targets"]), "cut": batch["cut"].float().sum()}
        return {name: losses[name] for name in self._sample_losses} | self.balance.pop_losses()

    @torch.compiler.disable  # the number of targets differs between batches
    def _answer_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        z = self.settings.z_loss if self.model.training else 0.0  # validation reports the plain loss
        return answer_loss(self.model.decoder, hidden, targets, "sum", z)

    @torch.compiler.disable
    def _unpack_batch(self, batch: Batch) -> tuple[Packed, VisionInputs, VisionInputs | None]:
        """Rebuild the packed stream and the vision inputs from the tensors of a batch.

        Segments and spans move to the CPU, where the attention plan is built.
        """
        image_rows = batch["image_sizes"].tolist()
        layouts = get_image_layouts(self.config, *_sizes_and_counts(batch))
        feed_names = {name.removeprefix(PLACES_PREFIX) for name in batch if name.startswith(PLACES_PREFIX)}
        # The newline feed has one row or two.
        blocks: dict[str, tuple[tuple[int, str], ...]] = {feed: ((1, feed),) for feed in feed_names}
        blocks["image"] = tuple((rows, f"image {n}") for n, (*_, rows) in enumerate(image_rows))
        videos = batch["videos"].tolist() if "videos" in batch else []
        blocks["video"] = tuple((rows, f"video {n}") for n, (*_, rows) in enumerate(videos))
        fills = {
            feed: FeaturePlacement(batch[PLACES_PREFIX + feed], batch[ROWS_PREFIX + feed], blocks[feed])
            for feed in feed_names
        }
        segments, spans = batch["segments"].cpu(), batch["spans"].cpu()
        unused = torch.empty(0)  # per-sample fields, which the forward pass does not use
        packed = Packed(
            **{field: batch[field] for field in ("ids", "kinds", "positions", "targets")},
            segments=segments,
            spans=spans,
            loss_mask=unused,
            source=unused,
            row=unused,
            feature_placements=fills,
            lengths=tuple(_sample_lengths(segments)),
            names=(),
            sources=(),
            samples_without_targets=(),
        )
        dtype = self.model.decoder.embed.weight.dtype
        video_inputs = VisionInputs(batch["frames"].to(dtype), self._video_shapes(batch)) if videos else None
        return packed, VisionInputs(batch["pixels"].to(dtype), layouts, self._image_questions(batch)), video_inputs

    def _video_shapes(self, batch: Batch) -> tuple[VisualLayout, ...]:
        """Layouts of the videos of a batch."""
        return (
            tuple(_video_shape(self.config, *row[:3]) for row in batch["videos"].tolist()) if "videos" in batch else ()
        )

    def _image_questions(self, batch: Batch) -> tuple[Sequence[Tensor], ...]:
        """Token ids of the questions about each image of a batch."""
        if self.model.queries is None:
            return ()
        question_ids = [ids[ids >= 0] for ids in batch["question_ids"].cpu()]
        return tuple(question_ids[end - n : end] for n, end in zip(*_counts_and_ends(batch["questions"]), strict=True))

    # ---- costs --------------------------------------------------------------------------------------------------

    def count_tokens(self, batch: Batch) -> int:
        """Count the tokens of a forward pass, vision tokens included and padding excluded."""
        return int((batch["segments"] >= 0).sum())

    def count_vision_tokens(self, batch: Batch) -> int:
        """Count the tokens of the vision tower in a forward pass."""
        work = self._workload(batch).vision_workloads
        return 0 if not work or work[0] is None else work[0].tokens

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass, vision tower included. The head counts target tokens only; padding is excluded."""
        return sum(flops for _, flops in self._cost_components(batch))

    def count_step_flops(self, batch: Batch) -> float:
        return step_flops(self._cost_components(batch))

    def _cost_components(self, batch: Batch) -> list[tuple[Sequence[nn.Module], int]]:
        """Modules in the order of the forward pass, each with its forward FLOPs."""
        return [
            (component.modules, component.flops)
            for component in self.model.cost_components(self._workload(batch)).values()
        ]

    def _workload(self, batch: Batch) -> VLMWorkload:
        lengths, spans = _sample_lengths(batch["segments"]), batch["spans"]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        for row in spans[(spans > 0).any(1)]:  # bidirectional spans also attend to later tokens
            pairs += sum(n * (n - 1) // 2 for n in row[row > 0].unique(return_counts=True)[1].tolist())
        if self.config.voco_tokens:
            pairs -= _count_masked_pairs(batch["kinds"], batch["segments"])
        num_targets = int((batch["targets"] != IGNORE_INDEX).sum())
        sizes, counts = _sizes_and_counts(batch)
        workload = self.model.workload(sizes, 0, videos=self._video_shapes(batch), image_counts=counts)
        if self.model.queries is not None:  # queries process all images in one batch, padded to the longest
            max_lengths = [max(map(len, column)) for column in zip_longest(*self._image_questions(batch), fillvalue=())]
            max_features = max(self.config.count_connector_tokens(self.config.policy.layout(*size)) for size in sizes)
            workload = workload.replace(
                vision_workloads=(
                    *workload.vision_workloads[:2],
                    self.model.queries.workload(max_features, len(sizes), max_lengths),
                )
            )
        return workload.replace(
            tokens=sum(lengths),
            attention_pairs=pairs,
            sequences=len(lengths),
            cached_tokens=0,
            logit_tokens=num_targets,
        )


def _video_extent(shape: VisualLayout) -> tuple[int, int, int]:
    """Extent of a video: temporal patches, patch rows and columns; or the number of frames, 0, 0 for tiled policies."""
    return (shape.t, shape.h, shape.w) if isinstance(shape, Grid) else (len(shape.views), 0, 0)


def _video_shape(config: VLMConfig, t: int, h: int, w: int) -> VisualLayout:
    """Layout of a video with the given extent."""
    policy = config.policy
    if isinstance(policy, TilesPolicy | AnyResPolicy | SplitPolicy):
        return policy.layout_video(t)
    assert isinstance(config.tower, PackedViTConfig)
    return Grid(t=t, h=h, w=w, merge_size=config.tower.spatial_merge_size)


def _sizes_and_counts(batch: Batch) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the (height, width) of the images of a batch, and the numbers of images of their conversations."""
    rows = batch["image_sizes"].tolist()
    return [(height, width) for height, width, *_ in rows], [count for _, _, count, _ in rows]


def _sample_lengths(segments: Tensor) -> list[int]:
    """Number of tokens of each sample."""
    return segments[segments >= 0].bincount().tolist()


def _counts_and_ends(counts: Tensor) -> tuple[list[int], list[int]]:
    """The counts as a list, and their cumulative sums."""
    return counts.tolist(), counts.cumsum(0).tolist()


def _count_masked_pairs(kinds: Tensor, segments: Tensor) -> int:
    """Count pairs of a text token and an image token that are masked because VoCo queries replace the image."""
    image, query = (kinds == TOKEN_KINDS[kind].id for kind in ("image", "query"))
    groups, num_pairs = voco_groups(image, query), 0
    for row, group in zip(segments, groups, strict=True):
        for group_id in group[group > 0].unique().tolist():
            members, first = group.abs() == group_id, int((group == group_id).nonzero()[0])
            following = int((row == row[first]).nonzero()[-1]) - int(members.nonzero()[-1])
            num_pairs += int((group == group_id).sum()) * following
    return num_pairs


def _truncate_parts(
    parts: Sequence[Part], capacity: int, image_queries: int = 0, whole_kinds: Sequence[str] = ("video",)
) -> list[Part]:
    """Truncate parts to `capacity` tokens.

    An image that does not fit together with its `image_queries` is dropped with everything after it. A video or image
    of several parts that does not fit completely is dropped as a whole, if it is of `whole_kinds`.
    """
    kept_parts: list[Part] = []
    for part in parts:
        if part.num_tokens + image_queries * (part.kind == "image") > capacity:
            if part.kind == "text" and capacity:
                assert part.ids is not None
                kept_parts.append(
                    text_part(
                        part.ids[:capacity],
                        part.loss_mask if isinstance(part.loss_mask, bool) else part.loss_mask[:capacity],
                    )
                )
            break
        kept_parts.append(part)
        capacity -= part.num_tokens
    dropped = (part for part in parts[len(kept_parts) :] if part.kind in whole_kinds)
    incomplete = {part.source for part in dropped if part.source is not None}
    end = next((n for n, part in enumerate(kept_parts) if part.source in incomplete), len(kept_parts))
    return kept_parts[:end]


def _make_task(
    model: VLM, sources: Mapping[str, ConversationSource], tokenizer: Tokenizer | None, settings: ChatSettings
) -> ChatTask:
    without_template = tokenizer is None or settings.chat_template == "ended"
    chat_format = None if without_template else build_training_chat_format(model, tokenizer, settings.chat_template)
    return ChatTask(model, sources, tokenizer, settings, chat_format)


TASKS.register(
    "chat",
    TaskSpec(_make_task, VLM, ("conversations",), ChatSettings, lambda source: source.pieces, fixed_shape=False),
)
