"""A unified model ready to hand: pictures and texts in, pictures and texts out.

B pictures or texts, h × w codes, W width
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.codecs.fit import Fit
from vitrail.connectors.reduce import AnyReduction
from vitrail.data.words.checks import Check, checks
from vitrail.errors import CheckpointError, ConfigError, nearest
from vitrail.generate.ahead import draw_ahead
from vitrail.generate.answers import answer, likelihoods
from vitrail.generate.pictures import Drawing, draw, varied
from vitrail.generate.sampling import Sampling
from vitrail.hub import configs
from vitrail.models.looking import LookingVLMConfig
from vitrail.models.unified import Unified
from vitrail.models.vlm import VLMConfig
from vitrail.processing.images import Source, load_image
from vitrail.processing.text import Tokenizer
from vitrail.show.looked import losses, overlay
from vitrail.stream import pack
from vitrail.talker import Talker, home

DESCRIBE = "Describe the picture briefly."
SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # fields of `Sampling` that are given by name
APART = 1_000_003  # seeds of one try and the next: no two of a batch of any size meet
MINI = "mini"  # the model that ships with the package
MINI_VLM = "mini-vlm"  # the vision-language model that ships, on a language model that is fetched
TRAIN_VLM = " && ".join(
    f"vitrail train {name} --out out/{name}" for name in ("clip-scenes", "scaling-base", "mini-vlm")
)
TRAIN = "vitrail train mini-codec --out out/mini-codec && vitrail train mini --out out/mini"


def load(
    name_or_path: str | Path = MINI,
    *,
    template: str | None = None,
    device: str | torch.device | None = None,
    reduce: AnyReduction | None = None,
) -> Any:
    """What a folder holds, ready to hand: a `Studio` for a unified model, a `Talker` for a vision-language model, to
    which a chat template may be named, and what leaves fewer tokens of its pictures."""
    if name_or_path == MINI_VLM:
        name_or_path = _shipped(MINI_VLM, TRAIN_VLM)
    if talks(name_or_path):
        return Talker.load(name_or_path, template=template, device=device, reduce=reduce)
    refuse_talk(name_or_path, template, reduce)
    return Studio.load(name_or_path, device=device)


def refuse_talk(name_or_path: str | Path, template: str | None, reduce: AnyReduction | None) -> None:
    """What a model has no use for that is no VLM."""
    if template is not None:
        raise ConfigError(f"{name_or_path} is no VLM and has no use for a chat template", "leave the template out")
    if reduce is not None:
        raise ConfigError(f"{name_or_path} is no VLM, of whose pictures fewer tokens can be left", "leave reduce out")


def talks(name_or_path: str | Path) -> bool:
    """Whether a folder holds a vision-language model. No weight is read."""
    return name_or_path != MINI and isinstance(configs.read_config(name_or_path), VLMConfig | LookingVLMConfig)


class Studio:
    """`vitrail.load()` or `vitrail.load(folder)`. Of texts and drawings one asked for gives one, a list a list; tensors
    have a row each."""

    def __init__(self, model: Unified, words: Tokenizer):
        if words.eos is None:
            raise ConfigError("texts end with an end token, and the tokenizer has none", "give the model's own")
        self.model, self.words, self.end = model.eval(), words, words.eos

    @classmethod
    def load(
        cls,
        name_or_path: str | Path = MINI,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Studio":
        """On a GPU, if there is one; in half precision there, and on CPUs that multiply it. What is drawn from a seed
        is one picture in one type, and may be another in another: name the `dtype` where that matters."""
        if name_or_path == MINI:
            name_or_path = _shipped(MINI, TRAIN)
        where, usual = home(device, half=True)
        model = hub.load(name_or_path, dtype=dtype or usual, device=where)
        if not isinstance(model, Unified):
            raise ConfigError(
                f"{name_or_path} is a {type(model).__name__}; only a unified model reads and draws, VLMs can be asked",
                f'give {MINI}, or the folder of one that was trained as kind = "unified"',
            )
        return cls(model, hub.tokenizer(name_or_path))

    # ---- tokens -------------------------------------------------------------------------------------------------

    def tokenize(self, pictures: Any) -> Tensor:
        """Ids (B, h, w)"""
        return self._look(pictures)[1]

    def detokenize(self, ids: Tensor) -> list[Image.Image]:
        """The pictures of ids (B, h, w)"""
        try:
            ids = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{type(ids).__name__} is no table of ids: {error!s:.80}", "give (B, h, w)") from None
        if ids.ndim != 3 or ids.is_meta:
            raise ConfigError(f"ids of shape {tuple(ids.shape)}{' on no device' * ids.is_meta}", "give (B, h, w)")
        return _pictures(self.model.codec.bytes(self.model.pixels(ids.to(self.model.codec.device))))

    def seen(self, picture: Source) -> Image.Image:
        """The picture as the model is shown it: its middle, at the codec's own size"""
        return _pictures(self._pixels(picture))[0]

    @torch.no_grad()
    def embed(self, pictures: Any) -> Tensor:
        """(B, W) of length 1: the mean of what the decoder makes of a picture's codes"""
        hidden = self.model(self.model.shown(self._look(pictures)[0]))[:, 1:]
        return F.normalize(hidden.float().mean(1), dim=-1)

    # ---- words --------------------------------------------------------------------------------------------------

    def ask(self, pictures: Any, questions: Any, **more: Any) -> Any:
        """Answers: of one picture to one question, to each of several, or of several pictures to one or to one each.
        `more` is what `generate.answers.answer` takes besides, or fields of `Sampling` by name (temperature, seed, …);
        without any the likeliest answer is given."""
        alone = not isinstance(pictures, list | tuple) and isinstance(questions, str)
        asked = _texts(questions, "question")
        if not asked or not all(question.strip() for question in asked):
            raise ConfigError("a question without words", "ask something")
        named: dict[str, Any] = {key: more.pop(key) for key in list(more) if key in Sampling.__struct_fields__}
        known = {name for name, one in inspect.signature(answer).parameters.items() if one.kind is one.KEYWORD_ONLY}
        if unknown := sorted(set(more) - known):
            raise ConfigError(f"an answer has no {unknown[0]!r}", nearest(unknown[0], [*known, *SAMPLED, "seed"]))
        if named:
            if not set(named) & set(SAMPLED):  # a seed alone, or what is repeated: the likeliest answer all the same
                named["temperature"] = 0.0
            if "sampling" in more:
                raise ConfigError(f"sampling, and {', '.join(named)} beside it", "leave one of the two out")
            more["sampling"] = Sampling(**named)
        seen = self._look(pictures)[0]
        if len(seen) == 1:
            seen = seen.expand(len(asked), -1, -1, -1)
        elif len(asked) == 1:
            asked = asked * len(seen)
        said = answer(self.model, seen, asked, self.words, **more)
        texts = [one.text.lstrip() for one in said]  # to SentencePiece a word begins with its space
        return texts[0] if alone else texts

    def caption(self, pictures: Any, **more: Any) -> Any:
        """What a picture shows."""
        return self.ask(pictures, DESCRIBE, **more)

    def likelihoods(self, asked: Sequence[tuple[Any, str, Sequence[str]]]) -> list[list[float]]:
        """How likely each option is as the whole answer, for (picture, question, its options) each."""
        if not asked or not all(options for *_, options in asked):
            raise ConfigError("no option to weigh", "give at least one")
        if any(isinstance(shown, list | tuple) and len(shown) != 1 for shown, *_ in asked):
            raise ConfigError("a unified model looks at one picture at a time", "give one")
        rows = [
            (shown[0] if isinstance(shown, list | tuple) else shown, question, option)
            for shown, question, options in asked
            for option in options
        ]
        pictures, questions, options = map(list, zip(*rows, strict=True))
        found = iter(likelihoods(self.model, self._look(pictures)[0], questions, options, self.words).tolist())
        return [[next(found) for _ in options] for _, _, options in asked]

    def looked(self, picture: Source, question: str, **more: Any) -> tuple[str, Image.Image]:
        """The answer, and the picture as it was seen, brightest where the answer comes from. `more` is what
        `show.looked.losses` takes besides."""
        said = self.ask(picture, question)
        pixels, end = self._pixels(picture), self.end
        asked, answered = [*self.words.encode(question), end], [*self.words.encode(said), end]
        lost = losses(self.model, self.model.codec.pixels(pixels)[0], asked, answered, **more)
        return said, overlay(_pictures(pixels)[0], lost)

    # ---- drawings -----------------------------------------------------------------------------------------------

    def draw(self, prompts: Any, **how: Any) -> Any:
        """Pictures for prompts: one for one, a list for several. `how` is what `draw_ids` takes."""
        pictures = self.detokenize(self.draw_ids(_texts(prompts, "prompt"), **how))
        return pictures[0] if isinstance(prompts, str) else pictures

    def draw_ids(
        self,
        prompts: Sequence[str],
        *,
        tries: int = 1,
        negative: str | None = None,
        given: tuple[Tensor, Tensor] | None = None,
        progress: Callable[[int, int], Any] = lambda done, of: None,
        watch: Callable[[Tensor, Tensor], Any] = lambda ids, hidden: None,
        seed: int | None = None,
        draft: "Studio | None" = None,
        **how: Any,
    ) -> Tensor:
        """Ids (B, h, w). `how` are fields of `Drawing` (guidance, steps, wander) and of `Sampling` (temperature, top_k,
        top_p, min_p). With a seed, prompt i is drawn from seed + i. Of several `tries` the one is kept
        about which the model itself most surely answers the questions of `data.words.checks` as the prompt would. A
        smaller model of the same words and codes may `draft` what is drawn code after code, which takes fewer passes
        and changes no chance of any picture."""
        if not prompts:
            raise ConfigError("nothing to draw", "give a prompt")
        if tries < 1:
            raise ConfigError(f"{tries} tries", "draw at least once")
        if seed is not None and not isinstance(seed, Integral):
            raise ConfigError(f"a seed of {seed!r:.80}", "give a whole number")
        if negative is not None and not isinstance(negative, str):
            raise ConfigError(f"{negative!r:.80} to lead away from", "give one text")
        if draft is not None and (negative is not None or given is not None):
            raise ConfigError("a draft is of whole pictures, led away from nothing", "leave one of the two out")
        asked = [checks(prompt) for prompt in prompts] if tries > 1 else []
        for prompt, own in zip(prompts, asked, strict=False):
            if not own:
                raise ConfigError(
                    f"{prompt!r:.80} names nothing that a drawing could be chosen by",
                    "name some of the things that mini draws, or leave tries at 1",
                )
        device = self.model.codec.device
        named = {key: how.pop(key) for key in list(how) if key in SAMPLED}
        ids, counts = read = self._ids(prompts, device)
        if draft is not None and not all(map(torch.equal, read, draft._ids(prompts, device))):
            raise ConfigError("the model and its draft read a prompt as other tokens", "train both with one tokenizer")
        against = None if negative is None else self._ids([negative] * len(prompts), device)
        drawn = []
        for n in range(tries):
            own = Sampling(**named, seed=None if seed is None else seed + n * APART)
            drawing, told = Drawing(sampling=own, **how), partial(_share, progress, n, tries)
            if draft is not None:
                drawn.append(draw_ahead(self.model, draft.model, ids, counts, drawing).ids)
                told(1, 1)
                continue
            more: dict[str, Any] = {"negative": against, "given": given, "progress": told, "watch": watch}
            drawn.append(draw(self.model, ids, counts, drawing, **more))
        if tries == 1:
            return drawn[0]
        sure = torch.stack([self._sure(ids, asked) for ids in drawn])  # (tries, B)
        return torch.stack(drawn)[sure.argmax(0), torch.arange(len(prompts), device=device)]

    def _sure(self, ids: Tensor, asked: Sequence[Sequence[Check]]) -> Tensor:
        """(B,): the logarithm of the probability that all that is asked about pictures (B, h, w) is answered so."""
        # Looked at as pictures that are shown, and not in the codes they were drawn in.
        seen = self.model.look(self.model.pixels(ids))[0]
        rows = [(row, *check) for row, some in enumerate(asked) for check in some]
        at, questions, answers = map(list, zip(*rows, strict=True))
        found = likelihoods(self.model, seen[at], questions, answers, self.words)
        return found.new_zeros(len(ids)).index_add(0, torch.tensor(at, device=found.device), found)

    def stages(self, prompt: str, count: int = 6, **how: Any) -> list[Image.Image]:
        """A drawing as it comes about, codes that are yet open in grey: so many moments, the last the whole of it.
        `how` is what `draw_ids` takes."""
        passed: list[tuple[Tensor, Tensor]] = []
        self.draw_ids([prompt], tries=1, watch=lambda ids, hidden: passed.append((ids.clone(), hidden)), **how)
        settled = torch.stack([(~hidden).float().mean() for _, hidden in passed])  # (passes,), rising to 1
        wanted = torch.arange(1, count + 1, device=settled.device) / count
        at = torch.searchsorted(settled, wanted - 1e-6).clamp(max=len(passed) - 1).tolist()
        ids, hidden = (torch.cat([passed[i][part] for i in at]) for part in (0, 1))
        pixels = self.model.codec.bytes(self.model.pixels(ids))  # (count, C, H, W)
        over = (
            hidden[:, None].repeat_interleave(self.model.codec.factor, 2).repeat_interleave(self.model.codec.factor, 3)
        )
        return _pictures(pixels.masked_fill(over.to(pixels.device), 128))

    def vary(
        self,
        picture: Source,
        prompt: str = "",
        *,
        share: float = 0.5,
        count: int = 1,
        seed: int | None = None,
        **how: Any,
    ) -> list[Image.Image]:
        """Variations of a picture, of whose codes a share is drawn anew."""
        if count < 1:
            raise ConfigError(f"{count} variations", "ask for at least one")
        ids = self.tokenize([picture]).expand(count, -1, -1)
        return self.draw([prompt] * count, given=varied(ids, share, seed), seed=seed, **how)

    def inpaint(self, picture: Source, prompt: Any, box: tuple[float, float, float, float], **how: Any) -> Any:
        """The picture with all that touches a box (x0, y0, x1, y1 in 0 … 1) drawn anew; of several prompts, several."""
        if len(box) != 4:
            raise ConfigError(f"a box of {len(box)} numbers", "give x0, y0, x1, y1")
        x0, y0, x1, y1 = box
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ConfigError(f"a box of {box}", "give x0 < x1 and y0 < y1 within 0 … 1")
        ids = self.tokenize([picture])
        _, h, w = ids.shape
        row, column = torch.arange(h, device=ids.device), torch.arange(w, device=ids.device)
        rows = (row + 1 > y0 * h) & (row < y1 * h)
        columns = (column + 1 > x0 * w) & (column < x1 * w)
        kept, prompts = ~(rows[:, None] & columns)[None], _texts(prompt, "prompt")
        given = tuple(part.expand(len(prompts), -1, -1) for part in (ids, kept))
        pictures = self.draw(prompts, given=given, **how)
        return pictures[0] if isinstance(prompt, str) else pictures

    def _look(self, pictures: Any) -> tuple[Tensor, Tensor]:
        return self.model.look(self.model.codec.pixels(self._pixels(pictures)))

    def _pixels(self, pictures: Any) -> Tensor:
        """One picture, or a list of them → uint8 (B, 3, H, W)"""
        shown = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
        if not shown:
            raise ConfigError("no picture", "give at least one")
        codec = self.model.codec
        fit = Fit().whole(codec)
        return torch.stack([fit.apply(load_image(picture), codec.factor)[0] for picture in shown])

    def _ids(self, texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, n) and (B,): each with its end; an empty text has no token at all"""
        rows = [[*self.words.encode(text), self.end] if text.strip() else [] for text in texts]
        longest, codes = max(map(len, rows)), math.prod(self.model.grid) + 1
        if longest + codes > (context := self.model.decoder.config.context):
            raise ConfigError(
                f"{longest} tokens of a prompt and {codes} of a picture pass the {context} the model was made for",
                "shorten the prompt",
            )
        ids = torch.full((len(rows), max(map(len, rows))), self.end)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def _texts(given: Any, what: str) -> list[str]:
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    for text in found:
        if not isinstance(text, str):
            raise ConfigError(f"{text!r:.80} is no {what}", "give a text, or a list of them")
    return [str(text) for text in found]


def _share(progress: Callable[[int, int], Any], turn: int, turns: int, done: int, of: int) -> None:
    """The progress of one of several turns, told as that of all."""
    progress(turn * of + done, turns * of)


def _shipped(name: str, train: str) -> Path:
    """A model that ships, whatever other folder has its name here."""
    if name in configs.shipped():
        return configs.SHIPPED / name
    if not (Path(name) / configs.OWN).is_file():
        raise CheckpointError(
            f"no weights of {name} came with this copy of Vitrail",
            f"train it ({train}) and give out/{name}/final, or another folder of such a model",
        )
    return Path(name)


def _pictures(pixels: Tensor) -> list[Image.Image]:
    """uint8 (B, 3, H, W)"""
    return [Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()) for one in pixels.cpu()]


# ---- what packing costs -----------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Between two copies of a model: the largest difference of logits, in standard deviations of the first's, and the
    share of pictures' codes that the second gives other ids."""

    words: float
    codes: float
    ids: float


