"""Dense prompts: a whole scene in words, each with a graph of what must then be seen, as DPG-Bench's have. Every
question is also a `Spec`, so that a judge that has only boxes, concepts and colours to go by can answer it.

B scenes, O object slots, Q questions, K the two things that one may be about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from vitrail.data.graphs import Graph, Question
from vitrail.data.scenes.scene import COLOURS, Scenes
from vitrail.data.words import english
from vitrail.data.words.captions import Relation, grouped, related, relations
from vitrail.data.words.facts import Draws, Facts
from vitrail.data.words.frames import Group
from vitrail.data.words.prompts import Spec, matches
from vitrail.data.words.words import Words

ENTITY, COLOUR, COUNT, SPATIAL = "entity - whole", "attribute - color", "other - count", "relation - spatial"
LEAST = 2  # kinds of things that a dense prompt names

_Wish = tuple[list[int], list[int], list[int], bool, int]  # a row of a Spec


@dataclass(frozen=True, eq=False)
class Dense:
    """Prompts with their graphs, and the scenes that they tell of: right drawings of them."""

    graphs: list[Graph]
    specs: list[Spec]  # of each graph, a row a question
    scenes: Scenes  # (B,)

    def answers(self, words: Words, numbers: Sequence[int], seen: Scenes) -> list[list[bool]]:
        """Scenes (or what a detector found, written as scenes), each asked the questions of the graph of its number:
        yes or no."""
        asked = [self.specs[n] for n in numbers]
        sizes = [len(one.number) for one in asked]
        spec = Spec(*(torch.cat([getattr(one, f.name) for one in asked]) for f in fields(Spec)))
        place = torch.arange(len(asked)).repeat_interleave(torch.tensor(sizes))  # (Q,) which scene each is about
        yes = matches(words, spec, seen[place.to(spec.number.device)])
        return [row.tolist() for row in yes.split(sizes)]


def dense(words: Words, scenes: Scenes, seed: int, *, held_out: bool = False) -> Dense:
    """A prompt for each scene that admits one: at least two kinds of things that no name confuses, and two things of
    which one lies left of, right of, above or below the other. A colour is told where all of a kind wear it. `held_out`
    speaks in paraphrases that training never uses."""
    facts, draws = Facts(words, scenes), Draws(seed, scenes.index, "dense", held_out)
    alone = (~facts.same | (facts.colour[:, :, None] == facts.colour[:, None, :])).all(2)  # the kind's only colour
    group, _ = grouped(facts, draws, facts.colour * alone)
    told = relations(facts, draws, facts.plain[:, :, None] & facts.plain[:, None, :])
    captions = words.sorts["caption_short"].answer
    head = captions.fill(draws.template("caption", captions), list=group)
    texts = words.pieces.read(torch.cat([head, *related(facts, draws, told)], 1))
    clear = facts.thing & ~facts.frame & (facts.alike.sum(2) == facts.number)
    valid = (clear | ~facts.filled).all(1) & ((group.number > 0).sum(1) >= LEAST) & told[0].there
    rows = valid.nonzero()[:, 0]
    graphs, specs = [], []
    for b in rows.tolist():
        questions, spec = _asked(facts, b, group, told)
        graphs.append(Graph(str(int(scenes.index[b])), texts[b], tuple(questions)))
        specs.append(spec)
    return Dense(graphs, specs, scenes[rows])


def _asked(facts: Facts, b: int, group: Group, told: Sequence[Relation]) -> tuple[list[Question], Spec]:
    """What a picture of scene b is asked: of each kind whether it is there, in which colour and how often; and how
    things lie."""
    questions: list[Question] = []
    wishes: list[_Wish] = []
    nouns, places = facts.words.names.nouns, {}

    def ask(category: str, text: str, depends: tuple[int, ...], wish: _Wish) -> None:
        questions.append(Question(len(questions) + 1, category, text, depends))
        wishes.append(wish)

    for colour, concept, number in zip(*(column[b].tolist() for column in group), strict=True):
        if not number:
            continue
        noun, both = nouns[concept], [concept, concept]
        places[concept] = entity = len(questions) + 1
        ask(ENTITY, f"Is there {english.indefinite(noun.single)}?", (), (both, [0, 0], [1, 0], False, -1))
        if colour:
            said = english.indefinite(f"{COLOURS[colour].name} {noun.single}")
            ask(COLOUR, f"Is there {said}?", (entity,), (both, [colour, colour], [1, 0], False, -1))
        if number > 1:
            said = f"{english.NUMBERS[number]} {noun.plural}"
            ask(COUNT, f"Are there {said}?", (entity,), (both, [0, 0], [number, 0], True, -1))
    for one in told:
        if one.there[b]:
            pair = [int(facts.concept[b, int(slot[b])]) for slot in (one.x, one.y)]
            x, y = (nouns[concept].single for concept in pair)
            r = int(one.r[b])
            text = f"Is the {x} {english.FORMS['relation'][r]} the {y}?"
            ask(SPATIAL, text, (places[pair[0]], places[pair[1]]), (pair, [0, 0], [1, 1], False, r))
    columns = zip(*wishes, strict=True)
    return questions, Spec(*(torch.tensor(column, device=facts.filled.device) for column in columns))
