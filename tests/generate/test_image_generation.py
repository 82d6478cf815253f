"""Image generation from codes follows the model's probabilities with every method, batch and cache."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.test_unified_model import made, some
from vitrail.errors import ConfigError
from vitrail.generate.image_generation import ImageGenerationConfig, build_variation_inputs, generate_images
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.models.unified_model import MASKED_CODE

WAYS = ["raster", "masked"]
PLAIN = ImageGenerationConfig(guidance_scale=1.0, sampling=SamplingConfig(seed=3))


def asked(model, B=2, n=4):
    prompts, codes = some(model, B, n)
    return prompts, torch.tensor([n, n - 2][:B]), codes


@torch.no_grad()
def output(model, prompts, counts, ids, hidden=None):
    """(B, N, V) what the model says of each code by one whole pass, as one vocabulary"""
    laid_out = model.build_layout(model.make_text_piece(prompts, counts), model.make_output_image_piece(ids, hidden))
    states = model.get_code_states(laid_out, model.forward_hidden(laid_out))
    every = torch.arange(model.codec.vocab_sizes[0])
    each = [-model.compute_code_losses(states, every[i].expand(states.shape[:2])) for i in range(len(every))]
    return torch.stack(each, -1)


def test_raster_by_a_cache_is_one_whole_pass():
    model = made("raster", groups=1)
    prompts, counts, _ = asked(model)
    ids = generate_images(model, prompts, counts, ImageGenerationConfig(guidance_scale=1.0, sampling=GREEDY))
    assert torch.equal(output(model, prompts, counts, ids).argmax(-1), ids.flatten(1))


def test_guidance_leads_away():
    """u + g·(c − u), of whole passes with the prompt, with another and with none."""
    model = made("raster", groups=1)
    prompts, counts, _ = asked(model)
    other, length = torch.randint(0, 50, (2, 3)), torch.tensor([3, 1])
    empty = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    for negative, against in ((None, empty), ((other, length), (other, length))):
        ids = generate_images(
            model,
            prompts,
            counts,
            ImageGenerationConfig(guidance_scale=2.5, sampling=GREEDY),
            negative_prompts=negative,
        )
        c, u = output(model, prompts, counts, ids), output(model, *against, ids)
        assert torch.equal((u + 2.5 * (c - u)).argmax(-1), ids.flatten(1))


@pytest.mark.parametrize("order", WAYS)
def test_a_row_depends_on_itself_alone(order):
    model = made(order)
    prompts, counts, _ = asked(model)
    how = ImageGenerationConfig(guidance_scale=2.0, steps=4, sampling=SamplingConfig(seed=7, top_p=0.95))
    both = generate_images(model, prompts, counts, how)
    again = generate_images(model, prompts, counts, how)
    assert torch.equal(both, again)
    second = how.replace(sampling=how.sampling.replace(seed=8))
    assert torch.equal(generate_images(model, prompts[1:], counts[1:], second)[0], both[1])
    others = [how.replace(sampling=how.sampling.replace(seed=seed)) for seed in range(20, 26)]
    assert len({tuple(generate_images(model, prompts, counts, other).flatten().tolist()) for other in others}) > 1


@pytest.mark.parametrize("order", WAYS)
@pytest.mark.parametrize("groups", [1, 2])
def test_draws_have_the_model_s_distribution(order, groups):
    """A picture of one code, four thousand times, against the chances by the formula (χ², 11 degrees of freedom)."""
    model = made(order, groups=groups, side=4)
    prompts = torch.randint(0, 50, (1, 3)).expand(4000, -1)
    counts = torch.full((4000,), 3)
    ids = generate_images(
        model, prompts, counts, ImageGenerationConfig(guidance_scale=1.0, steps=1, sampling=SamplingConfig(seed=1))
    )
    hidden = None if order == "raster" else torch.ones(1, 1, 1, dtype=torch.bool)
    chance = output(model, prompts[:1], counts[:1], ids[:1], hidden)[0, 0].exp()
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
    kept, stay = build_variation_inputs(codes, share, seed)
    assert int((~stay).flatten(1).sum(1).unique()) == round(share * 9)
    found = generate_images(model, prompts, counts, PLAIN.replace(steps=steps), fixed_codes=(kept, stay))
    assert torch.equal(found[stay], codes[stay])
    assert found.min() >= 0 and found.max() < 12


def test_masked_drawing_settles_by_the_cosine():
    """After step s of S, ⌈cos(π/2 · (s + 1)/S) · N⌉ codes are still hidden, and those settled never change; a step
    that settles none is not made."""
    model = made("masked")
    prompts, counts, _ = asked(model)
    seen, plain = [], model.make_output_image_piece

    def drawn(ids, hidden=None):
        seen.append((ids.clone(), hidden.clone()))
        return plain(ids, hidden)

    model.make_output_image_piece = drawn
    final = generate_images(model, prompts, counts, PLAIN.replace(steps=5))
    left = [int(hidden[0].sum()) for _, hidden in seen]
    wanted = [9, *(math.ceil(math.cos(math.pi / 2 * (s + 1) / 5) * 9) for s in range(4))]
    assert wanted == [9, 9, 8, 6, 3] and left == [9, 8, 6, 3]
    for ids, hidden in seen:
        assert torch.equal(ids[~hidden], final[~hidden])
    for (_, before), (_, after) in itertools.pairwise(seen):
        assert (after <= before).all()


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_empty_passes_are_skipped(guidance, monkeypatch):
    model = made("masked")
    prompts, counts, codes = asked(model)
    open_ = torch.zeros_like(codes, dtype=torch.bool)
    open_[0, 0, :2] = open_[1, 1, :1] = True
    how = ImageGenerationConfig(guidance_scale=guidance, steps=20, sampling=SamplingConfig(seed=5))
    passes, plain = [], model.forward_hidden
    monkeypatch.setattr(model, "forward_hidden", lambda laid_out: passes.append(1) or plain(laid_out))
    found = generate_images(model, prompts, counts, how, fixed_codes=(codes, ~open_))
    assert len(passes) <= 3  # of three codes in two rows
    monkeypatch.setattr("vitrail.generate.image_generation.find_active_passes", lambda total, steps: [True] * steps)
    assert (
        torch.equal(generate_images(model, prompts, counts, how, fixed_codes=(codes, ~open_)), found)
        and len(passes) > 20
    )


def test_one_greedy_pass_selects_the_likeliest_codes():
    model = made("masked", groups=1)
    prompts, counts, codes = asked(model)
    ids = generate_images(model, prompts, counts, ImageGenerationConfig(guidance_scale=1.0, steps=1, sampling=GREEDY))
    hidden = torch.ones_like(codes, dtype=torch.bool)
    assert torch.equal(output(model, prompts, counts, codes, hidden).argmax(-1), ids.flatten(1))


def test_most_confident_codes_are_kept():
    """One pass keeps the most probable codes; at a high temperature it keeps any."""
    model = made("masked", groups=1)
    with torch.no_grad():
        model.mark_embed.weight[MASKED_CODE].normal_(std=3)
    prompts, counts, codes = asked(model)
    hidden = torch.ones_like(codes, dtype=torch.bool)
    sure = output(model, prompts, counts, codes, hidden).amax(-1)  # (B, N) of the greedy choice
    seen, plain = [], model.make_output_image_piece
    model.make_output_image_piece = lambda ids, hidden=None: seen.append(hidden) or plain(ids, hidden)
    generate_images(
        model,
        prompts,
        counts,
        ImageGenerationConfig(guidance_scale=1.0, steps=2, sampling=GREEDY, choice_temperature=0.0),
    )
    left = seen[1].flatten(1)  # ⌈cos(π/4) · 9⌉ = 7 are still hidden
    for row in range(2):
        assert sure[row][~left[row]].min() >= sure[row][left[row]].max()
    chosen = set()
    for seed in range(8):
        seen.clear()
        generate_images(
            model,
            prompts,
            counts,
            ImageGenerationConfig(guidance_scale=1.0, steps=2, sampling=SamplingConfig(temperature=0.0, seed=seed)),
        )
        chosen.add(tuple(seen[1].flatten().tolist()))
    assert len(chosen) > 1


@pytest.mark.parametrize("order", WAYS)
def test_redrawn_codes_use_new_random_numbers(order):
    """The seed determines which codes are redrawn and their new values, by separate random numbers."""
    model = made(order, groups=1, side=32)
    with torch.no_grad():
        for p in model.head.parameters():
            p.zero_()  # every code is as likely as any other
    prompts, counts = torch.zeros(60, 0, dtype=torch.long), torch.zeros(60, dtype=torch.long)
    codes = torch.zeros(60, 8, 8, dtype=torch.long)
    given = build_variation_inputs(codes, 0.25, 5)
    found = generate_images(
        model,
        prompts,
        counts,
        ImageGenerationConfig(guidance_scale=1.0, steps=1, sampling=SamplingConfig(seed=5)),
        fixed_codes=given,
    )
    fresh = found[~given[1]].double()
    assert len(fresh) == 60 * 16 and abs(fresh.mean() - 5.5) < 0.5  # of 0 … 11


def test_given_and_negative_fit():
    model = made("masked")
    prompts, counts, codes = asked(model)
    with pytest.raises(ConfigError, match="1 fixed_codes for 2 prompts"):
        generate_images(model, prompts, counts, PLAIN, fixed_codes=(codes[:1], codes[:1] > 0))
    with pytest.raises(ConfigError, match="has no effect with guidance_scale 1"):
        generate_images(model, prompts, counts, PLAIN, negative_prompts=(prompts, counts))
    with pytest.raises(ConfigError, match="seed"):
        build_variation_inputs(codes, 0.5, -1)


def test_without_a_word():
    for order in WAYS:
        model = made(order)
        nothing = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
        assert generate_images(model, *nothing, PLAIN).shape == (2, 3, 3)
        assert generate_images(model, *nothing, PLAIN.replace(guidance_scale=3.0)).shape == (2, 3, 3)


def test_another_grid():
    model = made("masked")
    prompts, counts, _ = asked(model)
    ids = torch.zeros(2, 2, 5, dtype=torch.long)
    assert generate_images(model, prompts, counts, PLAIN, fixed_codes=(ids, ids > 0)).shape == (2, 2, 5)


def test_progress_and_training_mode():
    model = made("masked").train()
    prompts, counts, _ = asked(model)
    result = []
    generate_images(model, prompts, counts, PLAIN.replace(steps=3), progress=lambda *at: result.append(at))
    assert result[-1] == (18, 18) and len(result) == 3 and model.training


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"choice_temperature": -1.0}, {"guidance_scale": math.inf}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        ImageGenerationConfig(**wrong)
    with pytest.raises(ConfigError, match="repeat"):
        ImageGenerationConfig(sampling=SamplingConfig(repetition_penalty=1.2))
    with pytest.raises(ConfigError, match="redraw_fraction"):
        build_variation_inputs(torch.zeros(1, 2, 2, dtype=torch.long), 1.5)
