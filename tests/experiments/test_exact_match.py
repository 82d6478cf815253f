"""Exact-match accuracy without generation."""

import pytest
import torch
from torch import Tensor

from data.scenes.conftest import drawn
from experiments.token_scaling import exact_match
from experiments.token_scaling.exact_match import (
    ExactMatchBenchmark,
    compute_hidden_states,
    make_soft_token_fn,
    prepare_pixels,
    withhold_question,
)
from experiments.token_scaling.patch_reduction import (
    REDUCTIONS,
    compute_received_attention,
    make_reduced_soft_token_fn,
    pool_to_cells,
)
from experiments.token_scaling.query_truncation import truncate_queries
from helpers import randomize
from smoke_recipes import load_smoke_config
from vitrail.connectors import PoolConnectorConfig, QFormerConfig, make_connector
from vitrail.data.qa import build_qa_dataset
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.generate import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.processing.grid import Grid
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import build_stream
from vitrail.stream import text_part as text
from vitrail.tasks.qa_tokens import IGNORE_INDEX

KINDS = ("existence_random", "colour")


@pytest.fixture(scope="module")
def base() -> VLM:
    return randomize(VLM(load_smoke_config("scaling-base")), 1, 0.3).eval()


@pytest.fixture(scope="module")
def fused() -> VLM:
    config = load_smoke_config("scaling-queries")
    assert config.queries is not None
    return randomize(VLM(config.replace(queries=config.queries.replace(first_queries=9))), 2, 0.3).eval()


@pytest.fixture(scope="module")
def source() -> SceneSource:
    return SceneSource(SceneSourceConfig(atlas="-", image_size=16, seed=3), Atlas.build(drawn()))


@pytest.fixture(scope="module")
def words(source) -> Tokenizer:
    texts = build_qa_dataset(source, 1).pieces.texts[1:]
    return Tokenizer.train(texts, 420, special_tokens=("<|endoftext|>", "<image>"), bos="<s>")


@pytest.fixture(scope="module")
def exam(source, words) -> ExactMatchBenchmark:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_match, "NUM_BASELINE_SCENES", 256)
        return ExactMatchBenchmark(source, KINDS, words, count=12, max_length=40)


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_every_kind_has_complete_questions(exam, words):
    for sheet in exam.question_batches.values():
        assert len(sheet.token_ids) == 12
        for ids, targets, asked in zip(sheet.token_ids, sheet.labels, sheet.question_ids, strict=True):
            question, answer = asked[asked >= 0], targets[targets != IGNORE_INDEX]
            conversation = [*question.tolist(), words.eos_token_id, *answer.tolist()]
            assert (
                ids.tolist()[: len(conversation)] == conversation[:40]
                and answer[-1] == words.eos_token_id
                and len(answer) > 1
            )
    assert exam.prefix_ids == [words.bos_token_id] and 0 < exam.baselines["colour"]["majority"] < 1


def test_exact_match_equals_generation(exam, base, words):
    """References are the model's own answers, unchanged or with one wrong token."""
    look, right = make_soft_token_fn(base), []
    for sheet in exam.question_batches.values():
        x = prepare_pixels(base, sheet.pixels)
        view = base.config.policy.layout(16, 16)
        for row in range(0, len(sheet.token_ids), 3):
            question = sheet.question_ids[row][sheet.question_ids[row] >= 0]
            result = [text(exam.prefix_ids), base.config.make_part(view), text([*question.tolist(), exam.eos_token_id])]
            seen = VisionInputs(x[row : row + 1], (view,))
            how = {"max_new_tokens": 3, "sampling": GREEDY, "tokenizer": words}
            [output] = generate_from_streams(base, [build_stream(result, base.config.rules)], seen, **how)
            ids = torch.tensor([[*question.tolist(), exam.eos_token_id, *output.ids, exam.eos_token_id]])
            targets = torch.full_like(ids, IGNORE_INDEX)
            targets[0, len(question) : len(question) + len(output.ids)] = torch.tensor(output.ids)
            for slip in (0, 1):
                wanted = targets.clone()
                wanted[0, len(question) + len(output.ids) - 1] += slip
                one = exact_match.QuestionBatch(sheet.pixels[row : row + 1], ids, wanted, ids)
                right.append((bool(exam._is_correct(base, look, one)), not slip))
    assert all(found == want for found, want in right)


