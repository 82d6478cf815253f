"""Chat pipeline of a vision-language model: images, videos and a question in, text out."""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from vitrail import hub
from vitrail.connectors.feature_reduction import AnyReductionConfig
from vitrail.errors import ConfigError, TextError
from vitrail.evals.context import SceneAnswerModel, max_answer_tokens
from vitrail.generate import vlm_generation
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.hub.chat_config import ChatConfig, find_vision_token_ids
from vitrail.hub.checkpoint_info import find_checkpoint, resolve_path
from vitrail.models.chat_layout import (
    FusedQuestions,
    build_chat_parts,
    build_image_parts,
    encode_questions,
    place_questions,
    prepend_bos,
)
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, ImageViews
from vitrail.models.video_inputs import Video, VideoFrames, read_video_frames
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.pipelines.base import find_bundled_model, select_device
from vitrail.pipelines.chat_settings import (
    build_chat_format,
    build_no_video_error,
    find_chat_config,
    select_template,
)
from vitrail.pipelines.generation_config import read_sampling
from vitrail.pipelines.message_parts import build_media_parts, build_text_part, parse_parts, to_template_part
from vitrail.processing.chat_template import ChatTemplate, EncodedChat, Message
from vitrail.processing.image_loading import load_image
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import Stream, build_stream, text_part
from vitrail.stream.packing import pad_streams
from vitrail.stream.stream_builder import STREAM_FIELDS

DEFAULT_IMAGE_SIZE = 224  # pixels of generated scenes for a model that accepts images of any size
DEFAULT_MAX_NEW_TOKENS = 256  # capped by what the context has left


class ChatPrompt(NamedTuple):
    """A conversation as a token stream that ends where the answer starts, with its prepared images and videos."""

    stream: Stream
    images: VisionInputs | ImageViews | None
    videos: VisionInputs | None


class OptionScore(NamedTuple):
    """Score of one answer option.

    logprob     log-probability of the option and its end token
    num_tokens  tokens of the option, with the end token
    is_greedy   whether greedy decoding generates exactly this option
    """

    logprob: float
    num_tokens: int
    is_greedy: bool


