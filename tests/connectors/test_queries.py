"""Who sees whom: what must not be seen has no gradient at all, and what must be seen has one."""

import pytest
import torch
from torch import Tensor

from helpers import randomize, relative
from vitrail.connectors import Fused, FusedConfig, QFormer, QFormerConfig, Resampler, ResamplerConfig
from vitrail.errors import ConfigError
from vitrail.nn import cost

Q, T, N = 3, 4, 6


def qformer(**more) -> QFormer:
    config = {"reads": 5, "gives": 4, "queries": Q, "layers": 3, "width": 8, "heads": 2, "hidden": 10, "text": True}
    return randomize(QFormer(QFormerConfig(**config | more))).eval()


def reached(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Which rows (N,) of each input some of `out` depends on: those with any gradient."""
    found = torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs, retain_graph=True, allow_unused=True)
    return [
        torch.zeros(x.shape[1], dtype=torch.bool) if g is None else g[0].ne(0).any(-1)
        for g, x in zip(found, inputs, strict=True)
    ]


@pytest.mark.parametrize("task", ["itc", "itm", "itg"])
def test_three_masks(task):
    model = qformer()
    features = torch.randn(1, N, 5, requires_grad=True)
    text = torch.randn(1, T, 8, requires_grad=True)
    queries, words = model.both(features, text, task)
    picture, said = reached(queries, features, text)
    assert picture.all() and said.tolist() == [task == "itm"] * T
    for i in range(T):
        picture, said = reached(words[:, i], features, text)
        assert picture.tolist() == [task != "itc"] * N
        assert said.tolist() == [task != "itg" or j <= i for j in range(T)]


@pytest.mark.parametrize("task", ["itc", "itm", "itg"])
def test_padding_of_a_text_is_not_seen(task):
    model = qformer()
    features = torch.randn(1, N, 5)
    text = torch.randn(1, T, 8, requires_grad=True)
    real = torch.tensor([[True, True, True, False]])
    queries, words = model.both(features, text, task, real=real)
    (said,) = reached(torch.cat([queries, words[:, :3]], dim=1), text)
    assert said.tolist() == [True, True, True, False]


def test_contrast_is_two_passes():
    model, features, text = qformer(), torch.randn(2, N, 5), torch.randn(2, T, 8)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    queries, words = model.both(features, text, "itc", real=real)
    assert relative(queries, model.look(features)) <= 1e-5
    assert relative(words[real], model.read(text, real)[real]) <= 1e-5


def test_writing_leaves_the_queries_as_they_are():
    """So that their keys and values can be made once, whatever is written."""
    model, features = qformer(), torch.randn(2, N, 5)
    queries, _ = model.both(features, torch.randn(2, T, 8), "itg")
    assert relative(queries, model.look(features)) <= 1e-5


def test_the_second_stage_has_no_words():
    model = qformer(text=False)
    with pytest.raises(ConfigError, match="reads no text"):
        model.read(torch.randn(1, T, 8))
    with pytest.raises(ConfigError, match="embeddings"):
        qformer().read(torch.randn(1, T, 7))
    with_words = cost.bytes(qformer(), qformer().work(N))
    without = cost.bytes(model, model.work(N))
    assert with_words.read == without.read == without.weights < with_words.weights


def test_latents_see_the_picture_and_each_other():
    model = randomize(Resampler(ResamplerConfig(reads=6, gives=6, latents=3, layers=1, heads=2)))
    features = torch.randn(1, N, 6, requires_grad=True)
    out = model(features)
    (picture,) = reached(out[:, 0], features)
    assert picture.all()
    (grad,) = torch.autograd.grad((out[:, 0] * torch.randn(6)).sum(), model.latents)
    assert grad.ne(0).any(-1).all()


# ---- fused queries -----------------------------------------------------------------------------------------------


def fused(**more) -> Fused:
    config = {
        "reads": 5, "gives": 4, "vocab": 11, "first": 4, "later": 2, "layers": 2, "width": 8, "heads": 2, "hidden": 12,
    }  # fmt: skip
    return randomize(Fused(FusedConfig(**config | more))).eval()


QUESTIONS = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])]


def words_seen(model: Fused, out: Tensor) -> set[int]:
    (grad,) = torch.autograd.grad((out * torch.randn(out.shape)).sum(), model.embed.weight, retain_graph=True)
    return set(grad.ne(0).any(-1).nonzero().flatten().tolist())


def test_queries_see_picture_and_questions_so_far():
    model = fused()
    features = torch.randn(1, N, 5, requires_grad=True)
    groups = model.fuse(features, None, QUESTIONS)
    assert [group.shape for group in groups.queries] == [(1, 4, 8), (1, 2, 8)] and groups.ends.shape == (1, 2, 8)
    for group in (*groups.queries, groups.ends):
        assert reached(group, features)[0].all()
    assert words_seen(model, groups.queries[0]) == words_seen(model, groups.ends[:, 0]) == {1, 2, 3}
    assert words_seen(model, groups.queries[1]) == words_seen(model, groups.ends[:, 1]) == {1, 2, 3, 4, 5}


def test_three_ways_to_read_the_question():
    features, other = torch.randn(1, N, 5), [torch.tensor([[9, 9, 9]]), torch.tensor([[9, 9]])]

    def differs(model: Fused) -> bool:
        with torch.no_grad():
            return not torch.equal(model(features, None, QUESTIONS), model(features, None, other))

    always, never, training = (fused(question=kind) for kind in ("always", "never", "training"))
    assert differs(always) and not differs(never) and not differs(training)
    assert differs(always.train()) and not differs(never.train()) and differs(training.train())
    # Weights are the same whatever is read, so that one can be tuned from the other.
    assert {n: p.shape for n, p in always.named_parameters()} == {n: p.shape for n, p in never.named_parameters()}
    with torch.no_grad():
        assert torch.equal(never(features, None, QUESTIONS), never(features, None, 2))
        assert torch.equal(never(features, None, 2), training.eval()(features, None, QUESTIONS))
    with pytest.raises(ConfigError, match="ids"):
        always(features, None, 2)
    with pytest.raises(ConfigError, match="one row a picture"):
        always(features, None, [torch.zeros(2, 3, dtype=torch.long)])
    with pytest.raises(ConfigError, match="0 questions"):
        always(features, None, [])


def test_later_groups_use_the_first_queries():
    model = fused(first=4, later=2, question="never")
    (grad,) = torch.autograd.grad(model.fuse(torch.randn(1, N, 5), None, 2).queries[1].square().sum(), model.queries)
    assert grad.shape == (4, 8)
    assert model(torch.randn(1, N, 5), None, 3).shape == (1, 4 + 2 + 2, 4)


def test_cost_of_a_talk():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, features = fused(), torch.randn(2, N, 5)
    questions = [ids.expand(2, -1) for ids in QUESTIONS]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(features, None, questions)
    work = model.work(N, batch=2, questions=(3, 2))
    # torch's counter multiplies what a causal mask hides; ours counts the pairs that see each other.
    length = N + 3 + 4 + 1 + 2 + 2 + 1
    hidden = 2 * length * (length - 1) // 2
    attention = model.config.block().attention
    unseen = 4 * attention.heads * attention.channels(8) * hidden * model.config.layers
    assert cost.flops(model, work) == counter.get_total_flops() - unseen
