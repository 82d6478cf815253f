"""Attention masks of query connectors, checked by gradients."""

import pytest
import torch
from torch import Tensor

from helpers import randomize, relative
from vitrail.connectors import FusedQueryConfig, FusedQueryConnector, QFormer, QFormerConfig, Resampler, ResamplerConfig
from vitrail.errors import ConfigError
from vitrail.nn import cost

Q, T, N = 3, 4, 6


def qformer(**more) -> QFormer:
    config = {
        "in_features": 5,
        "out_features": 4,
        "num_queries": Q,
        "layers": 3,
        "width": 8,
        "heads": 2,
        "intermediate_size": 10,
        "use_text": True,
    }
    return randomize(QFormer(QFormerConfig(**config | more))).eval()


def rows_with_gradient(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return which rows (N,) of each input have a gradient from `out`."""
    found = torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs, retain_graph=True, allow_unused=True)
    return [
        torch.zeros(x.shape[1], dtype=torch.bool) if g is None else g[0].ne(0).any(-1)
        for g, x in zip(found, inputs, strict=True)
    ]


@pytest.mark.parametrize("task", ["itc", "itm", "itg"])
def test_task_masks(task):
    model = qformer()
    features = torch.randn(1, N, 5, requires_grad=True)
    text = torch.randn(1, T, 8, requires_grad=True)
    queries, words = model.encode_jointly(features, text, task)
    picture, output = rows_with_gradient(queries, features, text)
    assert picture.all() and output.tolist() == [task == "itm"] * T
    for i in range(T):
        picture, output = rows_with_gradient(words[:, i], features, text)
        assert picture.tolist() == [task != "itc"] * N
        assert output.tolist() == [task != "itg" or j <= i for j in range(T)]


@pytest.mark.parametrize("task", ["itc", "itm", "itg"])
def test_text_padding_is_masked(task):
    model = qformer()
    features = torch.randn(1, N, 5)
    text = torch.randn(1, T, 8, requires_grad=True)
    real = torch.tensor([[True, True, True, False]])
    queries, words = model.encode_jointly(features, text, task, text_mask=real)
    (output,) = rows_with_gradient(torch.cat([queries, words[:, :3]], dim=1), text)
    assert output.tolist() == [True, True, True, False]


def test_contrastive_pass_equals_two_passes():
    model, features, text = qformer(), torch.randn(2, N, 5), torch.randn(2, T, 8)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    queries, words = model.encode_jointly(features, text, "itc", text_mask=real)
    assert relative(queries, model.encode_queries(features)) <= 1e-5
    assert relative(words[real], model.encode_text(text, real)[real]) <= 1e-5


def test_generation_does_not_change_the_queries():
    """Query states do not depend on the generated text, so their keys and values can be cached."""
    model, features = qformer(), torch.randn(2, N, 5)
    queries, _ = model.encode_jointly(features, torch.randn(2, T, 8), "itg")
    assert relative(queries, model.encode_queries(features)) <= 1e-5


def test_second_stage_has_no_text_mlps():
    model = qformer(use_text=False)
    with pytest.raises(ConfigError, match="no MLPs for text"):
        model.encode_text(torch.randn(1, T, 8))
    with pytest.raises(ConfigError, match="embeddings"):
        qformer().encode_text(torch.randn(1, T, 7))
    with_words = cost.count_bytes(qformer(), qformer().workload(N))
    without = cost.count_bytes(model, model.workload(N))
    assert with_words.read == without.read == without.weights < with_words.weights


def test_latents_attend_to_image_and_latents():
    model = randomize(Resampler(ResamplerConfig(in_features=6, out_features=6, num_latents=3, layers=1, heads=2)))
    features = torch.randn(1, N, 6, requires_grad=True)
    out = model(features)
    (picture,) = rows_with_gradient(out[:, 0], features)
    assert picture.all()
    (grad,) = torch.autograd.grad((out[:, 0] * torch.randn(6)).sum(), model.latents)
    assert grad.ne(0).any(-1).all()


# ---- fused queries -----------------------------------------------------------------------------------------------


def fused(**more) -> FusedQueryConnector:
    config = {
        "in_features": 5,
        "out_features": 4,
        "vocab_size": 11,
        "first_queries": 4,
        "later_queries": 2,
        "layers": 2,
        "width": 8,
        "heads": 2,
        "intermediate_size": 12,
    }
    return randomize(FusedQueryConnector(FusedQueryConfig(**config | more))).eval()


QUESTIONS = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])]


def visible_question_tokens(model: FusedQueryConnector, out: Tensor) -> set[int]:
    (grad,) = torch.autograd.grad((out * torch.randn(out.shape)).sum(), model.embed.weight, retain_graph=True)
    return set(grad.ne(0).any(-1).nonzero().flatten().tolist())


def test_queries_attend_to_image_and_earlier_questions():
    model = fused()
    features = torch.randn(1, N, 5, requires_grad=True)
    groups = model.encode_queries(features, None, QUESTIONS)
    assert [group.shape for group in groups.queries] == [(1, 4, 8), (1, 2, 8)] and groups.end_states.shape == (1, 2, 8)
    for group in (*groups.queries, groups.end_states):
        assert rows_with_gradient(group, features)[0].all()
    assert (
        visible_question_tokens(model, groups.queries[0])
        == visible_question_tokens(model, groups.end_states[:, 0])
        == {1, 2, 3}
    )
    assert (
        visible_question_tokens(model, groups.queries[1])
        == visible_question_tokens(model, groups.end_states[:, 1])
        == {1, 2, 3, 4, 5}
    )


def test_question_modes():
    features, other = torch.randn(1, N, 5), [torch.tensor([[9, 9, 9]]), torch.tensor([[9, 9]])]

    def differs(model: FusedQueryConnector) -> bool:
        with torch.no_grad():
            return not torch.equal(model(features, None, QUESTIONS), model(features, None, other))

    always, never, training = (fused(question_mode=kind) for kind in ("always", "never", "training"))
    assert differs(always) and not differs(never) and not differs(training)
    assert differs(always.train()) and not differs(never.train()) and differs(training.train())
    # Weights are the same whatever is read, so that one can be tuned from the other.
    assert {n: p.shape for n, p in always.named_parameters()} == {n: p.shape for n, p in never.named_parameters()}
    with torch.no_grad():
        assert torch.equal(never(features, None, QUESTIONS), never(features, None, 2))
        assert torch.equal(never(features, None, 2), training.eval()(features, None, QUESTIONS))
    with pytest.raises(ConfigError, match="ids"):
        always(features, None, 2)
    with pytest.raises(ConfigError, match="one row for each image"):
        always(features, None, [torch.zeros(2, 3, dtype=torch.long)])
    with pytest.raises(ConfigError, match="num_questions is 0"):
        always(features, None, [])


def test_later_questions_share_the_first_queries():
    model = fused(first_queries=4, later_queries=2, question_mode="never")
    (grad,) = torch.autograd.grad(
        model.encode_queries(torch.randn(1, N, 5), None, 2).queries[1].square().sum(), model.queries
    )
    assert grad.shape == (4, 8)
    assert model(torch.randn(1, N, 5), None, 3).shape == (1, 4 + 2 + 2, 4)


def test_cost_of_a_conversation():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, features = fused(), torch.randn(2, N, 5)
    questions = [ids.expand(2, -1) for ids in QUESTIONS]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(features, None, questions)
    work = model.workload(N, batch_size=2, question_lengths=(3, 2))
    # torch's counter multiplies what a causal mask hides; ours counts the pairs that see each other.
    length = N + 3 + 4 + 1 + 2 + 2 + 1
    hidden = 2 * length * (length - 1) // 2
    attention = model.config.block_config().attention
    unseen = 4 * attention.heads * attention.resolve_head_dim(8) * hidden * model.config.layers
    assert cost.count_flops(model, work) == counter.get_total_flops() - unseen
