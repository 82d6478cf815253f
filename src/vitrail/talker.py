"""A vision-language model ready to hand: pictures and a question in, words out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail import hub
from vitrail.errors import ConfigError, ImageError, TextError
from vitrail.generate import seen
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.hub.configs import Found, find, resolve
from vitrail.hub.families import FAMILIES
from vitrail.models.looking import LookingVLM, LookingVLMConfig, Views
from vitrail.models.vlm import VLM, Shown, VLMConfig
from vitrail.processing.chat import ChatTemplate, Message
from vitrail.processing.images import Source, load_image
from vitrail.processing.text import Tokenizer
from vitrail.stream import Part, Stream, build, words

USUAL = 256  # tokens of an answer, where the context has room for them


class Habit(NamedTuple):
    """How a family is spoken to.

    preset  the chat template of those whose folder holds none, and what it is `told`
    around  words that stand around a picture, which its processor writes and its templates do not
    """

    preset: str
    told: dict[str, str] = {}
    around: tuple[str, str] | None = None


HABITS = {
    "llava": Habit("vicuna"),
    "llava_next": Habit("vicuna"),
    "qwen2_vl": Habit("qwen2-vl"),
    "qwen2_5_vl": Habit("qwen2-vl"),
    "qwen3_vl": Habit("qwen2-vl", {"default_system": ""}),
    "qwen3_vl_moe": Habit("qwen2-vl", {"default_system": ""}),
    "internvl": Habit("chatml", around=("<img>", "</img>")),
    "mllama": Habit("llama3"),
}


class Talker:
    """`vitrail.load(folder)`, where the folder holds a VLM. Messages are transformers': a role, and a text or parts,
    of which {"type": "image", "image": …} holds a picture, as a file or otherwise (see `load_image`)."""

    def __init__(
        self,
        model: VLM | LookingVLM,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        around: tuple[str, str] | None = None,
    ):
        self.model, self.words, self.template = model.eval(), tokenizer, template
        self.fill = _mark(model.config)
        self.image = tokenizer.token(self.fill)  # what stands for a picture in a text
        self.before, self.after = ([], []) if around is None else ([tokenizer.id(word)] for word in around)

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, template: str | None = None, device: str | torch.device | None = None
    ) -> "Talker":
        """On a GPU, if there is one, in half precision. `template` names a preset of `ChatTemplate`: otherwise it is
        the folder's own or, where that has none, its family's."""
        where, dtype = usable(device)
        found = find(resolve(name_or_path))
        if not issubclass(found.model, VLM | LookingVLM):
            raise ConfigError(f"{name_or_path} is a {found.model.__name__} and not a VLM", "give the folder of a VLM")
        if isinstance(found.config, VLMConfig) and found.config.queries is not None:
            raise ConfigError(
                f"{name_or_path} fuses its queries with the question, which is not done for talks",
                "use model(batch, …)",
            )
        tokenizer, habit = hub.tokenizer(name_or_path), _habit(found)
        chosen = _template(found, tokenizer, habit, template)
        # The weights come last: what can be wrong is said before they are read.
        model = hub.load(name_or_path, dtype=dtype, device=where)
        return cls(model, tokenizer, chosen, None if habit is None else habit.around)

    # ---- what is asked ------------------------------------------------------------------------------------------

    def ask(self, images: Any, question: str, **how: Any) -> str:
        """The answer to one question about a picture, several of them, or none ([]). They come before the question, or
        where it says so, if the template allows it: "Is <image> larger than <image>?" `how` is what `stream` takes."""
        return self.chat([self.turn(images, question)], **how)

    def chat(self, messages: Sequence[Message], **how: Any) -> str:
        """The answer to a conversation of several turns, with pictures in any of them."""
        return "".join(self.stream(messages, **how)).strip()

    def stream(
        self,
        messages: Sequence[Message],
        *,
        max_new: int | None = None,
        sampling: Sampling = GREEDY,
        stop_strings: Sequence[str] = (),
    ) -> Iterator[str]:
        """The answer to a conversation, piece by piece as it is written. `max_new` tokens at most: 256, or what the
        context has room for, unless given."""
        stream, pictures = self.prompt(messages)
        context = self.model.config.decoder.context
        room = context - len(stream)
        wanted = 1 if max_new is None else max_new
        if room < wanted:
            shown = int((stream.ids == self.fill).sum())
            raise ConfigError(
                f"the prompt has {len(stream):,} tokens, {shown:,} of them for pictures, and {wanted} more pass "
                f"the {context:,} the model was made for",
                f"ask for at most {room} tokens" if room > 0 else "give fewer or smaller pictures, or fewer words",
            )
        pieces = seen.stream(
            self.model,
            [stream],
            pictures,
            max_new=min(USUAL, room) if max_new is None else max_new,
            sampling=sampling,
            tokenizer=self.words,
            stop_strings=stop_strings,
        )
        return (piece.text for piece in pieces)

    def turn(self, images: Any, question: str) -> Message:
        """A user's message."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigError("a question without words", "ask something")
        pictures = [_picture(one) for one in (images if isinstance(images, list | tuple) else [images])]
        said = question.split(self.image)
        if len(said) == 1:
            return {"role": "user", "content": [*pictures, _text(question)]}
        if len(said) - 1 != len(pictures):
            raise TextError(
                f"the question has {len(said) - 1} places for pictures ({self.image}), and there are {len(pictures)}",
                "give one for each, or leave the places out: pictures then come first",
            )
        parts = [_text(said[0])]
        for picture, after in zip(pictures, said[1:], strict=True):
            parts += [picture, _text(after)]
        return {"role": "user", "content": [part for part in parts if part.get("text") != ""]}

    # ---- what the model reads -----------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message]) -> tuple[Stream, Any]:
        """A conversation as a stream that ends where the answer begins, and its pictures."""
        if not messages:
            raise TextError("a conversation without a message", "ask something")
        said, images = [], []
        for n, message in enumerate(messages):
            parts = _parts_of(message, f"messages[{n}]")
            images += [load_image(part["image"]) for part in parts if part["type"] == "image"]
            # A template is shown that there is a picture, not which.
            said.append({**message, "content": [_place(part) for part in parts]})
        self._check_order(said)
        ids = self.template.encode(said, self.words, generate=True).ids
        lead = self.words.encode("", specials=True)[:1]  # where the tokenizer begins every text with a bos
        if lead == [self.words.bos] and ids[:1] != lead:
            ids = lead + ids
        shown = self.model.prepare(images) if images else None
        return self._stream(ids, len(images), shown), shown

    def _check_order(self, said: Sequence[Message]) -> None:
        """Refuse a template that writes pictures first where words were to come before them."""
        before = self.template.render(said, generate=True).split(self.image)
        waiting: list[str] = []
        for part in (part for message in said for part in message["content"]):
            if part["type"] == "text":
                waiting.append(part["text"].strip())
                continue
            there = before.pop(0) if before else ""
            late = next((text for text in waiting if self.image not in text and text not in there), None)
            if late:
                raise TextError(
                    f"{self.template.name} writes pictures before the words {late!r}, which come before a picture",
                    "leave the places out of the question: pictures then come first",
                )
            waiting = []

    def _stream(self, ids: list[int], images: int, shown: Shown | Views | None) -> Stream:
        """The words with every picture in its place: as tokens, or as the mark where it is looked at."""
        places = [at for at, id in enumerate(ids) if id == self.fill]
        if len(places) != images:
            raise TextError(
                f"{self.template.name} made {len(places)} places for pictures ({self.image}) of {images} pictures",
                "use a template that writes one for each, such as template='vicuna'",
            )
        config = self.model.config
        if not isinstance(config, VLMConfig):
            return build([words(ids)])
        parts: list[Part] = []
        start = 0
        for place, shape in zip(places, shown.shapes if isinstance(shown, Shown) else (), strict=True):
            parts += [words(ids[start:place] + self.before), config.part(shape), words(self.after)]
            start = place + 1
        return build([part for part in [*parts, words(ids[start:])] if part.tokens], config.rules)


