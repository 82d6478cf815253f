"""Benchmarks of words alone: the harness's numbers, whichever way they are asked, and what stands beside."""

import json

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals.text_recorded import BARE, HARNESS, HARNESS_BARE
from evals.text_rows import HUB, KINDS, corpus, decoder, llama, words_of
from generate.test_answers import TEXTS as CAPTIONS
from generate.test_answers import unified
from helpers import randomize
from models.test_looking import KINDS as LOOKING
from test_talker import save
from vitrail import hub
from vitrail.errors import ConfigError, DataError, TextError
from vitrail.evals.suites.scored.continued import chosen, told
from vitrail.evals.suites.texts import TEXTS, any_benchmark, clean, weighed
from vitrail.generate.continuations import Continuations, pair
from vitrail.models.looking import LookingVLM
from vitrail.processing.text import Tokenizer


def opened(root, name):
    path = root / f"{name}.parquet"
    datasets.Dataset.from_list(HUB[name]).to_parquet(path)
    return TEXTS[name].row.read(path)


def ours(root, kind, name, batch=4):
    """What the harness gives: the scores, and of every sample how likely each option is."""
    if not (root / "llama").exists():
        llama(root / "llama", kind)
    model = Continuations(hub.load(root / "llama"), hub.tokenizer(root / "llama"))
    samples = opened(root, name)
    said = weighed(model.likelihoods, TEXTS[name], samples, batch=batch)
    scores = {score.name: score.value for score in TEXTS[name].row.score(samples, said) if not score.part}
    return scores, [list(json.loads(answer).values()) for answer in said]


