"""Text benchmarks, compared with lm-evaluation-harness, and their baselines."""

import json

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evals.text_recorded import BARE, HARNESS, HARNESS_BARE
from evals.text_rows import HUB, KINDS, corpus, decoder, llama, words_of
from generate.test_unified_generation import TEXTS as CAPTIONS
from generate.test_unified_generation import unified
from helpers import randomize
from models.test_cross_attention_vlm import KINDS as LOOKING
from pipelines.test_chat import save
from vitrail import hub
from vitrail.errors import ConfigError, DataError, TextError
from vitrail.evals.metrics.likelihood_metrics import choose_letter, format_likelihoods
from vitrail.evals.suites.benchmarks import get_benchmark
from vitrail.evals.suites.text_benchmarks import TEXT_BENCHMARKS, clean_hellaswag, score_continuations
from vitrail.generate.continuation_scoring import ContinuationScorer, tokenize_continuation
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.processing.tokenizer import Tokenizer


def opened(root, name):
    path = root / f"{name}.parquet"
    datasets.Dataset.from_list(HUB[name]).to_parquet(path)
    return TEXT_BENCHMARKS[name].benchmark.load_samples(path)


def ours(root, kind, name, batch=4):
    """Recorded scores, and log-likelihoods of all options."""
    if not (root / "llama").exists():
        llama(root / "llama", kind)
    model = ContinuationScorer(hub.load(root / "llama"), hub.load_tokenizer(root / "llama"))
    samples = opened(root, name)
    output = score_continuations(model.score_texts, TEXT_BENCHMARKS[name], samples, batch_size=batch)
    scores = {
        score.name: score.value for score in TEXT_BENCHMARKS[name].benchmark.score(samples, output) if not score.subset
    }
    return scores, [list(json.loads(answer).values()) for answer in output]


