"""Retrieval with several vectors per image and with reranking, compared with full sorting."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from evals.test_collection_retrieval import Toy
from evals.test_suites_models import own, tokenizer
from helpers import randomize
from models.test_text_qformer import CONFIG
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.data.image_readers import READERS
from vitrail.errors import ConfigError
from vitrail.evals.qformer_embedder import QFormerEmbedder
from vitrail.evals.suites import image_collections
from vitrail.evals.suites.retrieval_metrics import first_match_ranks
from vitrail.evals.suites.retrieval_rerank import rerank_ranks
from vitrail.models.text_qformer import TextQFormer
from vitrail.objectives.query_losses import max_query_similarity
from vitrail.processing.image_preprocessor import ImagePreprocessor


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 10), st.integers(0, 2**20))
def test_only_top_candidates_are_reordered(Q, G, most, seed):
    chance = torch.Generator().manual_seed(seed)
    held = torch.randint(0, 3, (G,), generator=chance)
    asked = held[torch.randint(0, G, (Q,), generator=chance)]
    first, again = (torch.rand(Q, G, generator=chance) for _ in range(2))
    found = rerank_ranks(first, asked, held, lambda q, g: again[q, g], most)
    for q in range(Q):
        order = first[q].argsort(descending=True).tolist()
        top = sorted(order[:most], key=lambda g: -float(first[q, g] + again[q, g]))
        place = next(i for i, g in enumerate([*top, *order[most:]]) if held[g] == asked[q])
        before = {i for i, g in enumerate([*top, *order[most:]]) if i < place and held[g] == asked[q]}
        assert not before and found[q] == place + 1


def test_ties_count_half():
    held, asked = torch.arange(4), torch.tensor([0])
    level = rerank_ranks(torch.zeros(1, 4), asked, held, lambda q, g: torch.zeros(len(q)), 4)
    assert level.item() == 1 + 3 / 2


def test_nearest_of_several_vectors_counts():
    torch.manual_seed(0)
    u, v = F.normalize(torch.randn(5, 3, 4), dim=-1), F.normalize(torch.randn(6, 4), dim=-1)
    shown, result = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 4, 4])
    table = max_query_similarity(u, v)
    wanted = [1 + int((row[result != n] > row[result == n].max()).sum()) for n, row in enumerate(table)]
    assert first_match_ranks(u, v, shown, result, tile=2).tolist() == wanted
    wanted = [1 + int((row[shown != n] > row[shown == n].max()).sum()) for n, row in zip(result, table.T, strict=True)]
    assert first_match_ranks(v, u, result, shown, tile=2).tolist() == wanted


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "toy", lambda root: Toy())
    words = tokenizer()
    ids = {
        "cls_token_id": words.vocab_size,
        "eos_token_id": words.vocab_size + 1,
        "decoder_start_token_id": words.vocab_size + 2,
    }
    model = randomize(TextQFormer(CONFIG.replace(vocab_size=words.vocab_size + 3, context_length=64, **ids)))
    hub.save(model, tmp_path / "q", words)
    return tmp_path / "q", model.eval(), words


def test_embedder_matches_the_model(trained):
    _, model, words = trained
    embedder = QFormerEmbedder(model, ImagePreprocessor.default(model.config.tower), words, batch_size=3)
    pictures = image_collections.open_image_collection("toy", None, 16).images
    pixels = torch.stack([embedder.preprocessing(p() if callable(p) else p) for p in pictures])
    features = embedder.encode_images(pictures)
    torch.testing.assert_close(features, model.forward_features(pixels))
    texts = ["a", "a longer text than that", "b"]
    read = embedder.encode_texts(texts)
    assert [row[row >= 0].tolist() for row in read.ids] == [
        [model.config.cls_token_id, *words.encode(text), model.config.eos_token_id] for text in texts
    ]
    table = max_query_similarity(embedder.embed_images(pictures), embedder.embed_texts(texts))
    torch.testing.assert_close(table, model(pixels, read.ids))
    pairs = embedder.compute_match_logits(features[[0, 1, 1, 2]], read.ids[[2, 0, 1, 1]])
    wanted = [
        model.compute_match_logits(features[i : i + 1], read.ids[j : j + 1])[0, 1]
        for i, j in ((0, 2), (1, 0), (1, 1), (2, 1))
    ]
    torch.testing.assert_close(pairs, torch.stack(wanted))


def test_cli_reranks(trained, tmp_path, capsys):
    folder, *_ = trained
    out = tmp_path / "scores.json"
    app([str(folder), "retrieval", "--data", "toy", "--rerank", "4", "--out", str(out)], result_action="return_value")
    result = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["rerank"] == 4
    for name in ("text→image, recall@1", "image→text, recall@1", "text→image, matched, recall@1"):
        assert name in result
    with pytest.raises(ConfigError, match="rerank"):
        own(tmp_path / "plain")
        app([str(tmp_path / "plain"), "retrieval", "--data", "toy", "--rerank", "4"], result_action="return_value")
    with pytest.raises(ConfigError, match="set at least 1"):
        app([str(folder), "retrieval", "--data", "toy", "--rerank", "0"], result_action="return_value")
