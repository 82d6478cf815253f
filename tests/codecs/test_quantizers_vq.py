"""Codebook learning: running means, k-means, dead-code replacement, gradients and codebook usage."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.codecs.quantizers import BSQ, FSQ, LFQ, VQ, GroupedVQ, ResidualVQ, SimVQ, quantizer
from vitrail.evals.metrics import measure_codebook_usage


def clusters(count=32, each=64, dim=4, spread=0.05):
    centres = torch.randn(count, dim) * 3
    return centres, (centres[:, None] + spread * torch.randn(count, each, dim)).reshape(-1, dim)


def test_running_means_formula():
    q = VQ(codebook_size=5, dim=3, kmeans_iters=0, ema_decay=0.9)
    table, counts, sums = q.codebook.clone(), torch.ones(5), q.codebook.clone()
    for _ in range(4):
        x = torch.randn(50, 3)
        ids = torch.cdist(x, table).argmin(1)
        one_hot = F.one_hot(ids, 5).float()
        assert torch.equal(q(x).ids, ids)
        counts = 0.9 * counts + 0.1 * one_hot.sum(0)
        sums = 0.9 * sums + 0.1 * one_hot.T @ x
        table = sums / counts[:, None]
        torch.testing.assert_close(q.codebook, table)
    q.eval()(torch.randn(50, 3))
    torch.testing.assert_close(q.codebook, table)  # nothing is learnt outside training


def test_unused_codes_keep_their_values():
    q = VQ(codebook_size=2, dim=1, kmeans_iters=0, ema_decay=0.5)
    q.codebook.copy_(torch.tensor([[0.0], [100.0]]))
    q.sums.copy_(q.codebook)
    for _ in range(300):
        q(torch.randn(10, 1))
    assert q.codebook[1].item() == pytest.approx(100, rel=1e-4)


def test_running_means_stay_float32():
    """In bfloat16, a mean with decay 0.999 would never change."""
    q = VQ(codebook_size=1, dim=1, kmeans_iters=0, ema_decay=0.999)
    q.to(torch.bfloat16)
    for _ in range(3000):
        q(torch.full((4, 1), 2.0, dtype=torch.bfloat16))
    assert q.codebook.item() == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("learn", ["ema", "gradient"])
@pytest.mark.parametrize("metric", ["euclid", "cosine"])
def test_kmeans_initialization(learn, metric):
    _, x = clusters()
    started, fresh = (
        VQ(codebook_size=32, dim=4, codebook_update=learn, metric=metric, kmeans_iters=rounds) for rounds in (10, 0)
    )
    a, b = started(x), fresh(x)
    assert started.started and a.losses["commit"] < b.losses["commit"] / 3
    ids = a.ids
    points = F.normalize(x, dim=1) if metric == "cosine" else x
    table = started.get_codebook() if learn == "gradient" else None
    for code in ids.unique()[:5] if table is not None else ():
        mean = points[ids == code].mean(0)
        mean = F.normalize(mean, dim=0) if metric == "cosine" else mean
        torch.testing.assert_close(table[code], mean, rtol=0.2, atol=0.2)  # ten rounds come near


def test_kmeans_waits_for_vectors():
    q = VQ(codebook_size=4, dim=2)
    q(torch.randn(0, 2))
    assert not q.started
    q(torch.randn(9, 2))
    assert q.started


@pytest.mark.parametrize("learn", ["ema", "gradient"])
def test_dead_codes_are_replaced(learn):
    centres, x = clusters()
    q = VQ(codebook_size=64, dim=4, codebook_update=learn, kmeans_iters=0, dead_code_threshold=0.1, ema_decay=0.9)
    q.codebook[32:] += 1000  # half the codes are out of reach
    if learn == "ema":
        q.sums.copy_(q.codebook)
    before = measure_codebook_usage(q(x).ids, 64).used
    optimizer = torch.optim.Adam(q.parameters(), lr=0.01) if learn == "gradient" else None
    for _ in range(80):
        loss = sum(q(x.requires_grad_()).losses.values())
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    after = measure_codebook_usage(q.eval()(x).ids, 64)
    assert before <= 32 < 55 <= after.used and after.perplexity > 40
    assert q.get_codebook().abs().max() < 100
    assert torch.cdist(centres, q.get_codebook()).min(1).values.max() < 0.3  # every cluster has a code


def test_dead_codes_stay_without_replacement():
    _, x = clusters()
    q = VQ(codebook_size=64, dim=4, kmeans_iters=0, ema_decay=0.9)
    q.codebook[32:] += 1000
    q.sums.copy_(q.codebook)
    for _ in range(40):
        q(x)
    assert measure_codebook_usage(q(x).ids, 64).used <= 32


def test_gradient_codebook_update():
    _, x = clusters()
    for q in (VQ(codebook_size=32, dim=4, codebook_update="gradient", kmeans_iters=0), SimVQ(codebook_size=64, dim=4)):
        optimizer = torch.optim.Adam(q.parameters(), lr=0.03)
        first = None
        for _ in range(100):
            loss = q(x).losses["codebook"]
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss < first / 3


def test_cosine_codes_have_length_one():
    q = VQ(codebook_size=16, dim=4, metric="cosine")
    for _ in range(3):
        found = q(torch.randn(100, 4) * 7)
    torch.testing.assert_close(found.codes.norm(dim=-1), torch.ones(100))
    torch.testing.assert_close(q.codebook.norm(dim=-1), torch.ones(16))
    x = torch.randn(30, 4)
    assert torch.equal(q.eval()(x).ids, F.cosine_similarity(x[:, None], q.codebook, dim=-1).argmax(1))


def test_more_residual_layers_reduce_the_error():
    x = torch.randn(2000, 8)
    errors = []
    for layers in (1, 2, 4):
        torch.manual_seed(0)
        q = ResidualVQ(codebook_size=64, dim=8, layers=layers)
        for _ in range(10):
            q(x)
        found = q.eval()(x)
        errors.append(F.mse_loss(found.codes, x).item())
        assert found.ids.shape == (2000, layers) and q.bits == 6 * layers
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]


def test_grouped_vq_equals_separate_quantizers():
    x = torch.randn(500, 8)
    q = GroupedVQ(codebook_size=16, dim=8, groups=4)
    q(x)
    found = q.eval()(x)
    for g, part in enumerate(q.parts):
        own = part(x[:, 2 * g : 2 * g + 2])
        assert torch.equal(own.ids, found.ids[:, g]) and torch.equal(own.codes, found.codes[:, 2 * g : 2 * g + 2])
    torch.testing.assert_close(found.losses["commit"], F.mse_loss(x, found.codes))


def test_non_finite_input_shows_in_the_loss(monkeypatch):
    """In GPU training, non-finite inputs must not pass as codes."""
    monkeypatch.setattr(quantizer, "can_read_values", lambda x: False)
    x = torch.randn(5, 2)
    x[2, 1] = float("nan")
    found = VQ(codebook_size=8, dim=2, kmeans_iters=0)(x)
    assert found.losses["commit"].isnan() and found.codes[2, 1].isnan() and found.codes[0].isfinite().all()
    for q in (FSQ(levels=(5, 5)), LFQ(bits=2), BSQ(bits=2)):
        found = q(x)
        assert found.codes[2, 1].isnan() and found.codes[0].isfinite().all()
        assert 0 <= found.ids.min() and found.ids[:2].max() < q.vocab_sizes[0]


def test_simvq_codebook_usage():
    """With rotated gradients vectors move to the center of the codebook, and fewer codes are used."""
    torch.manual_seed(0)
    D, K = 6, 512
    q = SimVQ(codebook_size=K, dim=D)
    encoder, decoder = (nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D)) for _ in range(2))
    steps = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *q.parameters()], 1e-2)
    for _ in range(300):
        x = torch.randn(256, D)
        found = q(encoder(x))
        lost = (decoder(found.codes) - x).square().mean()
        (2 * lost + 0.25 * found.losses["commit"] + found.losses["codebook"]).backward()
        steps.step()
        steps.zero_grad()
    vectors = encoder(torch.randn(4096, D))
    assert measure_codebook_usage(q(vectors).ids, K).perplexity > 0.8 * K
    assert vectors.square().mean().sqrt() > 1