class ChatPipeline:
    """Chat with a vision-language model: `vitrail.load(folder)`.

    Messages have the format of transformers: a role, and a text or a list of parts. An image part is
    {"type": "image", "image": …}, with a path or anything else that `load_image` takes. A video part is
    {"type": "video", "video": …}, with a path or a `Video`.

    Decoding is greedy by default. `checkpoint_sampling` are the settings of the checkpoint's generation_config.json.
    """

    def __init__(
        self,
        model: VLM | CrossAttentionVLM,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        chat_config: ChatConfig | None = None,
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_config = chat_config
        self.checkpoint_sampling = GREEDY
        self.vision_token_ids = find_vision_token_ids(model.config, tokenizer)
        # As they are written in a prompt.
        self.vision_tokens = {kind: tokenizer.id_to_token(id) for kind, id in self.vision_token_ids.items()}
        end = None if chat_config is None else chat_config.end_of_turn
        video_token_id = self.vision_token_ids.get("video")
        self.chat_format = build_chat_format(chat_template, chat_config, tokenizer, video_token_id)
        self.stop_ids = (
            *tokenizer.stop_ids,
            *((tokenizer.token_to_id(end),) if end in tokenizer.special_tokens else ()),
        )

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        template: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        reduction: AnyReductionConfig | None = None,
    ) -> "ChatPipeline":
        """Load a checkpoint, in bfloat16 on a GPU if there is one, else in float32 on the CPU.

        template   preset of `ChatTemplate`; default: the template of the checkpoint, else that of its family
        reduction  keep fewer tokens of each image than the checkpoint's config says
        """
        device_name, default_dtype = select_device(device)
        name_or_path = find_bundled_model(name_or_path)
        found = find_checkpoint(resolve_path(name_or_path))
        if not issubclass(found.model_class, VLM | CrossAttentionVLM):
            raise ConfigError(
                f"{name_or_path} is a {found.model_class.__name__} and not a VLM", "give the folder of a VLM"
            )
        tokenizer = hub.load_tokenizer(name_or_path)
        chat_config = find_chat_config(found.model_class, found.config, found.family)
        chat_template = select_template(found.config, tokenizer, chat_config, template)
        if chat_template is None:
            raise TextError(
                f"{found.path} has no chat template", "name a preset: load(…, template='vicuna'), or --template vicuna"
            )
        if reduction is not None:
            _require_vlm_config(found.config).replace(feature_reduction=reduction)
        checkpoint_sampling = read_sampling(found.path)
        # Load the weights last, so that wrong options fail early.
        model = hub.load(name_or_path, dtype=dtype or default_dtype, device=device_name)
        pipeline = cls(model, tokenizer, chat_template, chat_config)
        pipeline.checkpoint_sampling = checkpoint_sampling
        return pipeline if reduction is None else pipeline.with_reduction(reduction)

    def with_reduction(self, reduction: AnyReductionConfig | None) -> "ChatPipeline":
        """Return a pipeline with the same weights and another token reduction; None keeps all image tokens."""
        _require_vlm_config(self.model.config)
        assert isinstance(self.model, VLM)
        pipeline = copy.copy(self)
        pipeline.model = self.model.with_reduction(reduction)
        return pipeline

    # ---- questions and answers ----------------------------------------------------------------------------------

    def ask(
        self, media: Any, question: str, *, num_frames: int | None = None, fps: float | None = None, **options: Any
    ) -> str:
        """Answer a question about one or several images and videos, or about none ([]).

        Media are placed before the question, or at the model's image tokens in it, if the template allows that:
        "Is <image> larger than <image>?" `num_frames` or `fps` set how many frames of a video are sampled; the default
        is the model's config. `options` are those of `stream_chat`.
        """
        return self.chat([self.build_message(media, question, num_frames=num_frames, fps=fps)], **options)

    def ask_batch(
        self, media: Sequence[Any], questions: Sequence[str], *, max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Answer one question about each image, or each list of images, in one batch. The answers equal those of `ask`.

        `max_new_tokens` defaults to 256, or to what the context has left. `options` are those of `generate_texts`.
        """
        if len(media) != len(questions):
            raise ConfigError(f"{len(media)} images and {len(questions)} questions", "give one question for each image")
        prompts = [
            self.build_prompt([self.build_message(item, question)])
            for item, question in zip(media, questions, strict=True)
        ]
        if any(prompt.videos is not None for prompt in prompts):
            raise ConfigError("ask_batch takes no videos", "use ask")
        capacities = [
            self.check_capacity(prompt, 1 if max_new_tokens is None else max_new_tokens) for prompt in prompts
        ]
        limits = [
            min(DEFAULT_MAX_NEW_TOKENS, capacity) if max_new_tokens is None else max_new_tokens
            for capacity in capacities
        ]
        options = {"sampling": GREEDY, "tokenizer": self.tokenizer, "stop_ids": self.stop_ids, **options}
        answers = [""] * len(prompts)
        for length in sorted(set(limits)):  # one length, unless a context is nearly full
            group = [index for index, limit in enumerate(limits) if limit == length]
            images = _merge_images([own for index in group if (own := prompts[index].images) is not None])
            streams = [prompts[index].stream for index in group]
            outputs = vlm_generation.generate_from_streams(
                self.model, streams, images, max_new_tokens=length, **options
            )
            for index, output in zip(group, outputs, strict=True):
                answers[index] = output.text.strip()
        return answers

    def loglikelihood(self, media: Any, question: str, options: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each option as the whole answer: its tokens and the end token."""
        return self.loglikelihoods([(media, question, options)])[0]

    def loglikelihoods(self, requests: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[float]]:
        """Return the log-likelihoods of several requests (media, question, options) in one batch."""
        return [[option.logprob for option in options] for options in self.score_options(requests)]

    @torch.no_grad()
    def score_options(self, requests: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[OptionScore]]:
        """Score the options of several requests (media, question, options) in one batch."""
        streams, images, answers = [], [], []
        for media, question, options in requests:
            turn = self.build_message(media, question)
            prompt, option_ids = self.build_prompt([turn]), [self._encode_answer(turn, option) for option in options]
            if prompt.videos is not None or not option_ids:
                raise ConfigError(
                    "options are scored for images only, and a request needs one option", "remove videos, give options"
                )
            self.check_capacity(prompt, max(map(len, option_ids)))
            streams += [append_ids(prompt.stream, ids) for ids in option_ids]
            images += [prompt.images] * len(option_ids) if prompt.images is not None else []
            answers += option_ids
        batch_images: Any = _merge_images(images)
        hidden = self.model.forward_hidden(pad_streams(streams), batch_images)  # (B, L, W)
        scores = []
        for row, stream, ids in zip(hidden, streams, answers, strict=True):
            logits = self.model.decoder.compute_logits(
                row[len(stream) - len(ids) - 1 : len(stream) - 1]
            ).float()  # (n, V)
            targets = torch.tensor(ids, device=logits.device)
            logprob = float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())
            scores.append(OptionScore(logprob, len(ids), bool(logits.argmax(-1).eq(targets).all())))
        remaining = iter(scores)
        return [[next(remaining) for _ in options] for _, _, options in requests]

    def count_tokens(self, media: Any, question: str, *, max_new_tokens: int = 1) -> int:
        """Count the tokens of a question with its media.

        Raises an error if the context has less than `max_new_tokens` left.
        """
        prompt = self.build_prompt([self.build_message(media, question)])
        self.check_capacity(prompt, max_new_tokens)
        return len(prompt.stream)

    def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Answer a conversation. Any message may contain images and videos. `options` are those of `stream_chat`."""
        return "".join(self.stream_chat(messages, **options)).strip()

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig = GREEDY,
        stop_strings: Sequence[str] = (),
        compiled: bool = False,
    ) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece as it is generated.

        `max_new_tokens` defaults to 256, or to what the context has left. For `compiled` see `generate_from_streams`.
        """
        prompt = self.build_prompt(messages)
        stream, images, videos = prompt
        capacity = self.check_capacity(prompt, 1 if max_new_tokens is None else max_new_tokens)
        pieces = vlm_generation.stream_tokens_from_streams(
            self.model,
            [stream],
            images,
            videos,
            max_new_tokens=min(DEFAULT_MAX_NEW_TOKENS, capacity) if max_new_tokens is None else max_new_tokens,
            sampling=sampling,
            tokenizer=self.tokenizer,
            stop_ids=self.stop_ids,
            stop_strings=stop_strings,
            compiled=compiled,
        )
        return (piece.text for piece in pieces)

    def build_message(
        self, media: Any, question: str, *, num_frames: int | None = None, fps: float | None = None
    ) -> Message:
        """Build the user message of a question about images and videos."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigError("the question is empty", "give a text")
        parts = build_media_parts(media, num_frames, fps)
        placeholders = "|".join(map(re.escape, self.vision_tokens.values()))
        pieces = re.split(f"({placeholders})", question)  # texts, with placeholders in between
        if len(pieces) == 1:
            return {"role": "user", "content": [*parts, build_text_part(question)]}
        places = pieces[1::2]
        if places != [self.vision_tokens.get(part["type"]) for part in parts]:
            kinds = ", ".join(part["type"] for part in parts) or "nothing"
            raise TextError(
                f"the question has {len(places)} placeholders ({' '.join(places)}), but the media are: {kinds}",
                "give one placeholder for each, or none: media then come before the question",
            )
        content = [build_text_part(pieces[0])]
        for part, after in zip(parts, pieces[2::2], strict=True):
            content += [part, build_text_part(after)]
        return {"role": "user", "content": [part for part in content if part.get("text") != ""]}

    def build_scene_answer_model(self, answers: Sequence[str] = ()) -> SceneAnswerModel:
        """Build the model that suites ask about images. `answers` are correct answers that may be long."""
        config, max_new_tokens = self.model.config, max_answer_tokens(self.tokenizer, answers)
        policy: Any = config.policy if isinstance(config, VLMConfig) else config.resolved_policy
        side = getattr(policy, "image_size", DEFAULT_IMAGE_SIZE)
        views = policy.layout(side, side).views  # a policy may enlarge an image
        scale = min(view.source[2 + axis] / view.resized_size[axis] for view in views for axis in (0, 1))

        def answer(pixels: torch.Tensor, questions: list[str]) -> list[str]:
            images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]
            return self.ask_batch(images, questions, max_new_tokens=max_new_tokens)

        return SceneAnswerModel(answer, side, policy.patch_size * scale / side)

    # ---- prompts ------------------------------------------------------------------------------------------------

    def build_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ChatPrompt:
        """Encode a conversation, and tools for its template, and prepare its images and videos."""
        if not messages:
            raise TextError("the conversation has no messages", "give at least one")
        message_parts = [parse_parts(message, f"messages[{index}]") for index, message in enumerate(messages)]
        all_parts = [part for parts in message_parts for part in parts]
        # Templates take media parts without pixels.
        template_messages = [
            {**message, "content": [to_template_part(part) for part in parts]}
            for message, parts in zip(messages, message_parts, strict=True)
        ]
        has_queries = isinstance(self.model, VLM) and self.model.queries is not None
        fused_questions = place_questions(template_messages) if has_queries else None
        template_messages = template_messages if fused_questions is None else fused_questions.messages
        counts = Counter(part["type"] for message in template_messages for part in message["content"])
        ids = self._encode_messages(template_messages, counts, tools)
        images = [load_image(part["image"]) for part in all_parts if part["type"] == "image"]
        video_frames, videos = self._prepare_videos([part["video"] for part in all_parts if part["type"] == "video"])
        prepared_images = self.model.prepare_images(images) if images else None
        if isinstance(prepared_images, VisionInputs) and fused_questions is not None:
            prepared_images = prepared_images._replace(questions=encode_questions(fused_questions, self.tokenizer))
        stream = self._build_stream(ids, prepared_images, videos, video_frames, fused_questions)
        return ChatPrompt(stream, prepared_images, videos)

    def _encode_messages(
        self, messages: Sequence[Message], counts: Counter[str], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Encode messages as ids, with one placeholder id for each image and video."""
        if counts["video"] and "video" not in self.vision_token_ids:
            raise build_no_video_error(self.model, self.chat_config)
        self._check_part_order(messages)
        ids = prepend_bos(
            self.chat_template.encode(messages, self.tokenizer, add_generation_prompt=True, tools=tools),
            self.tokenizer,
            self.vision_token_ids["image"],
        ).ids
        for kind, token_id in self.vision_token_ids.items():
            if ids.count(token_id) != counts[kind]:
                media = {"image": "image(s)", "video": "video(s)"}[kind]
                raise TextError(
                    f"{self.chat_template.name} wrote {ids.count(token_id)} placeholders "
                    f"({self.vision_tokens[kind]}) for "
                    f"{counts[kind]} {media}",
                    "use a template that writes one for each, such as template='vicuna'",
                )
        return ids

    def _encode_answer(self, message: Message, text: str) -> list[int]:
        """Encode a text as the assistant's answer, with its end token."""
        if not text.strip():
            raise ConfigError("an option is empty", "give a text")
        messages = [{**message, "content": [to_template_part(part) for part in message["content"]]}]
        chat = self.chat_template.encode(
            [*messages, {"role": "assistant", "content": [build_text_part(text)]}], self.tokenizer
        )
        ids = [id for id, is_answer in zip(chat.ids, chat.loss_mask, strict=True) if is_answer]
        ends = [length for length, id in enumerate(ids, start=1) if id in self.stop_ids]
        if ends:
            return ids[: ends[0]]  # without the line break that some templates write after the end token
        if not self.stop_ids:
            raise ConfigError("the tokenizer has no end token", "use the tokenizer of the model")
        while ids and not self.tokenizer.decode(ids[-1:]).strip():
            ids.pop()
        return [*ids, self.stop_ids[0]]

    def _prepare_videos(self, videos: Sequence[Video]) -> tuple[list[VideoFrames], VisionInputs | None]:
        if not videos or not isinstance(self.model, VLM):
            return [], None
        video_frames = [read_video_frames(video, self.model.config) for video in videos]
        return video_frames, self.model.prepare_videos([video.pixels for video in video_frames])

    def check_capacity(self, prompt: ChatPrompt, num_new_tokens: int) -> int:
        """Return how many tokens the context has left. Raises an error if they are fewer than `num_new_tokens`."""
        context, prompt_length = self.model.config.decoder.context_length, len(prompt.stream)
        if context - prompt_length < num_new_tokens:
            media_tokens = int((prompt.stream.source >= 0).sum())
            media, fewer_frames = ("images", "") if prompt.videos is None else ("images and videos", "fewer frames, ")
            raise ConfigError(
                f"the prompt has {prompt_length:,} tokens, {media_tokens:,} of them for {media}, "
                f"and {num_new_tokens} more exceed the context length {context:,}",
                f"generate at most {context - prompt_length} tokens"
                if context > prompt_length
                else f"give fewer or smaller {media}, {fewer_frames}or a shorter text",
            )
        return context - prompt_length

    def _check_part_order(self, messages: Sequence[Message]) -> None:
        """Raise an error if the template moves images before text that precedes them in the messages."""
        placeholders = "|".join(map(re.escape, self.vision_tokens.values()))
        texts_before = re.split(placeholders, self.chat_template.render(messages, add_generation_prompt=True))
        pending: list[str] = []
        for part in (part for message in messages for part in message["content"]):
            if part["type"] == "text":
                pending.append(part["text"].strip())
                continue
            rendered = texts_before.pop(0) if texts_before else ""
            misplaced = next(
                (text for text in pending if not re.search(placeholders, text) and text not in rendered), None
            )
            if misplaced:
                raise TextError(
                    f"{self.chat_template.name} writes images before the text {misplaced!r}, which precedes an image",
                    "remove the placeholders from the question: images then come first",
                )
            pending = []

    def _build_stream(
        self,
        ids: list[int],
        images: VisionInputs | ImageViews | None,
        videos: VisionInputs | None,
        video_frames: Sequence[VideoFrames],
        fused_questions: FusedQuestions | None = None,
    ) -> Stream:
        """Build the stream of a prompt: text with image and video tokens, or with marks for cross-attention."""
        config = self.model.config
        if not isinstance(config, VLMConfig):
            return build_stream([text_part(ids)])
        image_parts = (
            build_image_parts(config, images.layouts, fused_questions, self.chat_format.image_text, self.tokenizer)
            if isinstance(images, VisionInputs)
            else ()
        )
        clips = list(zip(() if videos is None else videos.layouts, video_frames, strict=True))
        chat = EncodedChat("", ids, [False] * len(ids))  # no loss
        return build_stream(
            build_chat_parts(chat, image_parts, config, self.chat_format, clips, self.tokenizer), config.rules
        )


def _require_vlm_config(config: Any) -> VLMConfig:
    if not isinstance(config, VLMConfig):
        raise ConfigError("a model with cross-attention has no image tokens to reduce", "remove the reduction")
    return config


def append_ids(stream: Stream, ids: Sequence[int]) -> Stream:
    """Append generated ids to a stream, at the positions that follow its largest one."""
    added = build_stream([text_part(list(ids))])
    positions = added.positions + (stream.positions.max() + 1)
    fields: dict[str, Any] = {name: torch.cat([getattr(stream, name), getattr(added, name)]) for name in STREAM_FIELDS}
    fields["positions"] = torch.cat([stream.positions, positions])
    return replace(stream, **fields)


def _merge_images(batches: Sequence[VisionInputs | ImageViews]) -> VisionInputs | ImageViews | None:
    """Concatenate the prepared images of several prompts into one batch."""
    if not batches:
        return None
    pixels, *rest = zip(*batches, strict=True)
    return type(batches[0])(torch.cat(pixels), *(tuple(item for items in column for item in items) for column in rest))
