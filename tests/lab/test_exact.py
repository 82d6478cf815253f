"""Answers judged without writing them: as the model would write them, whatever makes a picture's tokens."""

import pytest
import torch
from torch import Tensor

from data.scenes.conftest import drawn
from helpers import randomize
from vitrail import recipe
from vitrail.cli.scaling_run import SMOKE
from vitrail.connectors import PoolConfig, QFormerConfig, make_connector
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.talks import talks
from vitrail.errors import ConfigError
from vitrail.generate import GREEDY
from vitrail.generate.seen import write
from vitrail.lab import exact
from vitrail.lab.cut import cut
from vitrail.lab.exact import Exam, look_of, read, shown, untold
from vitrail.lab.reduced import REDUCTIONS, pooled, received, reduced_look
from vitrail.models.rows import Rows
from vitrail.models.vlm import VLM, Shown
from vitrail.models.vlm_config import VLMConfig
from vitrail.processing.grid import Grid
from vitrail.processing.text import Tokenizer
from vitrail.stream import build
from vitrail.stream import words as text
from vitrail.tasks.told import IGNORED

KINDS = ("existence_random", "colour")


def config_of(name: str) -> VLMConfig:
    """Of a recipe, shrunk as `--smoke` does."""
    own = f"{name.removeprefix('scaling-')}.model.config"
    changes = {f"model.config{key.removeprefix(own)}": value for key, value in SMOKE.items() if key.startswith(own)}
    found = recipe.read(name if name in recipe.names() else f"untested/{name}", changes).model_config()
    assert isinstance(found, VLMConfig)
    return found


@pytest.fixture(scope="module")
def base() -> VLM:
    return randomize(VLM(config_of("scaling-base")), 1, 0.3).eval()


@pytest.fixture(scope="module")
def fused() -> VLM:
    config = config_of("scaling-queries")
    assert config.queries is not None
    return randomize(VLM(config.with_(queries=config.queries.with_(first=9))), 2, 0.3).eval()


@pytest.fixture(scope="module")
def source() -> SceneSource:
    return SceneSource(ScenesConfig(atlas="-", side=16, seed=3), Atlas.build(drawn()))


@pytest.fixture(scope="module")
def words(source) -> Tokenizer:
    texts = talks(source, 1).pieces.texts[1:]
    return Tokenizer.train(texts, 420, specials=("<|endoftext|>", "<image>"), bos="<s>")


@pytest.fixture(scope="module")
def exam(source, words) -> Exam:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "GUESSED", 256)
        return Exam(source, KINDS, words, count=12, length=40)


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_every_sheet_is_full_and_asks_what_it_answers(exam, words):
    for sheet in exam.sheets.values():
        assert len(sheet.ids) == 12
        for ids, targets, asked in zip(sheet.ids, sheet.targets, sheet.asked, strict=True):
            question, answer = asked[asked >= 0], targets[targets != IGNORED]
            talk = [*question.tolist(), words.eos, *answer.tolist()]
            assert ids.tolist()[: len(talk)] == talk[:40] and answer[-1] == words.eos and len(answer) > 1
    assert exam.lead == [words.bos] and 0 < exam.beside["colour"]["majority"] < 1


def test_right_is_what_would_be_written(exam, base, words):
    """Models that say anything are hardly ever right, so sheets are made of what one says, and of that with a slip."""
    look, right = look_of(base), []
    for sheet in exam.sheets.values():
        x = shown(base, sheet.pixels)
        view = base.config.policy.cut(16, 16)
        for row in range(0, len(sheet.ids), 3):
            question = sheet.asked[row][sheet.asked[row] >= 0]
            told = [text(exam.lead), base.config.part(view), text([*question.tolist(), exam.end])]
            seen = Shown(x[row : row + 1], (view,))
            how = {"max_new": 3, "sampling": GREEDY, "tokenizer": words}
            [said] = write(base, [build(told, base.config.rules)], seen, **how)
            ids = torch.tensor([[*question.tolist(), exam.end, *said.ids, exam.end]])
            targets = torch.full_like(ids, IGNORED)
            targets[0, len(question) : len(question) + len(said.ids)] = torch.tensor(said.ids)
            for slip in (0, 1):
                wanted = targets.clone()
                wanted[0, len(question) + len(said.ids) - 1] += slip
                one = exact.Sheet(sheet.pixels[row : row + 1], ids, wanted, ids)
                right.append((bool(exam._right(base, look, one)), not slip))
    assert all(found == want for found, want in right)


