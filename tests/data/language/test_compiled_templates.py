"""Templates: English that is right, paraphrases held apart, and one gather that fills them all."""

import re
from difflib import SequenceMatcher
from itertools import chain

import pytest
import torch

from vitrail.data.language import QA_KINDS, PieceTable, SceneLanguage, english, generate_questions
from vitrail.data.language.compiled_templates import CompiledTemplates, Lexicon, Noun, ObjectGroups, ObjectPhrase
from vitrail.data.language.templates import (
    CAPTION_KINDS,
    DRAWING_PROMPT_KINDS,
    EXTRA_TEMPLATES,
    FOLLOW_UP_KINDS,
    QUESTION_KINDS,
    SENTENCE_KINDS,
)
from vitrail.data.scenes import backgrounds
from vitrail.errors import ConfigError, TextError

NOUNS = [Noun("dog", "dogs"), Noun("apple", "apples"), Noun('word "up"', 'words "up"', True), Noun("word", "words")]


@pytest.fixture
def lexicon():
    return Lexicon(NOUNS, {}, max_groups=4)


def things(*pairs):
    return ObjectPhrase(*map(torch.tensor, zip(*pairs, strict=True)))


def test_articles_and_colours(lexicon):
    pieces = PieceTable()
    frames = CompiledTemplates(
        ["Is {a x} here?", "{The x}, {plural y}!", "{A x} {relation r} {the y}.", "No {x}."], [], lexicon, pieces
    )
    x = things((0, 1), (1, 0), (2, 1), (0, 2), (5, 2), (0, 1))
    y = things((0, 0), (0, 1), (2, 0), (3, 1), (0, 2), (0, 0))
    rows = frames.fill(torch.tensor([0, 1, 2, 1, 0, 3]), x=x, y=y, r=torch.tensor([0, 0, 1, 0, 0, 0]))
    assert pieces.to_texts(rows) == [
        "Is an apple here?",
        "The red dog, apples!",
        "An orange apple to the right of the orange dog.",
        'The word "up", yellow apples!',
        'Is a blue word "up" here?',
        "No apple.",
    ]


def test_lists(lexicon):
    pieces = PieceTable()
    frames = CompiledTemplates(["We see {list}."], [], lexicon, pieces)
    numbers = torch.tensor([[1, 0, 0, 0], [2, 1, 0, 0], [1, 3, 1, 0], [1, 1, 1, 12]])
    group = ObjectGroups(torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [2, 2, 0, 0], [0, 0, 5, 0]]),
                  torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 2]]), numbers)  # fmt: skip
    assert pieces.to_texts(frames.fill(torch.zeros(4, dtype=torch.int64), list=group)) == [
        "We see an apple.",
        "We see two red dogs and an apple.",
        'We see an orange dog, three orange apples and the word "up".',
        'We see a dog, an apple, a blue word "up" and twelve words "up".',
    ]


def test_invalid_templates_are_refused(lexicon):
    with pytest.raises(TextError, match="there is no space before the placeholder"):
        CompiledTemplates(["{colour c}{colour d}"], [], lexicon, PieceTable())
    with pytest.raises(TextError, match="'hue'"):
        CompiledTemplates(["{hue c}"], [], lexicon, PieceTable())


def test_pieces_begin_a_sentence_or_with_a_space(words):
    starts: set[str] = set()
    for sort in words.qa_templates.values():
        for frames in (sort.question, sort.answer):
            for template in range(len(frames)):
                behind = frames.list_start[template, 1:], frames.list_size[template, 1:]
                places = chain.from_iterable(
                    range(b, b + n) for b, n in zip(*(t.tolist() for t in behind), strict=True)
                )
                starts |= {words.pieces.texts[int(frames.piece_rows[p])][:1] for p in places}
    # the second column is a noun that begins the sentence where its colour is not said
    assert starts <= {" ", ""} | {text[0] for text in words.pieces.texts if re.match(r"The |a |an |the ", text)}