def usable(device: str | torch.device | None) -> tuple[str, torch.dtype]:
    """Where a model ready to hand goes, and its type there: a GPU, if there is one, in half precision."""
    there = torch.cuda.is_available()
    try:
        where = torch.device(device or ("cuda" if there else "cpu"))
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"no model can run on the device {str(device)!r}", "say cpu or cuda")
    if where.type == "cuda" and not there:
        raise ConfigError("there is no CUDA device here", "leave the device out, or say cpu")
    return str(where), torch.bfloat16 if where.type == "cuda" else torch.float32


def _habit(found: Found) -> Habit | None:
    """That of the folder's family; a folder of ours has those that it could be written as."""
    fits = [name for name, row in FAMILIES.items() if row.model is found.model and row.fits(found.config)]
    names = fits if found.family is None else [found.family.name]
    return next((HABITS[name] for name in names if name in HABITS), None)


def _template(found: Found, tokenizer: Tokenizer, habit: Habit | None, named: str | None) -> ChatTemplate:
    if named is None and tokenizer.chat_template is not None:
        return ChatTemplate.of(tokenizer)
    if named is not None:
        habit = Habit(named)
    if habit is None:
        raise TextError(f"{found.path} has no chat template", "name one: load(…, template='vicuna')")
    template = ChatTemplate.preset(habit.preset)
    template.variables |= {"image": tokenizer.token(_mark(found.config)), **habit.told}
    return template


def _mark(config: VLMConfig | LookingVLMConfig) -> int:
    """The id that stands for a picture in a text."""
    return config.rules.fill if isinstance(config, VLMConfig) else config.mark


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _picture(source: Source) -> dict[str, Any]:
    return {"type": "image", "image": source}


def _parts_of(message: Any, name: str) -> list[dict[str, Any]]:
    """The texts and pictures of a message, each as a part; whatever else it holds is refused by name."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list | tuple):
        raise TextError(f"{name} has no text and no list of parts as its content", "give one of the two")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "image" and isinstance(part, dict) and part.get("image") is None:
            raise ImageError(f"{name} has an image part without a picture", 'give it as "image"')
        if not isinstance(part, dict) or kind not in ("text", "image"):
            raise TextError(f"{name} has a part of the kind {kind!r}", "give texts and images")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise TextError(f"{name} has a text part without a text", 'give it as "text"')
    return list(content)


def _place(part: Message) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else _text(part["text"])
