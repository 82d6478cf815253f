"""Dense prompts: descriptions of whole scenes with a question graph, as in DPG-Bench.

Every question is also a `DrawingSpec`, so that a detector can answer it from boxes, concepts and colours.

Shapes: B scenes, O object slots, Q questions, K = 2 things in a question.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from vitrail.data.language import english
from vitrail.data.language.compiled_templates import ObjectGroups
from vitrail.data.language.drawing_prompts import DrawingSpec, matches_spec
from vitrail.data.language.scene_captions import ObjectRelation, choose_relations, group_objects, render_relations
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.question_graphs import GraphQuestion, QuestionGraph
from vitrail.data.scenes.scene import COLOURS, SceneBatch

ENTITY, COLOUR, COUNT, SPATIAL = "entity - whole", "attribute - color", "other - count", "relation - spatial"
MIN_KINDS = 2  # minimum kinds of things in a dense prompt

_SpecRow = tuple[list[int], list[int], list[int], bool, int]  # a row of a DrawingSpec


@dataclass(frozen=True, eq=False)
class DensePromptBatch:
    """Dense prompts with their question graphs, and the scenes that they describe."""

    graphs: list[QuestionGraph]
    specs: list[DrawingSpec]  # one per graph, with one row per question
    scenes: SceneBatch  # (B,)

    def answer_questions(
        self, language: SceneLanguage, graph_numbers: Sequence[int], detected_scenes: SceneBatch
    ) -> list[list[bool]]:
        """Answer the questions of the graphs with these numbers for scenes, or detections in the form of scenes."""
        specs = [self.specs[n] for n in graph_numbers]
        sizes = [len(one.count) for one in specs]
        spec = DrawingSpec(*(torch.cat([getattr(one, f.name) for one in specs]) for f in fields(DrawingSpec)))
        place = torch.arange(len(specs)).repeat_interleave(torch.tensor(sizes))  # (Q,) index of the scene
        yes = matches_spec(language, spec, detected_scenes[place.to(spec.count.device)])
        return [row.tolist() for row in yes.split(sizes)]


def generate_dense_prompts(
    language: SceneLanguage, scenes: SceneBatch, seed: int, *, held_out: bool = False
) -> DensePromptBatch:
    """Generate a prompt for each suitable scene.

    A scene needs at least two kinds of things with unambiguous names, and two things with a clear relation. The prompt
    states a colour if all things of a kind have it. `held_out` selects paraphrases that training never uses.
    """
    facts, draws = SceneFacts(language, scenes), LanguageRandom(seed, scenes.index, "dense", held_out)
    # All things of the kind have one colour.
    alone = (~facts.same_concept | (facts.colour[:, :, None] == facts.colour[:, None, :])).all(2)
    group, _ = group_objects(facts, draws, facts.colour * alone)
    stated_relations = choose_relations(
        facts, draws, facts.has_unique_name[:, :, None] & facts.has_unique_name[:, None, :]
    )
    captions = language.qa_templates["caption_short"].answer
    head = captions.fill(draws.choose_template("caption", captions), list=group)
    texts = language.pieces.to_texts(torch.cat([head, *render_relations(facts, draws, stated_relations)], 1))
    clear = facts.is_thing & ~facts.is_frame & (facts.same_name.sum(2) == facts.concept_count)
    valid = (clear | ~facts.is_filled).all(1) & ((group.count > 0).sum(1) >= MIN_KINDS) & stated_relations[0].is_stated
    rows = valid.nonzero()[:, 0]
    graphs, specs = [], []
    for b in rows.tolist():
        questions, spec = _build_questions(facts, b, group, stated_relations)
        graphs.append(QuestionGraph(str(int(scenes.index[b])), texts[b], tuple(questions)))
        specs.append(spec)
    return DensePromptBatch(graphs, specs, scenes[rows])


def _build_questions(
    facts: SceneFacts, b: int, group: ObjectGroups, stated_relations: Sequence[ObjectRelation]
) -> tuple[list[GraphQuestion], DrawingSpec]:
    """Build the questions about scene b: existence, colour and count of each kind, and relations."""
    questions: list[GraphQuestion] = []
    spec_rows: list[_SpecRow] = []
    nouns, places = facts.language.names.nouns, {}

    def ask(category: str, text: str, depends: tuple[int, ...], spec_row: _SpecRow) -> None:
        questions.append(GraphQuestion(len(questions) + 1, category, text, depends))
        spec_rows.append(spec_row)

    for colour, concept, number in zip(*(column[b].tolist() for column in group), strict=True):
        if not number:
            continue
        noun, both = nouns[concept], [concept, concept]
        entity = len(questions) + 1
        places[concept] = entity
        ask(
            ENTITY, f"Is there {english.with_indefinite_article(noun.singular)}?", (), (both, [0, 0], [1, 0], False, -1)
        )
        if colour:
            phrase = english.with_indefinite_article(f"{COLOURS[colour].name} {noun.singular}")
            ask(COLOUR, f"Is there {phrase}?", (entity,), (both, [colour, colour], [1, 0], False, -1))
        if number > 1:
            phrase = f"{english.NUMBER_WORDS[number]} {noun.plural}"
            ask(COUNT, f"Are there {phrase}?", (entity,), (both, [0, 0], [number, 0], True, -1))
    for one in stated_relations:
        if one.is_stated[b]:
            pair = [int(facts.concept[b, int(slot[b])]) for slot in (one.x, one.y)]
            x, y = (nouns[concept].singular for concept in pair)
            r = int(one.relation[b])
            text = f"Is the {x} {english.PHRASE_FORMS['relation'][r]} the {y}?"
            ask(SPATIAL, text, (places[pair[0]], places[pair[1]]), (pair, [0, 0], [1, 1], False, r))
    columns = zip(*spec_rows, strict=True)
    return questions, DrawingSpec(*(torch.tensor(column, device=facts.is_filled.device) for column in columns))
