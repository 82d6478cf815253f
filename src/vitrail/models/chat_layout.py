"""Chat layout: token ids of a conversation, with image and video parts at their special tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import TextError
from vitrail.models.video_inputs import VideoFrames
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.processing.chat_template import ChatTemplate, EncodedChat, Message
from vitrail.processing.chat_template_presets import bind_variables
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import (
    POSITION_RULES,
    Part,
    format_frame_labels,
    format_timestamp,
    interleave_patches,
    text_part,
)

ImageText = Callable[[ImageLayout, int], list[str]]


class ChatFormat(NamedTuple):
    """Chat format of a model.

    image_prefix_ids, image_suffix_ids  ids that enclose an image outside of the template
    image_text                          layout and number of an image → texts before each of its views, or spans with
                                        newlines, and after the last
    """

    template: ChatTemplate
    image_prefix_ids: Sequence[int] = ()
    image_suffix_ids: Sequence[int] = ()
    video_token_id: int | None = None
    image_text: ImageText | None = None


def prepend_bos(chat: EncodedChat, tokenizer: Tokenizer, image_token_id: int) -> EncodedChat:
    """Prepend BOS if the tokenizer starts every text with it and the template does not."""
    prefix = tokenizer.encode("", add_special_tokens=True)[:1]
    first = next(([id] for id in chat.ids if id != image_token_id), [])  # in BLIP-2, images precede BOS
    if prefix != [tokenizer.bos_token_id] or first == prefix:
        return chat
    return chat._replace(ids=prefix + chat.ids, loss_mask=[False, *chat.loss_mask])


class FusedQuestions(NamedTuple):
    """Conversation prepared for question-fused queries."""

    messages: list[Message]  # with an image placeholder for each group of queries
    placements: list[tuple[int, int]]  # image index and question index of each placeholder
    questions: list[list[str]]  # questions about each image

    def truncate_placements(self, num_placements: int) -> "FusedQuestions":
        """Truncate to the first `num_placements` placeholders."""
        placements = self.placements[:num_placements]
        images = {image for image, _ in placements}
        counts = [sum(image == p for image, _ in placements) for p in sorted(images)]
        questions = [own[:n] for own, n in zip(self.questions, counts, strict=False)]
        return FusedQuestions(self.messages, placements, questions)


def place_questions(messages: Sequence[Message]) -> FusedQuestions:
    """Insert placeholders for question-fused queries.

    Every question is asked about all images so far. So it is preceded by placeholders for the queries of earlier
    images; new images have their placeholders where they appear.
    """
    result: list[Message] = []
    places: list[tuple[int, int]] = []
    questions: list[list[str]] = []
    for number, message in enumerate(messages):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        new = sum(part["type"] == "image" for part in parts)
        if message["role"] != "user":
            if new:
                raise TextError(
                    f"messages[{number}] has an image outside of a user turn, but fused queries need a question",
                    "put the image into a user turn",
                )
            result.append(message)
            continue
        num_earlier = len(questions)
        places += [(image, len(own)) for image, own in enumerate(questions)]
        places += [(num_earlier + image, 0) for image in range(new)]
        questions += [[] for _ in range(new)]
        question = "".join(part.get("text", "") for part in parts)
        for own in questions:
            own.append(question)
        result.append({**message, "content": [{"type": "image"}] * num_earlier + parts})
    return FusedQuestions(result, places, questions)


def encode_questions(fused_questions: FusedQuestions, tokenizer: Tokenizer) -> tuple[list[Tensor], ...]:
    """Encode the questions about each image to ids (T,)."""
    return tuple(
        [torch.tensor(tokenizer.encode(text, literal=True), dtype=torch.long) for text in own]
        for own in fused_questions.questions
    )


def build_image_parts(
    config: VLMConfig,
    layouts: Sequence[VisualLayout],
    fused_questions: FusedQuestions | None = None,
    image_text: ImageText | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[list[Part]]:
    """Build the stream parts at each image placeholder: the image, or one group of fused queries.

    The tokenizer is needed with `image_text`.
    """
    if fused_questions is None:
        return [
            config.make_parts(shape)
            if image_text is None or tokenizer is None or not isinstance(shape, ImageLayout)
            else _interleave_text(
                config.make_parts(shape), config.count_view_tokens(shape), image_text(shape, number), tokenizer
            )
            for number, shape in enumerate(layouts)
        ]
    groups = [config.make_parts(shape, len(own)) for shape, own in zip(layouts, fused_questions.questions, strict=True)]
    return [[groups[image][question]] for image, question in fused_questions.placements]


def _interleave_text(
    parts: Sequence[Part], counts: Sequence[int], texts: Sequence[str], tokenizer: Tokenizer
) -> list[Part]:
    """Split an image into its views of `counts` tokens, with a text before each and after the last.

    A feature reduction leaves the same number of tokens of every view. Views that are stitched to rows with newlines
    are split into their spans instead (Molmo).
    """
    image, *others = parts
    shapes: Sequence[ImageLayout | int] = counts
    if isinstance(image.shape, ImageLayout) and any(span.newline != "none" for span in image.shape.spans):
        shapes = [image.shape.replace(spans=(span,)) for span in image.shape.spans]
        counts = [span.size[0] * span.size[1] for span in image.shape.spans]  # newlines have ids
    elif sum(counts) != image.num_tokens:
        counts = [image.num_tokens // len(counts)] * len(counts)
        shapes = counts
    source, starts = object(), [0, *accumulate(counts)]
    views = [
        replace(image, shape=shape, source=source, first_row=start)
        for shape, start in zip(shapes, starts, strict=False)
    ]
    text_parts = [text_part(tokenizer.encode(text)) for text in texts]
    between = [part for pair in zip(text_parts, views, strict=False) for part in pair]
    return [*between, text_parts[-1], *others]


def build_chat_parts(
    chat: EncodedChat,
    image_parts: Sequence[Sequence[Part]],
    config: VLMConfig,
    chat_format: ChatFormat,
    videos: Sequence[tuple[VisualLayout, VideoFrames]] = (),
    tokenizer: Tokenizer | None = None,
) -> list[Part]:
    """Build the stream parts of a conversation: text with its loss mask, and visual parts at the special tokens.

    Videos may add text, such as timestamps, for which the tokenizer is needed.
    """
    remaining_images, remaining_videos = iter(image_parts), iter(videos)
    for mark, media, name in (
        (config.rules.fill_id, image_parts, "images"),
        (chat_format.video_token_id, videos, "videos"),
    ):
        if mark is not None and (places := chat.ids.count(mark)) != len(media):
            raise TextError(
                f"{chat_format.template.name} wrote {places} placeholders for {len(media)} {name}",
                "use a template that writes one for each, such as template='vicuna'",
            )
    parts, start = [], 0
    before, after = list(chat_format.image_prefix_ids), list(chat_format.image_suffix_ids)
    for at, id in enumerate(chat.ids):
        if id == config.rules.fill_id:
            ids = chat.ids[start:at] + before
            parts += [
                text_part(ids, [*chat.loss_mask[start:at], *[False] * len(before)]),
                *next(remaining_images),
                text_part(after),
            ]
            start = at + 1
        elif id == chat_format.video_token_id:
            assert tokenizer is not None
            video_parts, start = _build_video_parts(
                chat, start, at, *next(remaining_videos), config, chat_format, tokenizer
            )
            parts += video_parts
    parts.append(text_part(chat.ids[start:], chat.loss_mask[start:]))
    return [part for part in parts if part.num_tokens]


def _build_video_parts(
    chat: EncodedChat,
    start: int,
    at: int,
    shape: VisualLayout,
    frames: VideoFrames,
    config: VLMConfig,
    format_ids: ChatFormat,
    tokenizer: Tokenizer,
) -> tuple[list[Part], int]:
    """Build the text from `start` and the video at `at`; also return where the following text starts.

    A video is one run of tokens. In Qwen3-VL each temporal patch follows its timestamp, in SmolVLM each frame, and in
    InternVL each frame its number. In GLM-4V the second of each temporal patch follows it.
    """
    prefix, loss = list(chat.ids[start:at]), list(chat.loss_mask[start:at])
    clip, next_start = config.make_video_part(shape, seconds=frames.seconds_per_patch), at + 1
    opening, closing = list(format_ids.image_prefix_ids), list(format_ids.image_suffix_ids)
    rule = None if config.resolved_video_sampling is None else config.resolved_video_sampling.rule
    if rule == "glm4v":
        start_id, end_id = (config.vision_token_ids[f"image_{side}"] for side in ("start", "end"))
        seconds = [tokenizer.encode(str(int(time)), literal=True) for time in frames.timestamps]
        between = [text_part([end_id, *ids, start_id]) for ids in seconds[:-1]]
        patches = interleave_patches(clip, [text_part([*prefix, start_id], [*loss, False]), *between])
        return [*patches, text_part([end_id, *seconds[-1]])], next_start
    if rule == "smolvlm":
        labels = format_frame_labels(frames.timestamps, frames.seconds_per_patch * len(frames.timestamps))
        if format_ids.image_text is not None and isinstance(config.policy, SplitPolicy):
            opening, closing = map(tokenizer.encode, format_ids.image_text(config.policy.layout_video(1), 0))
    elif rule == "internvl":
        labels = [f"Frame{n}: " for n in range(1, len(frames.timestamps) + 1)]
        labels[1:] = [f"\n{text}" for text in labels[1:]]
    elif POSITION_RULES[config.rules.positions].per_frame:
        opening, closing = [config.vision_token_ids["vision_start"]], [config.vision_token_ids["vision_end"]]
        if (prefix[-1:], chat.ids[next_start : next_start + 1]) == (
            opening,
            closing,
        ):  # they enclose each patch instead
            prefix, loss, next_start = prefix[:-1], loss[:-1], next_start + 1
        labels = [format_timestamp(time, config.rules.timestamps) for time in frames.timestamps]
    else:
        return [text_part(prefix, loss), clip], next_start
    first, learned = _append_text(prefix, loss, labels[0], tokenizer)
    prefixes = [text_part([*first, *opening], [*learned, *[False] * len(opening)])]
    prefixes += [text_part([*tokenizer.encode(text, literal=True), *opening]) for text in labels[1:]]
    parts = interleave_patches(clip, prefixes, [text_part(closing)])
    if rule == "smolvlm":
        specials = set(tokenizer.special_tokens.values())
        end = next((n for n in range(next_start, len(chat.ids)) if chat.ids[n] in specials), len(chat.ids))
        rest = slice(next_start, end)
        parts.append(text_part(*_prepend_text("\n\n", chat.ids[rest], chat.loss_mask[rest], tokenizer)))
        next_start = end
    return parts, next_start


def _append_text(prefix: list[int], loss: list[bool], text: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Append a text to ids and loss mask; the last tokens are tokenized again, and changed tokens have no loss."""
    specials = set(tokenizer.special_tokens.values())
    last = next((n + 1 for n in reversed(range(len(prefix))) if prefix[n] in specials), 0)
    ids = prefix[:last] + tokenizer.encode(tokenizer.decode(prefix[last:]) + text, literal=True)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, ids, strict=False)))
    return ids, loss[:same] + [False] * (len(ids) - same)


def _prepend_text(text: str, ids: list[int], loss: list[bool], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Prepend a text to ids without special tokens, which are tokenized again; changed tokens have no loss."""
    found = tokenizer.encode(text + tokenizer.decode(ids), literal=True)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[::-1], found[::-1], strict=False)))
    return found, [False] * (len(found) - same) + loss[len(loss) - same :]


def resolve_template_source(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return a template's source with all its variables filled in, as a tokenizer config stores it."""
    return bind_variables(
        template.source, template.variables | {f"{k}_token": v for k, v in tokenizer.named_special_tokens.items()}
    )