# ---- the harness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_harness_has_it(tmp_path, kind):
    for name, (scores, weights) in HARNESS[kind].items():
        found, own = ours(tmp_path, kind, name)
        assert found == pytest.approx(scores), name
        for row, other in zip(own, weights, strict=True):
            assert row == pytest.approx(other, abs=2e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_bare_contexts_as_the_harness_has_them(kind):
    words = words_of(kind)
    model = Continuations(decoder(words.size, KINDS[kind]), words)
    assert model.likelihoods(BARE) == pytest.approx(HARNESS_BARE[kind], abs=2e-3)
    with pytest.raises(TextError, match="adds no token"):
        model.likelihoods([("a ro", "of")])  # "roof" is one token: the harness stops there


def test_prompts(tmp_path):
    """As the harness wrote them for the same rows."""

    def asked(name, n):
        sample = opened(tmp_path, name)[n]
        return TEXTS[name].texts(sample, TEXTS[name].row.question(sample, TEXTS[name].row.prompt))

    assert asked("arc", 1)[::2] == [
        ("Question: What do plants need \nAnswer:", " light"),
        ("Question: What do plants need \nAnswer:", "  two  spaces "),
    ]
    assert asked("hellaswag", 0)[2] == ("Roof removal: A man is on a roof. He", " holds a cube.")
    assert asked("hellaswag", 1)[0] == ("Home: How to build a wall. Find bricks. Look", "  Buy them now.")
    assert asked("hellaswag", 1)[1] == ("Home: How to build a wall. Find bricks. Look", " Ask. Wait")
    assert asked("hellaswag", 2)[0] == ("Home: How to build a wall. The mason", " rests")
    assert asked("piqa", 0)[0] == ("Question: To open a jar\nAnswer:", " tap the lid on a table")
    assert asked("siqa", 0)[1] == ("Q: Alex was late. Why did Alex run?\nA:", " for fun")
    assert asked("winogrande", 1) == [
        ("The red cube did not fit into the box because the red cube", " is too large."),
        ("The red cube did not fit into the box because the box", " is too large."),
    ]
    assert asked("winogrande", 2)[1] == ("The bus ", " was late, so _ ran.")
    assert clean(" [header] A  b [title] C") == " A b. C"


# ---- tokens -----------------------------------------------------------------------------------------------------

BYTES, PIECES = words_of("without bos"), words_of("pieces")


@pytest.mark.parametrize("words", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(st.text("ab red\n", min_size=1).filter(str.strip), st.text(" abred.", min_size=1), st.integers(0, 3))
def test_where_a_text_is_cut(words, context, continuation, spaces):
    """Spaces at the end of the context belong to the continuation, and the rule is the harness's, written out."""
    try:
        found = pair(words, context + " " * spaces, continuation)
    except TextError as error:
        assert "adds no token" in error.problem
        return
    assert found == pair(words, context.rstrip(), (context + " " * spaces)[len(context.rstrip()) :] + continuation)
    before = words.encode(context.rstrip(), specials=True)
    assert found.context == before
    assert found.continuation == words.encode(context + " " * spaces + continuation, specials=True)[len(before) :]


def test_a_text_without_a_context():
    assert pair(BYTES, "", " red").context == [BYTES.eos]
    assert pair(PIECES, "", " red").context == [PIECES.bos]
    assert pair(PIECES, "", "red").continuation == PIECES.encode("red")
    spelled = pair(BYTES, "", "</s>red")  # by strangers: it stays text
    assert spelled.context == [BYTES.eos] and BYTES.eos not in spelled.continuation
    with pytest.raises(TextError, match="spaces alone"):
        pair(BYTES, "  ", "a")
    with pytest.raises(TextError, match="adds no token"):
        pair(BYTES, "a", "")
    with pytest.raises(TextError, match="begins with"):
        pair(Tokenizer.train(corpus(), 300, specials=(), eos=None), "", "a")


def test_what_is_too_long_loses_its_beginning():
    model = Continuations(decoder(BYTES.size, 16), BYTES)
    long = "a red cube left of the very last box" * 3
    (found,) = model.likelihoods([(long, " red")])
    context, said = pair(BYTES, long, " red")
    with torch.no_grad():
        logits = model.decoder(torch.tensor([[*context, *said][-17:-1]])).log_softmax(-1)[0, -len(said) :]
    assert found == pytest.approx(float(logits[range(len(said)), said].sum()), abs=1e-4) and model.cut == 1
    with pytest.raises(ConfigError, match="passes the 16"):
        model.likelihoods([("a", long)])


# ---- models -----------------------------------------------------------------------------------------------------


def speakers(kind, root):
    if kind == "decoder":
        return decoder(BYTES.size), BYTES
    if kind == "unified":
        return unified(), Tokenizer.train(CAPTIONS * 3, 300)
    if kind in LOOKING:
        config = LOOKING[kind].with_(decoder=LOOKING[kind].decoder.with_(vocab=BYTES.size), mark=BYTES.size + 1)
        return randomize(LookingVLM(config), 0, 0.3), BYTES
    save(root / "vlm")
    return hub.load(root / "vlm"), hub.tokenizer(root / "vlm")


ALL = [
    ("a red cube", " left of a ball"),
    ("", " red"),
    ("a", " b"),
    ("two green cones behind a red", " cube and a ball."),
]


@pytest.mark.parametrize("kind", ["decoder", "vlm", "unified", "llama", "flamingo"])
def test_a_batch_is_one_at_a_time(tmp_path, kind):
    torch.manual_seed(0)
    model = Continuations(*speakers(kind, tmp_path))
    alone = [model.likelihoods([text])[0] for text in ALL]
    assert model.likelihoods(ALL) == pytest.approx(alone, abs=1e-3)
    assert model.likelihoods(ALL[::-1]) == pytest.approx(alone[::-1], abs=1e-3)
    assert model.likelihoods([]) == [] and len({round(one, 3) for one in alone}) == len(ALL)
    # Token by token: the chain rule.
    context, said = pair(model.words, *ALL[0])
    steps = [model.of([([*context, *said[:n]], [said[n]])])[0] for n in range(len(said))]
    assert alone[0] == pytest.approx(sum(steps), abs=1e-3)


def test_without_pictures_a_vlm_is_its_language_model(tmp_path):
    model, words = speakers("vlm", tmp_path)
    alone = Continuations(model.decoder, words).likelihoods(ALL)
    assert Continuations(model, words).likelihoods(ALL) == pytest.approx(alone, abs=1e-3)


@given(st.lists(st.tuples(st.text("ab red", min_size=1).filter(str.strip), st.text("abred", min_size=1)), max_size=5))
def test_any_batch_is_one_at_a_time(texts):
    model = Continuations(SMALL, BYTES)
    own = [(context.strip(), f" {continuation}") for context, continuation in texts]
    assert model.likelihoods(own) == pytest.approx([model.likelihoods([text])[0] for text in own], abs=1e-3)


SMALL = decoder(BYTES.size)


def test_a_benchmark_in_batches_is_one_sample_at_a_time(tmp_path):
    for name in TEXTS:
        one, many = ours(tmp_path, "bytes", name, batch=1), ours(tmp_path, "bytes", name, batch=16)
        assert one[0] == many[0]
        for row, other in zip(one[1], many[1], strict=True):
            assert row == pytest.approx(other, abs=1e-3)


# ---- scores -----------------------------------------------------------------------------------------------------


def test_sums_and_sums_over_characters(tmp_path):
    samples = opened(tmp_path, "arc")
    row = TEXTS["arc"].row
    # The longest option is nearly as likely as the shortest: likelier by its characters.
    said = [told({letter: -1.0 - 0.01 * len(text) for letter, text in sample.choices.items()}) for sample in samples]
    assert [chosen(answer, sample) for answer, sample in zip(said, samples, strict=True)] == ["A", "1", "E"]
    assert [chosen(*both, by_length=True) for both in zip(said, samples, strict=True)] == ["C", "2", "B"]
    acc, norm = row.score(samples, said, [told(dict.fromkeys(sample.choices, 0.0)) for sample in samples])
    assert (acc.name, acc.value, norm.name, norm.value) == ("acc", pytest.approx(2 / 3), "acc_norm", 0)
    chance = (1 / 4 + 1 / 3 + 1 / 5) / 3
    assert acc.beside == pytest.approx({"chance": chance, "majority": 1 / 3, "longest": 0, "blind": 1 / 3})
    assert acc.interval[0] < acc.value < acc.interval[1]
    with pytest.raises(DataError, match="says not how likely"):
        row.score(samples, ["steam"] * 3)


def test_samples_about_one_text_are_drawn_together(tmp_path):
    samples = opened(tmp_path, "siqa")
    (acc,) = TEXTS["siqa"].row.score(samples, ["A", "A"])
    assert acc.value == 0.5 and acc.interval == (0, 1)  # one text tells nothing of others
    scores = TEXTS["hellaswag"].row.score(opened(tmp_path, "hellaswag"), ["D", "A", "A"])
    assert {score.title for score in scores} == {
        f"{name}{part}"
        for name in ("acc", "acc_norm")
        for part in ("", ", split_type indomain", ", split_type zeroshot")
    }


def test_kept_and_compared(tmp_path):
    samples, text = opened(tmp_path, "piqa"), TEXTS["piqa"]
    calls = []

    def weigh(texts):
        calls.append(texts)
        return [-float(len(continuation)) for _, continuation in texts]

    keep = tmp_path / "kept.jsonl"
    said = weighed(weigh, text, samples, batch=8, keep=keep, model="toy")
    assert weighed(weigh, text, samples, keep=keep, model="toy") == said and len(calls) == 1
    blind = weighed(weigh, text, samples, batch=8, blind=True, keep=keep, model="toy")
    assert calls[1][0] == ("", " tap the lid on a table") and blind == said
    found = any_benchmark("piqa").compare(samples, said, ["B", "B"])
    assert found.difference == 0.5 and found.of == 2
    assert any_benchmark("pope").format == "pope"
    with pytest.raises(ConfigError, match="did you mean 'piqa'"):
        any_benchmark("pica")


def test_blind_winogrande_has_only_the_option_before_it(tmp_path):
    sample = opened(tmp_path, "winogrande")[0]
    assert TEXTS["winogrande"].texts(sample, "") == [
        ("Sarah", " always got the easier cases."), ("Maria", " always got the easier cases.")
    ]  # fmt: skip