def test_hidden_states_match_training(exam, fused):
    sheet = exam.question_batches["colour"]
    template, x = fused.make_row_template(exam.prefix_ids, 40), prepare_pixels(fused, sheet.pixels)
    want = fused.forward_rows(template, x, sheet.token_ids, sheet.question_ids[:, None])
    found = compute_hidden_states(
        fused, exam.prefix_ids, make_soft_token_fn(fused)(x, sheet.question_ids), sheet.token_ids
    )
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_shifted_questions_reach_the_queries_only(exam, fused):
    sheet = exam.question_batches["colour"]
    x, look = prepare_pixels(fused, sheet.pixels), make_soft_token_fn(fused)
    result, other = look(x, sheet.question_ids), look(x, sheet.question_ids.roll(1, 0))
    assert not torch.allclose(result, other) and not torch.allclose(
        result, withhold_question(look)(x, sheet.question_ids)
    )
    never = VLM(fused.config.replace(queries=fused.config.queries.replace(question_mode="never")))
    never.load_state_dict(fused.state_dict())
    alone = make_soft_token_fn(never)
    torch.testing.assert_close(alone(x, sheet.question_ids), withhold_question(look)(x, sheet.question_ids))
    scores = [exam.evaluate(fused, look, batch_size=5, question_shift=turn) for turn in (0, 1)]
    assert [[s.name for s in one] for one in scores] == [list(KINDS)] * 2 and scores[0][0].count == 12


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_truncated_queries_are_the_first_ones(fused, pixels, tokens):
    asked = torch.tensor([[5, 6, 7, -1], [8, -1, -1, -1], [9, 10, -1, -1]])
    fewer = truncate_queries(fused, tokens)
    assert fewer.config.queries.queries_per_question(2) == [tokens, min(8, tokens)]
    torch.testing.assert_close(
        make_soft_token_fn(fewer)(pixels, asked), make_soft_token_fn(fused)(pixels, asked)[:, :tokens]
    )


def test_truncated_qformer_keeps_the_first_queries(base):
    connector = QFormerConfig(
        in_features=16, out_features=32, num_queries=6, layers=1, width=8, heads=2, intermediate_size=8
    )
    model = VLM(base.config.replace(connector=connector))
    fewer = truncate_queries(model, 2)
    assert torch.equal(fewer.connector.queries, model.connector.queries[:2])
    assert fewer.config.count_tokens(fewer.config.policy.layout(16, 16)) == 2
    for wrong, output in ((model, "queries: the model has"), (base, "no queries")):
        with pytest.raises(ConfigError, match=output):
            truncate_queries(wrong, 7)


# ---- without training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCTIONS)
def test_keeping_all_patches_has_no_effect(base, pixels, name):
    asked = torch.zeros(3, 0, dtype=torch.long)
    torch.testing.assert_close(
        make_reduced_soft_token_fn(base, name, 16)(pixels, asked), make_soft_token_fn(base)(pixels, asked)
    )
    for keep in (1, 2, 8, 15) if name != "pooling" else (1, 2, 8):
        assert make_reduced_soft_token_fn(base, name, keep)(pixels, asked).shape == (3, keep, 32)


def test_pooling_matches_the_connector():
    x = torch.randn(2, 16, 5)
    pool = make_connector(PoolConnectorConfig(in_features=5, out_features=5, spatial_window=2))
    torch.testing.assert_close(pool_to_cells(x, Grid(h=4, w=4), 4), pool(x, Grid(h=4, w=4)))
    rows = x.view(2, 2, 2, 4, 5).mean(2).flatten(1, 2)  # 4 × 4 patches into two rows of four cells
    torch.testing.assert_close(pool_to_cells(x, Grid(h=4, w=4), 8), rows)
    with pytest.raises(ConfigError, match="1 × 7 cells"):
        pool_to_cells(x, Grid(h=4, w=4), 7)


def test_received_attention_matches_the_block(base, pixels):
    block = base.tower.blocks[-1]
    tokens = base.tower.forward_tokens(pixels, layer=-2)
    found = compute_received_attention(block, tokens)
    torch.testing.assert_close(found.scores.sum(1), torch.ones(3))
    # One-hot values reveal the attention weights.
    op, x = block.branches["self"].op, block.branches["self"].norm(tokens)
    q, k, *_ = op._project(x, None, lambda name, layer, x: layer(x))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(found.scores, weights.mean((1, 2)))


def test_patch_weights_locate_tokens(base, pixels):
    features = base.forward_features(pixels)
    looks = compute_received_attention(base.tower.blocks[-1], base.tower.forward_tokens(pixels, layer=-2))
    for name, reduce in REDUCTIONS.items():
        kept = reduce(features, looks, Grid(h=4, w=4), 4)
        torch.testing.assert_close(kept.patch_weights.sum(-1), torch.ones(3, 4))
        if name != "VisionZip":  # its last tokens are merged
            torch.testing.assert_close(kept.patch_weights @ features, kept.tokens)
    lot = REDUCTIONS["random"](features, looks, Grid(h=4, w=4), 8).patch_weights
    assert lot.sum((1, 2)).tolist() == [8] * 3 and not torch.equal(lot[0], lot[1])
    assert torch.equal(lot, REDUCTIONS["random"](features, looks, Grid(h=4, w=4), 8).patch_weights)


def test_unsupported_models_raise(base, fused):
    for model, name, keep, output in [
        (base, "VisPruner", 17, "17 of 16"),
        (base, "prune", 4, "'prune'"),
        (fused, "pooling", 4, "plain ViT"),
    ]:
        with pytest.raises(ConfigError, match=output):
            make_reduced_soft_token_fn(model, name, keep)
