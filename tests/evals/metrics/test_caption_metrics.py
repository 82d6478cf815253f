"""BLEU, ROUGE-L, CIDEr, METEOR and the tokenizer, compared with pycocoevalcap."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics import java_metrics
from vitrail.evals.metrics.caption_metrics import bleu_from_counts, cider, count_bleu_ngrams, rouge_l, tokenize_caption

WORDS = st.lists(st.sampled_from("a the man dog cat on red table sits".split()), min_size=1, max_size=9)  # noqa: SIM905
SET = st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=4)), min_size=2, max_size=6)
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")


@given(SET)
@settings(max_examples=60)
def test_matches_pycocoevalcap(rows):
    scorers = pytest.importorskip("pycocoevalcap.bleu.bleu_scorer"), pytest.importorskip("pycocoevalcap.rouge.rouge")
    cider_scorer = pytest.importorskip("pycocoevalcap.cider.cider_scorer").CiderScorer()
    output, references = [row[0] for row in rows], [row[1] for row in rows]
    bleu_scorer, rouge = scorers[0].BleuScorer(n=4), scorers[1].Rouge()
    texts = [" ".join(words) for words in output]
    truths = [[" ".join(words) for words in several] for several in references]
    for text, several in zip(texts, truths, strict=True):
        bleu_scorer += (text, several)
        cider_scorer += (text, several)
    whole, each = bleu_scorer.compute_score(option="closest", verbose=0)
    counts = count_bleu_ngrams(output, references)
    for n in range(1, 5):
        assert bleu_from_counts(counts.sum(0), n).item() == pytest.approx(whole[n - 1], abs=1e-12)
        assert bleu_from_counts(counts, n).tolist() == pytest.approx(each[n - 1], abs=1e-12)
    expected = [rouge.calc_score([text], several) for text, several in zip(texts, truths, strict=True)]
    assert rouge_l(output, references).tolist() == pytest.approx(expected, abs=1e-12)
    assert cider(output, references).tolist() == pytest.approx(cider_scorer.compute_score()[1].tolist(), abs=1e-12)


def test_worked_examples():
    output, references = [["a", "red", "cube"], ["a", "ball"]], [[["a", "red", "cube"]], [["two", "dogs"]]]
    assert bleu_from_counts(count_bleu_ngrams(output, references)[0], 3).item() == pytest.approx(1, abs=1e-8)
    assert bleu_from_counts(
        count_bleu_ngrams(output[:1], [[["a", "red", "cube", "here"]]])[0], 1
    ).item() == pytest.approx(torch.tensor(-1 / 3).exp().item())
    assert rouge_l(output, references).tolist() == pytest.approx([1, 0])
    first, second = cider(output, references).tolist()
    assert first == pytest.approx(7.5) and second == 0  # three words have no 4-gram
    assert rouge_l([[]], [[["a"]]]).item() == 0 and cider([[], []], references).tolist() == [0, 0]
    assert bleu_from_counts(count_bleu_ngrams([[]], [[["a"]]]).sum(0), 4).item() == 0


def test_mismatched_inputs_raise():
    with pytest.raises(DataError, match="1 captions but references for 2"):
        cider([["a"]], [[["a"]], [["b"]]])
    with pytest.raises(DataError, match="image 1 has no reference"):
        rouge_l([["a"], ["b"]], [[["a"]], []])


CAPTIONS = {
    "A man's dog isn't here, can't cannot don't.": "a man 's dog is n't here ca n't can not do n't",
    "Black-and-white cat/dog & a #1 sign.": "black-and-white cat/dog & a # 1 sign",
    'The "STOP" sign costs $5.50, 50% off!': "the stop sign costs $ 5.50 50 % off",
    "It's 10:30 a.m. in the U.S.": "it 's 10:30 a.m. in the u.s.",
    "a t-shirt... and/or x -- y; he'll they've I'm": "a t-shirt and/or x y he 'll they 've i 'm",
    "you're right, we'd go": "you 're right we 'd go",
    "1,000 birds @ 3/4 'quoted' words": "1,000 birds @ 3/4 quoted words",
    "dogs' tails; a woman wearing a hat,holding a cup.": "dogs tails a woman wearing a hat holding a cup",
    "the t-shirt's colour at 5 o'clock": "the t-shirt 's colour at 5 o'clock",
    "a 12-year-old's bike at 5pm, café": "a 12-year-old 's bike at 5pm café",
}


def test_tokenize_caption():
    assert {text: " ".join(tokenize_caption(text)) for text in CAPTIONS} == CAPTIONS


@needs_java
def test_tokens_match_the_java_tokenizer():
    pytest.importorskip("pycocoevalcap")
    assert [" ".join(words) for words in java_metrics.tokenize_ptb(list(CAPTIONS))] == list(CAPTIONS.values())


@needs_java
@pytest.mark.slow
def test_meteor():
    pytest.importorskip("pycocoevalcap")
    same, near, far = java_metrics.meteor_scores(
        [["a", "red", "cube"], ["a", "dog", "runs"], ["x"]], [[["a", "red", "cube"]], [["a", "dog", "ran"]], [["y"]]]
    ).tolist()
    assert same == pytest.approx(1) and far == 0 and 0.3 < near < 1


def test_missing_java_raises(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="METEOR needs Java"):
        java_metrics.meteor_scores([["a"]], [[["a"]]])