# ---- lm-eval ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_matches_recorded_lm_eval_values(tmp_path, kind):
    for name, (scores, weights) in HARNESS[kind].items():
        found, own = ours(tmp_path, kind, name)
        assert found == pytest.approx(scores), name
        for row, other in zip(own, weights, strict=True):
            assert row == pytest.approx(other, abs=2e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_matches_recorded_lm_eval_values_without_special_tokens(kind):
    words = words_of(kind)
    model = ContinuationScorer(decoder(words.vocab_size, KINDS[kind]), words)
    assert model.score_texts(BARE) == pytest.approx(HARNESS_BARE[kind], abs=2e-3)
    with pytest.raises(TextError, match="adds no token"):
        model.score_texts([("a ro", "of")])  # "roof" is one token: lm-eval stops there


def test_prompts(tmp_path):
    """Prompts as lm-evaluation-harness builds them for the same rows."""

    def asked(name, n):
        sample = opened(tmp_path, name)[n]
        return TEXT_BENCHMARKS[name].build_continuations(
            sample, TEXT_BENCHMARKS[name].benchmark.build_question(sample, TEXT_BENCHMARKS[name].benchmark.prompt)
        )

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
    assert clean_hellaswag(" [header] A  b [title] C") == " A b. C"


# ---- tokens -----------------------------------------------------------------------------------------------------

BYTES, PIECES = words_of("without bos"), words_of("pieces")


@pytest.mark.parametrize("words", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(st.text("ab red\n", min_size=1).filter(str.strip), st.text(" abred.", min_size=1), st.integers(0, 3))
def test_context_continuation_boundary(words, context, continuation, spaces):
    """Trailing spaces of the context move to the continuation, as in lm-evaluation-harness."""
    try:
        found = tokenize_continuation(words, context + " " * spaces, continuation)
    except TextError as error:
        assert "adds no token" in error.problem
        return
    assert found == tokenize_continuation(
        words, context.rstrip(), (context + " " * spaces)[len(context.rstrip()) :] + continuation
    )
    before = words.encode(context.rstrip(), add_special_tokens=True)
    assert found.context == before
    assert (
        found.continuation
        == words.encode(context + " " * spaces + continuation, add_special_tokens=True)[len(before) :]
    )


def test_empty_context():
    assert tokenize_continuation(BYTES, "", " red").context == [BYTES.eos_token_id]
    assert tokenize_continuation(PIECES, "", " red").context == [PIECES.bos_token_id]
    assert tokenize_continuation(PIECES, "", "red").continuation == PIECES.encode("red")
    spelled = tokenize_continuation(BYTES, "", "</s>red")  # special tokens in data stay text
    assert spelled.context == [BYTES.eos_token_id] and BYTES.eos_token_id not in spelled.continuation
    with pytest.raises(TextError, match="only spaces"):
        tokenize_continuation(BYTES, "  ", "a")
    with pytest.raises(TextError, match="adds no token"):
        tokenize_continuation(BYTES, "a", "")
    with pytest.raises(TextError, match="no BOS or EOS token"):
        tokenize_continuation(Tokenizer.train(corpus(), 300, special_tokens=(), eos=None), "", "a")


def test_long_texts_are_truncated_on_the_left():
    model = ContinuationScorer(decoder(BYTES.vocab_size, 16), BYTES)
    long = "a red cube left of the very last box" * 3
    (found,) = model.score_texts([(long, " red")])
    context, output = tokenize_continuation(BYTES, long, " red")
    with torch.no_grad():
        logits = model.decoder(torch.tensor([[*context, *output][-17:-1]])).log_softmax(-1)[0, -len(output) :]
    assert (
        found == pytest.approx(float(logits[range(len(output)), output].sum()), abs=1e-4) and model.num_truncated == 1
    )
    with pytest.raises(ConfigError, match="more than the context length 16"):
        model.score_texts([("a", long)])


# ---- models -----------------------------------------------------------------------------------------------------


def speakers(kind, root):
    if kind == "decoder":
        return decoder(BYTES.vocab_size), BYTES
    if kind == "unified":
        return unified(), Tokenizer.train(CAPTIONS * 3, 300)
    if kind in LOOKING:
        config = LOOKING[kind].replace(
            decoder=LOOKING[kind].decoder.replace(vocab_size=BYTES.vocab_size), image_token_id=BYTES.vocab_size + 1
        )
        return randomize(CrossAttentionVLM(config), 0, 0.3), BYTES
    save(root / "vlm")
    return hub.load(root / "vlm"), hub.load_tokenizer(root / "vlm")


ALL = [
    ("a red cube", " left of a ball"),
    ("", " red"),
    ("a", " b"),
    ("two green cones behind a red", " cube and a ball."),
]


@pytest.mark.parametrize("kind", ["decoder", "vlm", "unified", "llama", "flamingo"])
def test_batched_likelihoods_match_single_ones(tmp_path, kind):
    torch.manual_seed(0)
    model = ContinuationScorer(*speakers(kind, tmp_path))
    alone = [model.score_texts([text])[0] for text in ALL]
    assert model.score_texts(ALL) == pytest.approx(alone, abs=1e-3)
    assert model.score_texts(ALL[::-1]) == pytest.approx(alone[::-1], abs=1e-3)
    assert model.score_texts([]) == [] and len({round(one, 3) for one in alone}) == len(ALL)
    # Token by token, by the chain rule.
    context, output = tokenize_continuation(model.tokenizer, *ALL[0])
    steps = [model.score_tokens([([*context, *output[:n]], [output[n]])])[0] for n in range(len(output))]
    assert alone[0] == pytest.approx(sum(steps), abs=1e-3)


def test_vlm_without_images_matches_its_language_model(tmp_path):
    model, words = speakers("vlm", tmp_path)
    alone = ContinuationScorer(model.decoder, words).score_texts(ALL)
    assert ContinuationScorer(model, words).score_texts(ALL) == pytest.approx(alone, abs=1e-3)


@given(st.lists(st.tuples(st.text("ab red", min_size=1).filter(str.strip), st.text("abred", min_size=1)), max_size=5))
def test_batch_size_does_not_change_likelihoods(texts):
    model = ContinuationScorer(SMALL, BYTES)
    own = [(context.strip(), f" {continuation}") for context, continuation in texts]
    assert model.score_texts(own) == pytest.approx([model.score_texts([text])[0] for text in own], abs=1e-3)


SMALL = decoder(BYTES.vocab_size)


def test_batch_size_does_not_change_benchmark_answers(tmp_path):
    for name in TEXT_BENCHMARKS:
        one, many = ours(tmp_path, "bytes", name, batch=1), ours(tmp_path, "bytes", name, batch=16)
        assert one[0] == many[0]
        for row, other in zip(one[1], many[1], strict=True):
            assert row == pytest.approx(other, abs=1e-3)


# ---- scores -----------------------------------------------------------------------------------------------------


def test_acc_and_acc_norm(tmp_path):
    samples = opened(tmp_path, "arc")
    row = TEXT_BENCHMARKS["arc"].benchmark
    # The longest option is nearly as likely as the shortest, so it is more likely per character.
    output = [
        format_likelihoods({letter: -1.0 - 0.01 * len(text) for letter, text in sample.choices.items()})
        for sample in samples
    ]
    assert [choose_letter(answer, sample) for answer, sample in zip(output, samples, strict=True)] == ["A", "1", "E"]
    assert [choose_letter(*both, by_length=True) for both in zip(output, samples, strict=True)] == ["C", "2", "B"]
    acc, norm = row.score(
        samples, output, [format_likelihoods(dict.fromkeys(sample.choices, 0.0)) for sample in samples]
    )
    assert (acc.name, acc.value, norm.name, norm.value) == ("acc", pytest.approx(2 / 3), "acc_norm", 0)
    chance = (1 / 4 + 1 / 3 + 1 / 5) / 3
    assert acc.baselines == pytest.approx({"chance": chance, "majority": 1 / 3, "longest": 0, "blind": 1 / 3})
    assert acc.interval[0] < acc.value < acc.interval[1]
    with pytest.raises(DataError, match="has no likelihood of each option"):
        row.score(samples, ["steam"] * 3)


def test_bootstrap_groups_samples_about_one_text(tmp_path):
    samples = opened(tmp_path, "siqa")
    (acc,) = TEXT_BENCHMARKS["siqa"].benchmark.score(samples, ["A", "A"])
    assert acc.value == 0.5 and acc.interval == (0, 1)  # one text has no interval
    scores = TEXT_BENCHMARKS["hellaswag"].benchmark.score(opened(tmp_path, "hellaswag"), ["D", "A", "A"])
    assert {score.title for score in scores} == {
        f"{name}{part}"
        for name in ("acc", "acc_norm")
        for part in ("", ", split_type indomain", ", split_type zeroshot")
    }


def test_answers_are_saved_and_compared(tmp_path):
    samples, text = opened(tmp_path, "piqa"), TEXT_BENCHMARKS["piqa"]
    calls = []

    def weigh(texts):
        calls.append(texts)
        return [-float(len(continuation)) for _, continuation in texts]

    keep = tmp_path / "kept.jsonl"
    output = score_continuations(weigh, text, samples, batch_size=8, answers_file=keep, model_name="toy")
    assert score_continuations(weigh, text, samples, answers_file=keep, model_name="toy") == output and len(calls) == 1
    blind = score_continuations(weigh, text, samples, batch_size=8, blind=True, answers_file=keep, model_name="toy")
    assert calls[1][0] == ("", " tap the lid on a table") and blind == output
    found = get_benchmark("piqa").compare(samples, output, ["B", "B"])
    assert found.difference == 0.5 and found.count == 2
    assert get_benchmark("pope").format == "pope"
    with pytest.raises(ConfigError, match="did you mean 'piqa'"):
        get_benchmark("pica")


def test_blind_winogrande_context_is_the_option(tmp_path):
    sample = opened(tmp_path, "winogrande")[0]
    assert TEXT_BENCHMARKS["winogrande"].build_continuations(sample, "") == [
        ("Sarah", " always got the easier cases."), ("Maria", " always got the easier cases.")
    ]  # fmt: skip
