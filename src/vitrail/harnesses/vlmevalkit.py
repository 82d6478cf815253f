"""A vision-language model inside VLMEvalKit: `register("mine", FOLDER)`, and it is one of its models."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, TextError, nearest
from vitrail.harnesses.asked import answered, framework, read_options, shifted, talker_of
from vitrail.processing.chat import Message
from vitrail.talker import Talker

INSTALL = "git+https://github.com/open-compass/VLMEvalKit"
FILMED = {"nframes": "frames", "fps": "fps"}  # what a video may say of itself


class Vitrail(framework("vlmeval.vlm.base", INSTALL).BaseModel):
    """`model_path` is a folder, a hub id or a `Talker`. Options are transformers': max_new_tokens, do_sample,
    temperature, top_p, top_k, repetition_penalty, stop, seed; greedy unless they say otherwise."""

    INSTALL_REQ = False
    INTERLEAVE = True

    def __init__(
        self,
        model_path: str | Path | Talker,
        *,
        template: str | None = None,
        device: str | None = None,
        frames: int | None = None,
        fps: float | None = None,
        **options: Any,
    ):
        super().__init__()
        self.how = read_options(options)  # what cannot be is said before the weights are read
        self.talker = talker_of(model_path, template, device)
        self.VIDEO_LLM = "video" in self.talker.marks
        self.film = {name: value for name, value in (("frames", frames), ("fps", fps)) if value is not None}
        self.asked = 0  # so far: with a seed, each answer draws from its own

    def generate_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """The answer to texts, pictures and videos in their order; those of another role are messages of their own."""
        messages: list[Message] = []
        for item in message:
            role = item.get("role", "user")
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(self._part(item))
        return self._answer(messages)

    def chat_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """The answer to a conversation of several turns."""
        return self._answer(
            [{"role": turn["role"], "content": [self._part(item) for item in turn["content"]]} for turn in message]
        )

    def _answer(self, messages: list[Message]) -> str:
        if not messages or messages[-1]["role"] != "user":
            raise TextError("a conversation that does not end with the user", "leave the answer to the model")
        how = shifted(self.how, self.asked)
        self.asked += 1
        return answered(self.talker, messages, how)

    def _part(self, item: Mapping[str, Any]) -> dict[str, Any]:
        kind, value = item["type"], item["value"]
        more = [name for name in item if name not in ("type", "value", "role", *(FILMED if kind == "video" else ()))]
        if more:
            raise ConfigError(f"a message has {more[0]!r} of its {kind}", nearest(more[0], ["type", "value", *FILMED]))
        if kind != "video":
            return {"type": kind, "text" if kind == "text" else kind: value}
        own = {ours: item[name] for name, ours in FILMED.items() if item.get(name) is not None}
        return {"type": "video", "video": value, **(own or self.film)}


def register(name: str, model_path: str | Path | Talker, **options: Any) -> None:
    """Make a model known to VLMEvalKit by a name that its `run.py` takes as --model."""
    framework("vlmeval.config", INSTALL).supported_VLM[name] = partial(Vitrail, model_path, **options)
