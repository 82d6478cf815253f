"""Training task for vision-language models on questions about clips: when, in which order and how often.

Batches hold sample indices; clips and token ids are built on the device.

B clips, T frames, Q questions of a clip, S tokens of a turn
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vitrail.config import Config, NonNegativeFloat, PositiveInt
from vitrail.data.clips.clip_questions import NUM_QUESTIONS, get_piece_table
from vitrail.data.clips.clip_source import ClipLayout, ClipSample, ClipSource
from vitrail.data.clips.clip_tokens import ClipTokenizer
from vitrail.data.language.text_pieces import PieceTable
from vitrail.errors import ConfigError
from vitrail.hub.chat_config import find_vision_token_ids
from vitrail.models.chat_layout import ChatFormat
from vitrail.models.video_rows import (
    VideoRowTemplate,
    build_video_row_template,
    embed_video_prefix,
    forward_video_turns,
)
from vitrail.models.vlm import VLM
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.tasks.qa_tokens import IGNORE_INDEX, answer_loss, step_flops, to_chat_tokenizer
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

PREPARED_FIELDS = ("/frames", "/ids", "/targets")
NUM_CHECKED = 1024  # clips per layout whose turns are measured before training


class VideoQASettings(Config):
    """Settings of the video-qa task.

    turn_length  tokens of a question and its answer, with both ends
    z_loss       weight of logsumexp² of all logits, which prevents logit drift; in training only
    """

    turn_length: PositiveInt = 24
    z_loss: NonNegativeFloat = 0.0


class VideoQATask:
    """Trains a vision-language model on questions about clips.

    A row is a prompt of the chat template `ended` with one video, and the turns of all questions. Turns attend to the
    video and to themselves only. All clips of a batch have one number of frames and one frame rate.

    The loss is the mean over answer tokens, end tokens included, times the number of clips.

    `chat_tokenizer` is the tokenizer with the chat template, for saving with the model.
    """

    def __init__(
        self, model: VLM, sources: Mapping[str, ClipSource], tokenizer: Tokenizer | None, settings: VideoQASettings
    ):
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                "answers need an end token, but there is no tokenizer with one", "add a [tokenizer] table"
            )
        video_token_id = find_vision_token_ids(model.config, tokenizer).get("video")
        if video_token_id is None:
            raise ConfigError(
                "the model takes no videos, or its tokenizer has no video token",
                'use a packed tower, add "<video>" to tokenizer.special_tokens, and set vision_token_ids.video',
            )
        self.model, self.sources, self.settings = model, sources, settings
        self.loss_weights = {"answers": 1.0}
        self.chat_tokenizer = to_chat_tokenizer(tokenizer, model.config.rules.fill_id, video_token_id)
        self.chat_format = ChatFormat(ChatTemplate.from_tokenizer(self.chat_tokenizer), video_token_id=video_token_id)
        self.clip_tokenizer = ClipTokenizer(tokenizer)
        self._costs: dict[tuple[str, int], list[tuple[Sequence[nn.Module], int]]] = {}
        self._templates: dict[tuple[ClipLayout, int, torch.device], VideoRowTemplate] = {}
        for name, source in sources.items():
            for layout in source.layouts:
                self._check_layout(name, source, layout)

    def _check_layout(self, name: str, source: ClipSource, layout: ClipLayout) -> None:
        _, questions = source.sample_questions(torch.arange(min(len(source), NUM_CHECKED)), layout)
        longest = self.clip_tokenizer.measure(questions)
        if longest > self.settings.turn_length:
            raise ConfigError(
                f"questions of {name!r} take {longest} tokens with their answers, more than "
                f"turn_length = {self.settings.turn_length}",
                f"set settings.turn_length to {longest} or more",
            )
        template = self.get_template(layout, source.config.image_size, torch.device("cpu"))
        used, context = template.prefix_length + template.turn_length, self.model.config.decoder.context_length
        if used > context:
            raise ConfigError(
                f"a clip of {layout.num_frames} frames of {name!r} and a question take {used} tokens, more than the "
                f"decoder's context length of {context}",
                "use shorter clips, or raise decoder.context_length",
            )

    def get_template(self, layout: ClipLayout, image_size: int, device: torch.device) -> VideoRowTemplate:
        """Return the cached template of rows with clips of this layout."""
        key = layout, image_size, device
        if key not in self._templates:
            self._templates[key] = build_video_row_template(
                self.model.config,
                self.chat_tokenizer,
                self.chat_format,
                layout.timestamps,
                (image_size, image_size),
                NUM_QUESTIONS,
                self.settings.turn_length,
            ).to(device)
        return self._templates[key]

    # ---- samples ------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[ClipSample]) -> Batch:
        """Group sample indices by source. A key is the source with the number of frames and the rate of its clips."""
        found: dict[str, list[int]] = {}
        for name, index in samples:
            found.setdefault(name, []).append(index)
        batch = {}
        for name, indices in sorted(found.items()):
            layout = self.sources[name].select_layout(indices)
            batch[f"{name}/{layout.num_frames}/{layout.fps:g}"] = torch.tensor(indices)
        return batch

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count clips."""
        return {"answers": sum(_count_clips(batch, key) for key in _list_keys(batch))}

    @torch.no_grad()
    def prepare_batch(self, batch: Batch) -> Batch:
        """Render the clips of all sources and encode their questions. A key has the name of a field at its end.

        frames   (B, T, 3, S, S) uint8
        ids      (B, Q, S)
        targets  (B, Q, S) the next token where it is trained on, else IGNORE_INDEX
        """
        prepared = {}
        for key, index in batch.items():
            source, layout = self._parse_key(key)
            data = source.render_indices(index, layout)
            turns = self.clip_tokenizer.encode(data.questions, self.settings.turn_length)
            values = (data.frames, turns.ids, turns.targets)
            prepared |= {f"{key}{field}": value for field, value in zip(PREPARED_FIELDS, values, strict=True)}
        return prepared

    def _parse_key(self, key: str) -> tuple[ClipSource, ClipLayout]:
        name, num_frames, fps = key.split("/")[:3]
        return self.sources[name], ClipLayout(int(num_frames), float(fps))

    # ---- losses -------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if not any(key.endswith(PREPARED_FIELDS) for key in batch):
            batch = self.prepare_batch(batch)
        loss = self.model.decoder.embed.weight.new_zeros((), dtype=torch.float32)
        z_loss = self.settings.z_loss if self.model.training else 0.0  # validation reports the plain loss
        for key in _list_keys(batch):
            frames, ids, targets = (batch[f"{key}{field}"] for field in PREPARED_FIELDS)
            _, layout = self._parse_key(key)
            template = self.get_template(layout, frames.shape[-1], ids.device)
            prefix = embed_video_prefix(self.model, template, frames)
            hidden = forward_video_turns(self.model, template, prefix, ids.flatten(1))
            loss = loss + len(ids) * answer_loss(self.model.decoder, hidden, targets.flatten(1), "mean", z_loss)
        return {"answers": loss}

    # ---- costs --------------------------------------------------------------------------------------------------

    def count_tokens(self, batch: Batch) -> int:
        """Count the tokens of a prepared batch: those before the turns, and of the turns without padding."""
        total = 0
        for key in _list_keys(batch):
            ids, targets = batch[f"{key}/ids"], batch[f"{key}/targets"]
            place = torch.arange(1, ids.shape[-1] + 1, device=ids.device)
            total += int(torch.where(targets != IGNORE_INDEX, place, 0).amax(-1).sum())
            _, layout = self._parse_key(key)
            total += len(ids) * self.get_template(layout, self._image_size(key), ids.device).prefix_length
        return total

    def _image_size(self, key: str) -> int:
        return self._parse_key(key)[0].config.image_size

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass, vision tower included. Padding of turns counts, and turns count as one text."""
        return sum(flops for key in _list_keys(batch) for _, flops in self._list_costs(key, _count_clips(batch, key)))

    def count_step_flops(self, batch: Batch) -> float:
        return sum(step_flops(self._list_costs(key, _count_clips(batch, key))) for key in _list_keys(batch))

    def _list_costs(self, key: str, num_clips: int) -> list[tuple[Sequence[nn.Module], int]]:
        """Modules in the order of the forward pass, each with its forward FLOPs for clips of one key."""
        if (key, num_clips) not in self._costs:
            template = self.get_template(self._parse_key(key)[1], self._image_size(key), torch.device("cpu"))
            num_text = template.num_tokens - template.grid.num_tokens
            work = self.model.workload([], num_text, num_clips, videos=[template.grid])
            work = work.replace(cached_tokens=0, logit_tokens=num_clips * NUM_QUESTIONS * template.turn_length)
            parts = self.model.cost_components(work).values()
            self._costs[key, num_clips] = [(part.modules, part.flops) for part in parts]
        return self._costs[key, num_clips]


def _list_keys(batch: Batch) -> list[str]:
    """List the keys of sources and layouts in a batch, prepared or not."""
    return list(dict.fromkeys("/".join(key.split("/")[:3]) for key in batch))


def _count_clips(batch: Batch, key: str) -> int:
    return len(batch[key] if key in batch else batch[f"{key}/ids"])


def _get_texts(_source: ClipSource) -> PieceTable:
    return get_piece_table()


TASKS.register("video-qa", TaskSpec(VideoQATask, VLM, ("clips",), VideoQASettings, _get_texts, fixed_shape=False))
