"""How often a model's answer is the true one, token for token, without writing it.

What a model would write, the likeliest token at a time, is the true answer exactly if behind every token of the true
one the next of it is the likeliest. One pass over question and answer says so, whatever makes the picture's tokens.

N questions, B of them at once, C channels, S side, L tokens of a talk, T of a question, M soft tokens, W width
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import PrefixConfig
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.talks import NamedTalks, SceneTalks, Talks
from vitrail.data.views import PLAIN, views
from vitrail.data.words import DRAFTS, ask, baselines
from vitrail.errors import ConfigError
from vitrail.evals.shares import Score, Share
from vitrail.models.rows import policy_of
from vitrail.models.vlm import VLM
from vitrail.nn import Plan
from vitrail.processing.fit import only_view
from vitrail.processing.text import Tokenizer
from vitrail.tasks.told import IGNORED, Teller

Look = Callable[[Tensor, Tensor], Tensor]
"""pixels (B, C, S, S) and the questions' ids (B, T), −1 where padded → soft tokens (B, M, W)"""

NAMING = "naming"  # “what is this?”, of named pictures: a question that points at nothing in them
LEAST, DRAWN = 64, 256  # pictures at a time, at least and at most
PATIENCE = 200  # times without enough questions of a kind before it is given up
APART = 2**22  # numbers of scenes from one kind to the next
GUESSED = 8192  # scenes that what can be had without looking is fitted to and tested on


class Sheet(NamedTuple):
    """N questions of one kind with their pictures and true answers."""

    pixels: Tensor  # uint8 (N, 3 or 4, H, W)
    ids: Tensor  # (N, L) question, end, answer
    targets: Tensor  # (N, L) what each token should be followed by, where that is asked for
    asked: Tensor  # (N, L) the question, −1 elsewhere

    def some(self, rows: slice) -> "Sheet":
        """These questions, as long as their longest."""
        last = int((self.targets[rows] != IGNORED).any(0).nonzero().max()) + 1
        return Sheet(self.pixels[rows], *(x[rows, :last] for x in self[1:]))


class Exam:
    """The same questions for every model that reads with `words`: of scenes by kind, and the names of pictures."""

    def __init__(
        self,
        scenes: SceneSource,
        kinds: Sequence[str],
        words: Tokenizer,
        *,
        count: int,
        length: int,
        named: NamedSource | None = None,
        device: str = "cpu",
    ):
        if count < 1:
            raise ConfigError(f"{count} questions of each kind", "ask at least one")
        if words.eos is None:
            raise ConfigError("answers end with an end token, and the tokenizer has none", "give one that has")
        self.end, self.size, self.device, self.count = words.eos, words.size, torch.device(device), count
        lead = words.encode("", specials=True)[:1]
        self.lead = lead if lead == [words.bos] else []
        talks: dict[str, Talks] = {kind: SceneTalks(scenes, 1, (kind,)) for kind in kinds}
        teller = Teller(talks | ({} if named is None else {NAMING: NamedTalks(named)}), words, words.eos, length)
        # Each kind has scenes of its own, so that no two questions are of one.
        self.sheets = {kind: self._scenes(teller, kind, list(DRAFTS).index(kind) * APART) for kind in kinds}
        self.beside = {kind: _blind(scenes, talks[kind], kind) for kind in kinds}
        if named is not None:
            self.sheets[NAMING] = self._named(teller, named)
            self.beside[NAMING] = _commonest(self.sheets[NAMING])

    def _scenes(self, teller: Teller, kind: str, start: int) -> Sheet:
        parts: list[Sheet] = []
        at_once = min(DRAWN, max(self.count, LEAST))
        for first in range(start, start + (PATIENCE + self.count) * at_once, at_once):
            parts.append(self._sheet(teller, kind, torch.arange(first, first + at_once, device=self.device)))
            if sum(len(part.ids) for part in parts) >= self.count:
                return _joined(parts, self.count)
            if first >= start + PATIENCE * at_once and not any(len(part.ids) for part in parts):
                break
        raise ConfigError(f"scenes hardly ever admit a question of kind {kind!r}", "leave the kind out")

    def _named(self, teller: Teller, named: NamedSource) -> Sheet:
        index = torch.linspace(0, len(named) - 1, min(self.count, len(named)), device=self.device).round().long()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # how each is asked
            return _joined([self._sheet(teller, NAMING, part) for part in index.split(DRAWN)], len(index))

    def _sheet(self, teller: Teller, name: str, index: Tensor) -> Sheet:
        told = teller.tell(name, index)
        valid = (told.targets != IGNORED).any(1)
        answer = (told.ids == self.end).long().cumsum(1) > 0
        return Sheet(*(x[valid] for x in (told.pixels, told.ids, told.targets, told.ids.masked_fill(answer, -1))))

    @torch.no_grad()
    def scores(self, model: VLM, look: Look, *, batch: int = DRAWN, turn: int = 0) -> list[Score]:
        """A share of each kind. `turn` tells `look` another picture's question, so many further on; what is asked of
        the decoder stays."""
        found = []
        for kind, sheet in self.sheets.items():
            sheet = sheet._replace(asked=sheet.asked.roll(turn, 0))
            parts = zip(*(x.split(batch) for x in sheet), strict=True)
            hits = sum(int(self._right(model, look, Sheet(*part)).sum()) for part in parts)
            found.append(Score.counted(kind, Share(hits, len(sheet.ids)), **self.beside.get(kind, {})))
        return found

    def _right(self, model: VLM, look: Look, sheet: Sheet) -> Tensor:
        hidden = read(model, self.lead, look(shown(model, sheet.pixels), sheet.asked), sheet.ids)
        return right(model.decoder, hidden, sheet.targets, self.size)


