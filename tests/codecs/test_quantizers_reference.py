"""Compare with vector-quantize-pytorch for one codebook and one input: ids, codes, losses, and codebooks after steps.

Intended differences:

- VQ: usage counts are not smoothed here, so unused codes keep their value (in the reference they drift to 0); the
  difference is 1e-5 a step. The commitment loss is not weighted here. The reference has rotation on by default.
- Residual VQ: the gradient passes once; in the reference it passes once for each layer.
- LFQ: logarithms are exact here; in the reference they are clamped at 1e-5. The batch entropy is over bits unless
  `entropy_group_size` is set.
- FSQ: two levels are allowed here.
"""

import pytest
import torch

from vitrail.codecs.quantizers import FSQ, LFQ, VQ, ResidualVQ, SimVQ

theirs = pytest.importorskip("vector_quantize_pytorch")


def same_codebook(ours, peer):
    peer._codebook.embed.copy_(ours.codebook)
    peer._codebook.embed_avg.copy_(ours.codebook)


@pytest.mark.parametrize("metric", ["euclid", "cosine"])
@pytest.mark.parametrize("through", ["straight", "rotation"])
def test_vq(metric, through):
    ours = VQ(codebook_size=64, dim=8, metric=metric, kmeans_iters=0, ema_decay=0.8, gradient_estimator=through)
    peer = theirs.VectorQuantize(
        8, 64, decay=0.8, use_cosine_sim=metric == "cosine", rotation_trick=through == "rotation"
    )
    same_codebook(ours, peer)
    for _ in range(5):
        x = torch.randn(4, 50, 8)
        x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, (codes, ids, loss) = ours(x), peer(y)
        assert torch.equal(found.ids, ids)
        torch.testing.assert_close(found.codes, codes, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.losses["commit"], loss, rtol=1e-4, atol=1e-6)
        g = torch.randn_like(x)
        ((found.codes * g).sum() + found.losses["commit"]).backward()
        ((codes * g).sum() + loss).backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours.codebook, peer.codebook, rtol=1e-3, atol=1e-4)


def test_residual_vq():
    ours = ResidualVQ(codebook_size=32, dim=6, layers=3, kmeans_iters=0, ema_decay=0.8)
    peer = theirs.ResidualVQ(dim=6, codebook_size=32, num_quantizers=3, decay=0.8, rotation_trick=False)
    for a, b in zip(ours.layers, peer.layers, strict=True):
        same_codebook(a, b)
    for _ in range(3):
        x = torch.randn(2, 40, 6)
        found, (codes, ids, losses) = ours(x), peer(x)
        assert torch.equal(found.ids, ids)
        torch.testing.assert_close(found.codes, codes, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.losses["commit"], losses.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("levels", [(8, 8, 8, 5, 5, 5), (7, 5, 4, 3)])
def test_fsq(levels):
    ours, peer = FSQ(levels=levels), theirs.FSQ(list(levels))
    x = torch.randn(3, 400, len(levels)) * 2
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, (codes, ids) = ours(x), peer(y)
    assert torch.equal(found.ids, ids.long())
    torch.testing.assert_close(found.codes, codes, rtol=1e-6, atol=1e-6)
    g = torch.randn_like(x)
    (found.codes * g).sum().backward()
    (codes * g).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    every = torch.arange(ours.vocab_sizes[0])
    assert torch.equal(ours.lookup(every), peer.indices_to_codes(every))


def test_lfq():
    ours = LFQ(bits=8, inv_temperature=3.0, entropy_group_size=8)
    peer = theirs.LFQ(dim=8, codebook_size=256, entropy_loss_weight=1.0, commitment_loss_weight=1.0)
    x = torch.randn(3, 40, 8)
    found = ours(x)
    (codes, ids, _), losses = peer(x, inv_temperature=3.0, return_loss_breakdown=True)
    assert torch.equal(found.ids, ids.long()) and torch.equal(found.codes, codes.round())
    torch.testing.assert_close(found.losses["commit"], losses.commitment)
    entropy = losses.per_sample_entropy - losses.batch_entropy
    torch.testing.assert_close(found.losses["entropy"], entropy, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("through", ["straight", "rotation"])
def test_simvq(through):
    ours, peer = (
        SimVQ(codebook_size=64, dim=8, gradient_estimator=through),
        theirs.SimVQ(8, 64, rotation_trick=through == "rotation"),
    )
    peer.frozen_codebook.copy_(ours.codebook)
    with torch.no_grad():
        peer.code_transform.weight.copy_(ours.matrix)
    x = torch.randn(2, 50, 8)
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, (codes, ids, loss) = ours(x), peer(y)
    assert torch.equal(found.ids, ids)
    torch.testing.assert_close(found.codes, codes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.losses["codebook"] + found.losses["commit"] / 4, loss)
    found.codes.sum().backward()
    codes.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)
