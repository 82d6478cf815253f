"""First stage of BLIP-2 matches Blip2ForImageTextRetrieval on random checkpoints.

Compares similarities, matching scores, gradients and round trips."""

import json

import pytest
import torch
from transformers import Blip2Config, Blip2ForImageTextRetrieval

from helpers import randomize, relative
from vitrail import hub
from vitrail.errors import CheckpointError
from vitrail.models.text_qformer import TextQFormer

TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_attention_heads": 2, "image_size": 15, "patch_size": 5}
WORDS = {"vocab_size": 110, "max_position_embeddings": 12, "use_qformer_text_input": True}
QUERIES = {"hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 29, **WORDS}
LENGTHS = torch.tensor([7, 3, 5])


def blip2(**queries):
    config = Blip2Config(
        vision_config={**TOWER, "num_hidden_layers": 2},
        qformer_config=QUERIES | queries,
        num_query_tokens=4,
        image_text_hidden_size=14,
        image_token_index=None,
    )
    return randomize(Blip2ForImageTextRetrieval(config).eval(), spread=0.1)


@pytest.fixture(params=[{}, {"cross_attention_frequency": 1, "layer_norm_eps": 1e-5}])
def both(request, tmp_path):
    reference = blip2(**request.param)
    reference.save_pretrained(tmp_path)
    return reference, hub.load(tmp_path).eval()


def sample(seed: int = 0):
    """Return pixels, ids with mask for transformers, and native ids (−1 as padding)."""
    chance = torch.Generator().manual_seed(seed)
    pixels = torch.randn(3, 3, 15, 15, generator=chance)
    ids = torch.randint(3, 100, (3, 7), generator=chance)
    real = torch.arange(7) < LENGTHS[:, None]
    return pixels, ids, real, ids.masked_fill(~real, -1)


def test_similarities_match_transformers(both):
    theirs, ours = both
    pixels, ids, real, padded = sample()
    wanted = theirs(pixel_values=pixels, input_ids=ids, attention_mask=real.long()).logits_per_image
    found = ours(pixels, padded)
    assert isinstance(ours, TextQFormer) and found.shape == (3, 3) and wanted.std() > 1e-3
    assert relative(found, wanted) < 1e-4
    weights = torch.randn(3, 3)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, other in [
        (ours.embed.weight, theirs.embeddings.word_embeddings.weight),
        (ours.positions, theirs.embeddings.position_embeddings.weight),
        (ours.qformer.queries, theirs.query_tokens),
        (ours.tower.positions.table, theirs.vision_model.embeddings.position_embedding),
    ]:
        assert relative(mine.grad.view(other.grad.shape), other.grad) < 1e-3


def test_matching_scores_match_transformers(both):
    theirs, ours = both
    pixels, ids, real, padded = sample(1)
    more = {"attention_mask": real.long(), "use_image_text_matching_head": True}
    wanted = theirs(pixel_values=pixels, input_ids=ids, **more).logits_per_image
    found = ours.compute_match_logits(ours.forward_features(pixels), padded)
    assert found.shape == (3, 2) and relative(found, wanted) < 1e-4
    found[:, 1].sum().backward()
    wanted[:, 1].sum().backward()
    theirs_grad = theirs.embeddings.word_embeddings.weight.grad
    assert relative(ours.embed.weight.grad, theirs_grad) < 1e-3


def test_round_trip(both, tmp_path):
    theirs, ours = both
    hub.to_hf(ours, tmp_path / "again")
    again = Blip2ForImageTextRetrieval.from_pretrained(tmp_path / "again").eval()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    hub.save(ours, tmp_path / "own")
    own = hub.load(tmp_path / "own").eval()
    pixels, *_, padded = sample()
    assert torch.equal(own(pixels, padded), ours(pixels, padded))


def test_text_generation_head_is_not_exported(both, tmp_path):
    _, ours = both
    config = ours.config.replace(decoder_start_token_id=3, log_scale=1.0)
    with pytest.raises(CheckpointError, match="TextQFormer"):
        hub.to_hf(TextQFormer(config), tmp_path / "none")


def test_checkpoint_without_text_tensors_raises(tmp_path):
    reference = blip2()
    reference.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    about["qformer_config"]["use_qformer_text_input"] = False
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(Exception, match="text") as error:
        hub.load(tmp_path)
    assert error.type.__module__ == "vitrail.errors"
