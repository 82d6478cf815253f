"""Model adapter of VLMEvalKit: `register_model("mine", FOLDER)` adds a model to its table."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, TextError, suggest_name
from vitrail.integrations.framework_adapter import (
    generate_answer,
    import_framework,
    load_chat_pipeline,
    offset_seed,
    parse_generation_options,
)
from vitrail.pipelines import ChatPipeline
from vitrail.processing.chat_template import Message

PIP_REQUIREMENT = "git+https://github.com/open-compass/VLMEvalKit"
VIDEO_OPTIONS = {"nframes": "num_frames", "fps": "fps"}  # sampling keys of a video item: keys of a video part


class VitrailModel(import_framework("vlmeval.vlm.base", PIP_REQUIREMENT).BaseModel):
    """Adapter of VLMEvalKit for a vision-language model.

    `model_path` is a folder, a hub id or a `ChatPipeline`. Options are those of transformers: max_new_tokens,
    do_sample, temperature, top_p, top_k, repetition_penalty, stop, seed. Decoding is greedy by default.
    """

    INSTALL_REQ = False
    INTERLEAVE = True

    def __init__(
        self,
        model_path: str | Path | ChatPipeline,
        *,
        template: str | None = None,
        device: str | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        **options: Any,
    ):
        super().__init__()
        self.options = parse_generation_options(options)  # fail early, before the weights are loaded
        self.pipeline = load_chat_pipeline(model_path, template, device)
        self.VIDEO_LLM = "video" in self.pipeline.vision_token_ids
        self.video_sampling = {
            name: value for name, value in (("num_frames", num_frames), ("fps", fps)) if value is not None
        }
        self.answer_count = 0  # gives each answer its own seed

    def generate_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer a list of texts, images and videos in their order. A change of role starts a new message."""
        messages: list[Message] = []
        for item in message:
            role = item.get("role", "user")
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(self._convert_part(item))
        return self._answer(messages)

    def chat_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer a conversation of several turns."""
        return self._answer(
            [
                {"role": turn["role"], "content": [self._convert_part(item) for item in turn["content"]]}
                for turn in message
            ]
        )

    def _answer(self, messages: list[Message]) -> str:
        if not messages or messages[-1]["role"] != "user":
            raise TextError("the conversation does not end with a user message", "remove the last message")
        options = offset_seed(self.options, self.answer_count)
        self.answer_count += 1
        return generate_answer(self.pipeline, messages, options)

    def _convert_part(self, item: Mapping[str, Any]) -> dict[str, Any]:
        kind, value = item["type"], item["value"]
        unknown = [
            name for name in item if name not in ("type", "value", "role", *(VIDEO_OPTIONS if kind == "video" else ()))
        ]
        if unknown:
            raise ConfigError(
                f"{kind} item has the unknown key {unknown[0]!r}",
                suggest_name(unknown[0], ["type", "value", *VIDEO_OPTIONS]),
            )
        if kind != "video":
            return {"type": kind, "text" if kind == "text" else kind: value}
        sampling = {option: item[name] for name, option in VIDEO_OPTIONS.items() if item.get(name) is not None}
        return {"type": "video", "video": value, **(sampling or self.video_sampling)}


def register_model(name: str, model_path: str | Path | ChatPipeline, **options: Any) -> None:
    """Add a model to VLMEvalKit under a name that its `run.py` takes as --model."""
    import_framework("vlmeval.config", PIP_REQUIREMENT).supported_VLM[name] = partial(
        VitrailModel, model_path, **options
    )