def test_rows_are_read_as_in_training(exam, fused):
    sheet = exam.sheets["colour"]
    rows, x = Rows(fused, exam.lead, 40), shown(fused, sheet.pixels)
    want = rows.hidden(rows.frame(torch.device("cpu")), x, sheet.ids, sheet.asked[:, None])
    found = read(fused, exam.lead, look_of(fused)(x, sheet.asked), sheet.ids)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_what_is_told_reaches_the_queries_alone(exam, fused):
    sheet = exam.sheets["colour"]
    x, look = shown(fused, sheet.pixels), look_of(fused)
    told, other = look(x, sheet.asked), look(x, sheet.asked.roll(1, 0))
    assert not torch.allclose(told, other) and not torch.allclose(told, untold(look)(x, sheet.asked))
    never = VLM(fused.config.with_(queries=fused.config.queries.with_(question="never")))
    never.load_state_dict(fused.state_dict())
    alone = look_of(never)
    torch.testing.assert_close(alone(x, sheet.asked), untold(look)(x, sheet.asked))
    scores = [exam.scores(fused, look, batch=5, turn=turn) for turn in (0, 1)]
    assert [[s.name for s in one] for one in scores] == [list(KINDS)] * 2 and scores[0][0].of == 12


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_fewer_queries_are_the_first_of_more(fused, pixels, tokens):
    asked = torch.tensor([[5, 6, 7, -1], [8, -1, -1, -1], [9, 10, -1, -1]])
    fewer = cut(fused, tokens)
    assert fewer.config.queries.groups(2) == [tokens, min(8, tokens)]
    torch.testing.assert_close(look_of(fewer)(pixels, asked), look_of(fused)(pixels, asked)[:, :tokens])


def test_a_qformer_keeps_its_first_queries(base):
    connector = QFormerConfig(reads=16, gives=32, queries=6, layers=1, width=8, heads=2, hidden=8)
    model = VLM(base.config.with_(connector=connector))
    fewer = cut(model, 2)
    assert torch.equal(fewer.connector.queries, model.connector.queries[:2])
    assert fewer.config.tokens(fewer.config.policy.cut(16, 16)) == 2
    for wrong, said in ((model, "7 of 6"), (base, "no queries")):
        with pytest.raises(ConfigError, match=said):
            cut(wrong, 7)


# ---- without training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCTIONS)
def test_all_patches_are_the_model_itself(base, pixels, name):
    asked = torch.zeros(3, 0, dtype=torch.long)
    torch.testing.assert_close(reduced_look(base, name, 16)(pixels, asked), look_of(base)(pixels, asked))
    for keep in (1, 2, 8, 15) if name != "pooling" else (1, 2, 8):
        assert reduced_look(base, name, keep)(pixels, asked).shape == (3, keep, 32)


def test_pooling_is_that_of_the_connector():
    x = torch.randn(2, 16, 5)
    pool = make_connector(PoolConfig(reads=5, gives=5, space=2))
    torch.testing.assert_close(pooled(x, Grid(h=4, w=4), 4), pool(x, Grid(h=4, w=4)))
    rows = x.view(2, 2, 2, 4, 5).mean(2).flatten(1, 2)  # of 4 × 4 patches two rows of four cells
    torch.testing.assert_close(pooled(x, Grid(h=4, w=4), 8), rows)
    with pytest.raises(ConfigError, match="1 × 7 cells"):
        pooled(x, Grid(h=4, w=4), 7)


def test_looks_are_what_attention_weighs(base, pixels):
    block = base.tower.blocks[-1]
    tokens = base.tower.tokens(pixels, layer=-2)
    found = received(block, tokens)
    torch.testing.assert_close(found.scores.sum(1), torch.ones(3))
    # Attention whose values say where they stand gives its weights away.
    op, x = block.branches["self"].op, block.branches["self"].norm(tokens)
    q, k, _ = op._project(x, None, lambda name, layer, x: layer(x))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(found.scores, weights.mean((1, 2)))


def test_what_is_kept_says_where_it_stood(base, pixels):
    features = base.features(pixels)
    looks = received(base.tower.blocks[-1], base.tower.tokens(pixels, layer=-2))
    for name, reduce in REDUCTIONS.items():
        kept = reduce(features, looks, Grid(h=4, w=4), 4)
        torch.testing.assert_close(kept.places.sum(-1), torch.ones(3, 4))
        if name != "VisionZip":  # whose last tokens have the rest added
            torch.testing.assert_close(kept.places @ features, kept.tokens)
    lot = REDUCTIONS["random"](features, looks, Grid(h=4, w=4), 8).places
    assert lot.sum((1, 2)).tolist() == [8] * 3 and not torch.equal(lot[0], lot[1])
    assert torch.equal(lot, REDUCTIONS["random"](features, looks, Grid(h=4, w=4), 8).places)


def test_what_cannot_be_reduced(base, fused):
    for model, name, keep, said in [
        (base, "VisPruner", 17, "17 of 16"),
        (base, "prune", 4, "'prune'"),
        (fused, "pooling", 4, "plain ViT"),
    ]:
        with pytest.raises(ConfigError, match=said):
            reduced_look(model, name, keep)