def right(decoder: Decoder, hidden: Tensor, targets: Tensor, size: int) -> Tensor:
    """hidden (B, L, W), targets (B, L) → (B,) whether all of each answer is the likeliest; what the tokenizer, of so
    many tokens, lacks is never said"""
    learnt = targets != IGNORED
    wrong = torch.zeros_like(learnt)
    wrong[learnt] = decoder.logits(hidden[learnt])[:, :size].argmax(-1) != targets[learnt]
    return ~wrong.any(1)


def shown(model: VLM, pixels: Tensor) -> Tensor:
    """uint8 (B, 3 or 4, H, W) → (B, C, S, S), squashed to the tower's side and normalised as it reads them"""
    config, policy = model.config, policy_of(model)
    x = (views(pixels, PLAIN.with_(side=only_view(policy, 1, 1).canvas[0])) + 1) / 2
    mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (config.mean, config.std))
    return ((x - mean) / std).to(model.decoder.embed.weight.dtype)


def read(model: VLM, lead: Sequence[int], soft: Tensor, ids: Tensor) -> Tensor:
    """soft (B, M, W), ids (B, L) → what the head reads behind each of the ids (B, L, W); they follow the lead and the
    soft tokens"""
    config = model.config
    plain = config.decoder.rotary.layout == "1d" and isinstance(config.decoder.fusion, PrefixConfig)
    if not plain or config.rules.both or config.voco:
        raise ConfigError(
            "pictures that are more than tokens in a causal row",
            "use a decoder without fusion, and a model without voco and rules.both",
        )
    embed = model.decoder.embed
    before = embed(torch.tensor(lead, dtype=torch.long, device=ids.device).expand(len(ids), -1))
    x = torch.cat([before, soft.to(before.dtype), embed(ids)], 1)
    positions = torch.arange(x.shape[1], device=x.device)[None]
    return model.decoder.through(x, positions, Plan(causal=True))[:, -ids.shape[1] :]


def look_of(model: VLM) -> Look:
    """How the model itself looks."""
    policy_of(model)  # refuses pictures of unequal numbers of tokens

    def look(pixels: Tensor, asked: Tensor) -> Tensor:
        soft = model.soft(pixels)
        return soft if model.queries is None else model.queries(soft, None, [asked])

    return look


def untold(look: Look) -> Look:
    """The same without being told the question."""
    return lambda pixels, asked: look(pixels, asked[:, :0])


def _joined(parts: Sequence[Sheet], count: int) -> Sheet:
    return Sheet(*(torch.cat(column)[:count] for column in zip(*parts, strict=True)))


def _commonest(sheet: Sheet) -> Mapping[str, float]:
    """All ask the same, so that no guess without looking is better than the commonest answer."""
    answers = Counter(tuple(row[row != IGNORED].tolist()) for row in sheet.targets.cpu())
    share = answers.most_common(1)[0][1] / len(sheet.ids)
    return {"majority": share, "blind": share}


def _blind(scenes: SceneSource, talks: Talks, kind: str) -> Mapping[str, float]:
    """What the commonest answer and the best reading of the question alone would have."""
    assert isinstance(talks, SceneTalks)
    index = torch.arange(2**20, 2**20 + GUESSED)
    said = ask(talks.words, scenes.scenes(index), scenes.config.seed, kind)
    return {name: getattr(row, name) for row in baselines(said) for name in ("majority", "blind")}
