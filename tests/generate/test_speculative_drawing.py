"""Drawing ahead changes the time it takes, and nothing else."""

import itertools

import pytest
import torch

from models.test_unified_model import made
from vitrail.codecs.quantizers import FSQ
from vitrail.errors import ConfigError
from vitrail.generate.image_generation import ImageGenerationConfig, generate_images
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.generate.speculative_drawing import generate_images_speculatively
from vitrail.models.unified_model import UnifiedModel

TINY = FSQ.Config(levels=(2, 2))


def pair(groups=2, quantizer=TINY, side=8) -> tuple[UnifiedModel, UnifiedModel]:
    model = made("raster", groups=groups, quantizer=quantizer, side=side)
    torch.manual_seed(9)
    draft = UnifiedModel(model.config.replace(decoder=model.config.decoder.replace(layers=1))).eval()
    draft.codec.load_state_dict(model.codec.state_dict())
    with torch.no_grad():
        for p in draft.head.parameters():
            p.normal_(std=0.2)
    return model, draft


@torch.no_grad()
def every(model, prompt, guidance):
    """The chance of each of the 256 pictures of four codes"""
    ids = torch.tensor(list(itertools.product(range(4), repeat=4)))
    states = []
    for words in (prompt, prompt[:, :0]):
        laid_out = model.build_layout(
            model.make_text_piece(words.expand(256, -1)), model.make_output_image_piece(ids.view(256, 2, 2))
        )
        states.append(model.get_code_states(laid_out, model.forward_hidden(laid_out)))
    total, parts = torch.zeros(256), model.split_ids(ids)
    for g in range(parts.shape[-1]):
        c, u = (model.head.compute_logits(state, parts[..., :g]) for state in states)
        output = (u + guidance * (c - u)).log_softmax(-1)
        total += output.gather(-1, parts[..., g, None]).sum((1, 2))
    return total.exp()


@pytest.mark.parametrize("guidance", [1.0, 1.7])
@pytest.mark.parametrize("ahead", [1, 3, 6])
def test_the_distribution_is_the_large_model_s(guidance, ahead):
    """3,000 pictures of four codes against the chance of each (χ² of 255 degrees of freedom)."""
    model, draft = pair()
    prompt = torch.randint(0, 50, (1, 3))
    chance = every(model, prompt, guidance)
    torch.testing.assert_close(chance.sum(), torch.tensor(1.0), rtol=1e-4, atol=0)
    how = ImageGenerationConfig(guidance_scale=guidance, sampling=SamplingConfig(seed=11))
    found = generate_images_speculatively(
        model, draft, prompt.expand(3000, -1), torch.full((3000,), 3), how, draft_length=ahead
    )
    assert 0.2 < found.acceptance_rate < 0.999
    number = (found.ids.flatten(1) * torch.tensor([64, 16, 4, 1])).sum(1)
    expected = 3000 * chance
    common = expected > 5
    seen = number.bincount(minlength=256).float()
    cells = (
        torch.cat([seen[common], seen[~common].sum()[None]]),
        torch.cat([expected[common], expected[~common].sum()[None]]),
    )
    statistic = float(((cells[0] - cells[1]).square() / cells[1].clamp(min=1e-3)).sum())
    freedom = int(common.sum())
    assert statistic < freedom + 3.3 * (2 * freedom) ** 0.5 + 4


def test_greedy_is_greedy():
    for side in (8, 12):
        model, draft = pair(quantizer=None, side=side)
        prompts, counts = torch.randint(0, 50, (3, 5)), torch.tensor([5, 2, 0])
        how = ImageGenerationConfig(guidance_scale=2.0, sampling=GREEDY)
        wanted = generate_images(model, prompts, counts, how)
        for ahead in (1, 2, 5, 20):
            assert torch.equal(
                generate_images_speculatively(model, draft, prompts, counts, how, draft_length=ahead).ids, wanted
            )


def test_who_guesses_all_saves_passes():
    model, _ = pair()
    prompts, counts = torch.randint(0, 50, (2, 3)), torch.tensor([3, 3])
    how = ImageGenerationConfig(guidance_scale=1.0, sampling=SamplingConfig(seed=1))
    found = generate_images_speculatively(model, model, prompts, counts, how, draft_length=3)
    assert found.acceptance_rate == 1 and found.num_passes == 1  # three kept and one more: four codes
    model.train()
    generate_images_speculatively(model, model, prompts, counts, how)
    assert model.training


def test_what_cannot_be_is_refused():
    model, draft = pair()
    prompts, counts = torch.zeros(1, 2, dtype=torch.long), torch.tensor([2])
    with pytest.raises(ConfigError, match="draft_length"):
        generate_images_speculatively(model, draft, prompts, counts, draft_length=0)
    with pytest.raises(ConfigError, match="different codes"):
        generate_images_speculatively(model, pair(groups=1)[1], prompts, counts)
    with pytest.raises(ConfigError, match="raster"):
        generate_images_speculatively(made("masked"), draft, prompts, counts)