@pytest.mark.parametrize(
    "noun,article",
    [("apple", "an"), ("dog", "a"), ("hour", "an"), ("hourglass", "an"), ("horse", "a"), ("unicorn", "a"),
     ("umbrella", "an"), ("uninvited guest", "an"), ("ukulele", "a"), ("euro", "a"), ("ewe", "a"), ("onion", "an"),
     ("one-way sign", "a"), ("heir", "an"), ("house", "a"), ("X-ray", "an"), ("UFO", "a"), ("SOS button", "an"),
     ("8 ball", "an"), ("18 wheeler", "an"), ("1st place medal", "a"), ("A button", "an"), ("B button", "a"),
     ("USB stick", "a"), ("honey pot", "a"), ("orange", "an"), ("yo-yo", "a")],
)  # fmt: skip
def test_articles(noun, article):
    assert english.with_indefinite_article(noun) == f"{article} {noun}"


def test_nouns_that_will_not_be_counted():
    assert english.countable_noun("scissors", "scissors") == ("pair of scissors", "pairs of scissors")
    assert english.countable_noun("grapes", "grapes") == ("bunch of grapes", "bunches of grapes")
    assert english.countable_noun("bread", "bread") == ("piece of bread", "pieces of bread")
    assert english.countable_noun("tropical fish", "tropical fish") == ("tropical fish", "tropical fish")
    assert english.countable_noun("mouse", "mice") == ("mouse", "mice")


def test_names_lose_their_colours():
    assert english.strip_colour("green apple") == "apple"
    assert english.strip_colour("large Blue diamond") == "large diamond"
    assert english.strip_colour("orange") == "orange"


def test_every_background_has_words():
    assert set(english.BACKGROUND_PHRASES) == set(backgrounds.BACKGROUND_NAMES)


ASKED = QUESTION_KINDS | CAPTION_KINDS | FOLLOW_UP_KINDS
PROMPTS = {f"draw_{name}": kind for name, kind in DRAWING_PROMPT_KINDS.items()}


def bare(template):
    """A wording without what hardly makes it another: case, articles, punctuation, and how a slot is put into words"""
    text = re.sub(r"\{(?:\w+ )?(\w+)\}", r"\1", template.lower())
    return " ".join(word for word in re.findall(r"\w+", text) if word not in ("a", "an", "the", "this"))


@pytest.mark.parametrize("kind", [*ASKED, *PROMPTS])
def test_enough_paraphrases_of_which_some_are_held_out(kind):
    texts = (ASKED | PROMPTS)[kind]
    assert len(set(map(bare, texts.train))) >= (14 if kind in ASKED else 8)
    assert len(set(map(bare, texts.test))) >= (2 if kind in ASKED else 1)
    assert not set(map(bare, texts.answers)) & set(map(bare, texts.answers_test))


def test_held_out_wordings_are_held_out_of_all_kinds():
    kinds = (ASKED | PROMPTS).values()
    train, test = ({bare(text) for kind in kinds for text in getattr(kind, part)} for part in ("train", "test"))
    assert not train & test


@pytest.mark.parametrize("kind", EXTRA_TEMPLATES)
def test_additional_wordings_differ_from_held_out_ones(kind):
    """They differ as sentences and by words: at least a third of the text between the slots differs."""
    texts, more = (ASKED | SENTENCE_KINDS)[kind], EXTRA_TEMPLATES[kind]
    assert len(set(more)) == len(more) and not set(map(bare, more)) & set(map(bare, texts.train))

    def between(text: str) -> list[str]:
        return re.findall(r"\w+", re.sub(r"\{[^}]*\}", "", text.lower()))

    for held in {text for kind in (ASKED | PROMPTS).values() for text in kind.test}:
        near = [text for text in more if SequenceMatcher(None, between(text), between(held)).ratio() >= 2 / 3]
        assert not near, (held, near)


def test_extra_wordings_are_used_only_if_requested(words, many_words, scenes):
    batch, many = scenes(1, many=2000), many_words
    for kind in ("counting", "existence_random", "relation"):
        usual, more = (generate_questions(some, batch, 0, kind) for some in (words, many))
        texts, further = QUESTION_KINDS[kind].train, EXTRA_TEMPLATES[kind]
        assert usual.template[usual.valid].unique().tolist() == list(range(len(texts)))
        assert more.template[more.valid].unique().tolist() == list(range(len(texts) + len(further)))
        held = generate_questions(many, batch, 0, kind, held_out=True)
        known = generate_questions(words, batch, 0, kind, held_out=True)
        assert many.pieces.to_texts(held.question[:20]) == words.pieces.to_texts(known.question[:20])
        assert torch.equal(usual.label, more.label) and torch.equal(usual.valid, more.valid)  # other words, same truth


