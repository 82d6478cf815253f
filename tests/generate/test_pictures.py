"""Drawing in codes: what is drawn is what the model says, whatever the way, the company and the cache."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.test_unified import made, some
from vitrail.errors import ConfigError
from vitrail.generate.pictures import Drawing, draw, varied
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.models.unified import HIDDEN

WAYS = ["raster", "masked"]
PLAIN = Drawing(guidance=1.0, sampling=Sampling(seed=3))


def asked(model, B=2, n=4):
    prompts, codes = some(model, B, n)
    return prompts, torch.tensor([n, n - 2][:B]), codes


@torch.no_grad()
def said(model, prompts, counts, ids, hidden=None):
    """(B, N, V) what the model says of each code by one whole pass, as one vocabulary"""
    laid = model.lay(model.words(prompts, counts), model.drawn(ids, hidden))
    states = model.drawing_states(laid, model.hidden(laid))
    every = torch.arange(model.codec.sizes[0])
    each = [-model.code_losses(states, every[i].expand(states.shape[:2])) for i in range(len(every))]
    return torch.stack(each, -1)


def test_raster_by_a_cache_is_one_whole_pass():
    model = made("raster", groups=1)
    prompts, counts, _ = asked(model)
    ids = draw(model, prompts, counts, Drawing(guidance=1.0, sampling=GREEDY))
    assert torch.equal(said(model, prompts, counts, ids).argmax(-1), ids.flatten(1))


def test_guidance_leads_away():
    """u + g·(c − u), of whole passes with the prompt, with another and with none."""
    model = made("raster", groups=1)
    prompts, counts, _ = asked(model)
    other, length = torch.randint(0, 50, (2, 3)), torch.tensor([3, 1])
    empty = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    for negative, against in ((None, empty), ((other, length), (other, length))):
        ids = draw(model, prompts, counts, Drawing(guidance=2.5, sampling=GREEDY), negative=negative)
        c, u = said(model, prompts, counts, ids), said(model, *against, ids)
        assert torch.equal((u + 2.5 * (c - u)).argmax(-1), ids.flatten(1))


@pytest.mark.parametrize("order", WAYS)
def test_a_row_depends_on_itself_alone(order):
    model = made(order)
    prompts, counts, _ = asked(model)
    how = Drawing(guidance=2.0, steps=4, sampling=Sampling(seed=7, top_p=0.95))
    both = draw(model, prompts, counts, how)
    again = draw(model, prompts, counts, how)
    assert torch.equal(both, again)
    second = how.with_(sampling=how.sampling.with_(seed=8))
    assert torch.equal(draw(model, prompts[1:], counts[1:], second)[0], both[1])
    others = [how.with_(sampling=how.sampling.with_(seed=seed)) for seed in range(20, 26)]
    assert len({tuple(draw(model, prompts, counts, other).flatten().tolist()) for other in others}) > 1


@pytest.mark.parametrize("order", WAYS)
@pytest.mark.parametrize("groups", [1, 2])
def test_draws_have_the_model_s_distribution(order, groups):
    """A picture of one code, four thousand times, against the chances by the formula (χ², 11 degrees of freedom)."""
    model = made(order, groups=groups, side=4)
    prompts = torch.randint(0, 50, (1, 3)).expand(4000, -1)
    counts = torch.full((4000,), 3)
    ids = draw(model, prompts, counts, Drawing(guidance=1.0, steps=1, sampling=Sampling(seed=1)))
    hidden = None if order == "raster" else torch.ones(1, 1, 1, dtype=torch.bool)
    chance = said(model, prompts[:1], counts[:1], ids[:1], hidden)[0, 0].exp()
    torch.testing.assert_close(chance.sum(), torch.tensor(1.0))
    expected = 4000 * chance
    seen = ids.flatten().bincount(minlength=12)
    assert float(((seen - expected).square() / expected).sum()) < 31.3  # one in a thousand


@pytest.mark.parametrize("order", WAYS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), share=st.floats(0, 1), steps=st.integers(1, 12))
def test_what_is_given_stays(order, seed, share, steps):
    model = made(order)
    prompts, counts, codes = asked(model)
    kept, stay = varied(codes, share, seed)
    assert int((~stay).flatten(1).sum(1).unique()) == round(share * 9)
    found = draw(model, prompts, counts, PLAIN.with_(steps=steps), given=(kept, stay))
    assert torch.equal(found[stay], codes[stay])
    assert found.min() >= 0 and found.max() < 12


def test_masked_drawing_settles_by_the_cosine():
    """After step s of S, ⌈cos(π/2 · (s + 1)/S) · N⌉ codes are still hidden, and those settled never change; a step
    that settles none is not made."""
    model = made("masked")
    prompts, counts, _ = asked(model)
    seen, plain = [], model.drawn

    def drawn(ids, hidden=None):
        seen.append((ids.clone(), hidden.clone()))
        return plain(ids, hidden)

    model.drawn = drawn
    final = draw(model, prompts, counts, PLAIN.with_(steps=5))
    left = [int(hidden[0].sum()) for _, hidden in seen]
    wanted = [9, *(math.ceil(math.cos(math.pi / 2 * (s + 1) / 5) * 9) for s in range(4))]
    assert wanted == [9, 9, 8, 6, 3] and left == [9, 8, 6, 3]
    for ids, hidden in seen:
        assert torch.equal(ids[~hidden], final[~hidden])
    for (_, before), (_, after) in itertools.pairwise(seen):
        assert (after <= before).all()


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_passes_that_settle_nothing_are_not_made_and_change_nothing(guidance, monkeypatch):
    model = made("masked")
    prompts, counts, codes = asked(model)
    open_ = torch.zeros_like(codes, dtype=torch.bool)
    open_[0, 0, :2] = open_[1, 1, :1] = True
    how = Drawing(guidance=guidance, steps=20, sampling=Sampling(seed=5))
    passes, plain = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda laid: passes.append(1) or plain(laid))
    found = draw(model, prompts, counts, how, given=(codes, ~open_))
    assert len(passes) <= 3  # of three codes in two rows
    monkeypatch.setattr("vitrail.generate.pictures.settles", lambda total, steps: [True] * steps)
    assert torch.equal(draw(model, prompts, counts, how, given=(codes, ~open_)), found) and len(passes) > 20


def test_one_pass_of_greedy_is_what_is_likeliest():
    model = made("masked", groups=1)
    prompts, counts, codes = asked(model)
    ids = draw(model, prompts, counts, Drawing(guidance=1.0, steps=1, sampling=GREEDY))
    hidden = torch.ones_like(codes, dtype=torch.bool)
    assert torch.equal(said(model, prompts, counts, codes, hidden).argmax(-1), ids.flatten(1))


def test_the_surest_stay():
    """Of one pass, those that are settled are the likeliest of what was chosen; with much chance they are any."""
    model = made("masked", groups=1)
    with torch.no_grad():
        model.marks.weight[HIDDEN].normal_(std=3)
    prompts, counts, codes = asked(model)
    hidden = torch.ones_like(codes, dtype=torch.bool)
    sure = said(model, prompts, counts, codes, hidden).amax(-1)  # (B, N) of the greedy choice
    seen, plain = [], model.drawn
    model.drawn = lambda ids, hidden=None: seen.append(hidden) or plain(ids, hidden)
    draw(model, prompts, counts, Drawing(guidance=1.0, steps=2, sampling=GREEDY, wander=0.0))
    left = seen[1].flatten(1)  # ⌈cos(π/4) · 9⌉ = 7 are still hidden
    for row in range(2):
        assert sure[row][~left[row]].min() >= sure[row][left[row]].max()
    chosen = set()
    for seed in range(8):
        seen.clear()
        draw(model, prompts, counts, Drawing(guidance=1.0, steps=2, sampling=Sampling(temperature=0.0, seed=seed)))
        chosen.add(tuple(seen[1].flatten().tolist()))
    assert len(chosen) > 1


@pytest.mark.parametrize("order", WAYS)
def test_what_is_drawn_anew_is_drawn_afresh(order):
    """The same seed says which codes are drawn anew and what they become, by numbers of their own."""
    model = made(order, groups=1, side=32)
    with torch.no_grad():
        for p in model.head.parameters():
            p.zero_()  # every code is as likely as any other
    prompts, counts = torch.zeros(60, 0, dtype=torch.long), torch.zeros(60, dtype=torch.long)
    codes = torch.zeros(60, 8, 8, dtype=torch.long)
    given = varied(codes, 0.25, 5)
    found = draw(model, prompts, counts, Drawing(guidance=1.0, steps=1, sampling=Sampling(seed=5)), given=given)
    fresh = found[~given[1]].double()
    assert len(fresh) == 60 * 16 and abs(fresh.mean() - 5.5) < 0.5  # of 0 … 11


def test_given_and_negative_fit():
    model = made("masked")
    prompts, counts, codes = asked(model)
    with pytest.raises(ConfigError, match="2 prompts, and 1"):
        draw(model, prompts, counts, PLAIN, given=(codes[:1], codes[:1] > 0))
    with pytest.raises(ConfigError, match="leads away from nothing"):
        draw(model, prompts, counts, PLAIN, negative=(prompts, counts))
    with pytest.raises(ConfigError, match="seed"):
        varied(codes, 0.5, -1)


def test_without_a_word():
    for order in WAYS:
        model = made(order)
        nothing = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
        assert draw(model, *nothing, PLAIN).shape == (2, 3, 3)
        assert draw(model, *nothing, PLAIN.with_(guidance=3.0)).shape == (2, 3, 3)


def test_another_grid():
    model = made("masked")
    prompts, counts, _ = asked(model)
    ids = torch.zeros(2, 2, 5, dtype=torch.long)
    assert draw(model, prompts, counts, PLAIN, given=(ids, ids > 0)).shape == (2, 2, 5)


def test_progress_and_training_mode():
    model = made("masked").train()
    prompts, counts, _ = asked(model)
    told = []
    draw(model, prompts, counts, PLAIN.with_(steps=3), progress=lambda *at: told.append(at))
    assert told[-1] == (18, 18) and len(told) == 3 and model.training


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"wander": -1.0}, {"guidance": math.inf}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Drawing(**wrong)
    with pytest.raises(ConfigError, match="repeat"):
        Drawing(sampling=Sampling(repetition=1.2))
    with pytest.raises(ConfigError, match="share"):
        varied(torch.zeros(1, 2, 2, dtype=torch.long), 1.5)
