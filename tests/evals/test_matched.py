"""Retrieval by several vectors a picture, and in two looks: against rows that are sorted out in full."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from evals.test_asking import Toy
from evals.test_suites_models import own, tokenizer
from helpers import randomize
from models.test_qformer import CONFIG
from vitrail import hub
from vitrail.cli.eval import app
from vitrail.data.pictures import READERS
from vitrail.errors import ConfigError
from vitrail.evals.queried import QueryEmbedder
from vitrail.evals.suites import sets
from vitrail.evals.suites.matched import reranked
from vitrail.evals.suites.retrieval import ranks
from vitrail.models.qformer import TextQFormer
from vitrail.objectives.queries import closest
from vitrail.processing.preprocessing import Preprocessing


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 10), st.integers(0, 2**20))
def test_the_first_go_in_a_new_order_and_the_rest_stay(Q, G, most, seed):
    chance = torch.Generator().manual_seed(seed)
    held = torch.randint(0, 3, (G,), generator=chance)
    asked = held[torch.randint(0, G, (Q,), generator=chance)]
    first, again = (torch.rand(Q, G, generator=chance) for _ in range(2))
    found = reranked(first, asked, held, lambda q, g: again[q, g], most)
    for q in range(Q):
        order = first[q].argsort(descending=True).tolist()
        top = sorted(order[:most], key=lambda g: -float(first[q, g] + again[q, g]))
        place = next(i for i, g in enumerate([*top, *order[most:]]) if held[g] == asked[q])
        before = {i for i, g in enumerate([*top, *order[most:]]) if i < place and held[g] == asked[q]}
        assert not before and found[q] == place + 1


def test_what_is_as_good_counts_half():
    held, asked = torch.arange(4), torch.tensor([0])
    level = reranked(torch.zeros(1, 4), asked, held, lambda q, g: torch.zeros(len(q)), 4)
    assert level.item() == 1 + 3 / 2


def test_of_several_vectors_the_nearest_counts():
    torch.manual_seed(0)
    u, v = F.normalize(torch.randn(5, 3, 4), dim=-1), F.normalize(torch.randn(6, 4), dim=-1)
    shown, told = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 4, 4])
    table = closest(u, v)
    wanted = [1 + int((row[told != n] > row[told == n].max()).sum()) for n, row in enumerate(table)]
    assert ranks(u, v, shown, told, tile=2).tolist() == wanted
    wanted = [1 + int((row[shown != n] > row[shown == n].max()).sum()) for n, row in zip(told, table.T, strict=True)]
    assert ranks(v, u, told, shown, tile=2).tolist() == wanted


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "toy", lambda root: Toy())
    words = tokenizer()
    ids = {"cls": words.size, "eos": words.size + 1, "dec": words.size + 2}
    model = randomize(TextQFormer(CONFIG.with_(vocab=words.size + 3, context=64, **ids)))
    hub.save(model, tmp_path / "q", words)
    return tmp_path / "q", model.eval(), words


def test_an_embedder_reads_as_the_model_does(trained):
    _, model, words = trained
    embedder = QueryEmbedder(model, Preprocessing.own(model.config.tower), words, batch=3)
    pictures = sets.album("toy", None, 16).pictures
    pixels = torch.stack([embedder.preprocessing(p() if callable(p) else p) for p in pictures])
    features = embedder.seen(pictures)
    torch.testing.assert_close(features, model.features(pixels))
    texts = ["a", "a longer text than that", "b"]
    read = embedder.read(texts)
    assert [row[row >= 0].tolist() for row in read.ids] == [
        [model.config.cls, *words.encode(text), model.config.eos] for text in texts
    ]
    table = closest(embedder.images(pictures), embedder.texts(texts))
    torch.testing.assert_close(table, model(pixels, read.ids))
    pairs = embedder.match(features[[0, 1, 1, 2]], read.ids[[2, 0, 1, 1]])
    wanted = [model.match(features[i : i + 1], read.ids[j : j + 1])[0, 1] for i, j in ((0, 2), (1, 0), (1, 1), (2, 1))]
    torch.testing.assert_close(pairs, torch.stack(wanted))


def test_the_command_line_finds_and_looks_again(trained, tmp_path, capsys):
    folder, *_ = trained
    out = tmp_path / "scores.json"
    app([str(folder), "retrieval", "--data", "toy", "--rerank", "4", "--out", str(out)], result_action="return_value")
    told = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["rerank"] == 4
    for name in ("text→image, recall@1", "image→text, recall@1", "text→image, matched, recall@1"):
        assert name in told
    with pytest.raises(ConfigError, match="rerank"):
        own(tmp_path / "plain")
        app([str(tmp_path / "plain"), "retrieval", "--data", "toy", "--rerank", "4"], result_action="return_value")
    with pytest.raises(ConfigError, match="1 or more"):
        app([str(folder), "retrieval", "--data", "toy", "--rerank", "0"], result_action="return_value")