@torch.no_grad()
def change(whole: Studio, other: Studio, pictures: Sequence[Source], texts: Sequence[str]) -> Change:
    """On pictures, and a text about each: the words behind the picture, and the picture behind the words."""
    asked, counts = whole._ids(texts, whole.model.codec.device)
    ids, given = whole.tokenize(list(pictures)), torch.arange(asked.shape[1], device=asked.device) < counts[:, None]
    h, w = ids.shape[1:]
    # Every second code is hidden where drawing hides codes; what is drawn code after code hides none.
    hidden = (torch.arange(h * w, device=ids.device).view(1, h, w) % 2 == 0).expand_as(ids)
    found = []
    for studio in (whole, other):
        model = studio.model
        said = model(model.shown(studio._look(list(pictures))[0]), model.words(asked, counts))[:, -asked.shape[1] :]
        laid = model.lay(
            model.words(asked, counts), model.drawn(ids, hidden if model.config.order == "masked" else None)
        )
        drawn = model.head(model.drawing_states(laid, model.hidden(laid)), model.parts(ids.flatten(1)))
        found.append(([model.decoder.logits(said)[given]], drawn))
    (words, codes), (words2, codes2) = found
    other_ids = float((other.tokenize(list(pictures)) != ids).float().mean())
    return Change(_farthest(words, words2), _farthest(codes, codes2), other_ids)


@torch.no_grad()
def said_change(whole: Talker, other: Talker, pictures: Sequence[Source], questions: Sequence[str]) -> float:
    """Between two copies of a vision-language model: the largest difference of the logits of the answer's first word,
    in standard deviations of the first's."""
    found = []
    for talker in (whole, other):
        prompts = [talker.prompt([talker.turn(*asked)]) for asked in zip(pictures, questions, strict=True)]
        found.append([talker.model(pack([p.stream], len(p.stream)), p.pictures)[0, -1] for p in prompts])
    return _farthest(*found)


def _farthest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = [(x.float(), y.float()) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).abs().max() / x.std()) for x, y in pairs)