@pytest.mark.parametrize("kind", [*ASKED, *SENTENCE_KINDS])
def test_every_wording_is_filled_for_all_names(kind):
    texts, pieces = (ASKED | SENTENCE_KINDS)[kind], PieceTable()
    texts = texts._replace(train=texts.train + EXTRA_TEMPLATES.get(kind, ()))
    wordings = (*texts.train, *texts.test)
    forms = {"box": "07", "background": ["stripes", "checks"], "text": ["stop", "up"]}
    frames = CompiledTemplates(texts.train, texts.test, Lexicon(NOUNS, forms, max_groups=4), pieces)
    every = torch.cartesian_prod(torch.arange(len(wordings)), torch.arange(len(NOUNS)), torch.arange(2))
    template, noun, colour = every.unbind(1)
    slots = {slot.partition(".")[0]: ObjectPhrase(colour, noun) for slot in frames.value_names if "." in slot}
    slots |= {slot: torch.ones_like(template) for slot in frames.value_names if "." not in slot}
    for text, row in zip(pieces.to_texts(frames.fill(template, **slots)), template.tolist(), strict=True):
        assert not re.search(r"[{}]|  | [.,:?]", text), text
        assert all(part in text for part in re.split(r" ?\{[^}]*\}", wordings[row])), text


def test_held_out_templates_are_never_trained_on(words, scenes):
    batch = scenes(1, many=2000)
    for kind, texts in (QUESTION_KINDS | CAPTION_KINDS).items():
        seen, unseen = (generate_questions(words, batch, 0, kind, held_out=held_out) for held_out in (False, True))
        assert seen.template[seen.valid].unique().tolist() == list(range(len(texts.train)))
        assert unseen.template[unseen.valid].unique().tolist() == [len(texts.train) + i for i in range(len(texts.test))]
        assert QA_KINDS[seen.kind[0]] == kind
    for texts in SENTENCE_KINDS.values():
        assert texts.train and texts.test and not set(texts.train) & set(texts.test)


def test_concepts_of_one_name_are_one(words, toy):
    called = {toy.names[c]: int(words.concept[i]) for i, c in enumerate(toy.concept.tolist())}
    assert called["green apple"] == called["red apple"]
    assert toy.kind.count("word") == int(words.is_word[words.concept].sum())  # the word “cat” is no cat
    assert words.is_same_name(torch.tensor(called["dog"]), torch.tensor(called["hot dog"]))
    assert words.is_same_name(torch.tensor(called["bird"]), torch.tensor(called["owl"]))
    assert not words.is_same_name(torch.tensor(called["dog face"]), torch.tensor(called["hot dog"]))


def test_only_sprites_in_use_are_asked_about(toy, scenes):
    used = torch.tensor([i for i, c in enumerate(toy.concept.tolist()) if toy.category[c] == "animal"])
    words = SceneLanguage.build(toy, sprite_rows=used)
    animals = set(words.concept[used].tolist())
    for kind in ("existence_random", "existence_popular"):
        output = generate_questions(words, scenes(2, many=500), 0, kind)
        negative = output[output.valid & (output.label == 0)]
        texts = words.pieces.to_texts(negative.question)
        assert len(texts) > 100
        names = {toy.names[c].removeprefix("black ") for c in toy.concept[used].tolist()}
        assert all(any(f" {name}" in text for name in names) for text in texts)
    assert set(words.uniform_pools.concept.tolist()) == animals


def test_impossible_words_are_refused(toy, scenes, words):
    with pytest.raises(ConfigError, match="1 to 20"):
        SceneLanguage.build(toy, max_objects=40)
    with pytest.raises(ConfigError, match="objects=8"):
        generate_questions(SceneLanguage.build(toy, max_objects=4), scenes(0, many=2), 0, "colour")
    with pytest.raises(ConfigError, match="did you mean 'colour'"):
        generate_questions(words, scenes(0, many=2), 0, "color")
