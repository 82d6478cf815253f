"""Ledgers of partially used models, against their modules and torch's FLOP counter."""

import pytest
import torch
from cyclopts import App

from lab.test_ledger_vlm import counted
from models.test_unified_model import MROPE, made
from vitrail import hub, recipe
from vitrail.hub.checkpoint_info import read_config
from vitrail.lab.cost_ledger import compute_ledger
from vitrail.lab.partial_models import UnifiedReadingModel, WorldDynamicsModel
from vitrail.models.genie_model import Genie
from vitrail.nn import Workload, cost


def test_mini_has_the_parameters_of_its_checkpoint():
    model = hub.load("mini", dtype=torch.bfloat16)
    one = compute_ledger(read_config("mini"), context_length=20)
    assert (
        one.parameters
        == sum(p.numel() for p in model.parameters())
        == sum(p.parameters for p in one.components.values())
    )
    assert (
        one.weight_bytes
        == sum(p.nbytes for p in model.parameters())
        == sum(p.weight_bytes for p in one.components.values())
    )
    assert one.components["decoder"].parameters == sum(p.numel() for p in model.decoder.parameters())
    assert (one.image_tokens, one.tokens, one.input_kind) == (145, 165, "question")
    assert (
        one.forward_flops == sum(part.forward_flops for part in one.components.values())
        and one.components["drawing"].forward_flops == 0
    )
    # The tower, computed manually: six blocks of width 256 over 144 patches of 8 × 8.
    assert one.components["tower"].forward_flops == 144 * 2 * (6 * (4 + 8) * 256**2 + 192 * 256) + 6 * 4 * 256 * 144**2
    assert one.components["connector"].forward_flops == 144 * 2 * 256 * 512


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_flops_match_torch(batch):
    own = made(rotary=MROPE, order="masked", image_input="features")
    model = UnifiedReadingModel(own.config)
    work = model.workload(1, 4, batch)
    pixels, ids = torch.randn(batch, 3, 12, 12), torch.zeros(batch, 4, dtype=torch.long)

    def ask() -> None:
        laid_out = own.build_layout(
            own.make_input_image_piece(own.codec.forward_features(pixels)), own.make_text_piece(ids)
        )
        own.decoder.compute_logits(own.forward_hidden(laid_out))

    # The start token and nine codes attend to each other without a mask; four text tokens attend to all.
    unmasked = work.replace(attention_pairs=batch * (10 * 10 + 4 * 14), logit_tokens=None)
    assert cost.count_flops(model, unmasked) == counted(ask)
    seen = Workload.from_plan(
        own.build_layout(own.make_input_image_piece(torch.randn(batch, 3, 3, 16)), own.make_text_piece(ids)).plan,
        14,
        batch,
    )
    assert work.attention_pairs == seen.attention_pairs  # bidirectional attention of start token and codes
    assert cost.count_bytes(model, work).read < cost.count_bytes(model, work).weights  # drawing weights are not read


def test_question_without_images_uses_the_decoder_only():
    none = compute_ledger(read_config("mini"), context_length=64, num_images=0)
    with torch.device("meta"):
        decoder = UnifiedReadingModel(read_config("mini")).model.decoder
    assert none.forward_flops == cost.count_flops(decoder, Workload.prefill(64)) and none.image_tokens == 0
    assert none.components["tower"].forward_flops == 0 < none.components["tower"].weight_bytes


def test_world_processes_its_memory():
    config = recipe.load_recipe("genie-coinrun").build_model_config()
    with torch.device("meta"):
        model, own = Genie(config), WorldDynamicsModel(config)
    one = compute_ledger(config)
    assert one.parameters == sum(p.numel() for p in model.parameters())
    memory = config.dynamics.transformer.context_frames
    assert one.tokens == memory * config.codec.grid[0] * config.codec.grid[1] and one.input_kind == "video"
    assert one.forward_flops == cost.count_flops(model.dynamics, model.workload(memory))
    assert cost.count_bytes(own, own.workload()).read <= sum(p.nbytes for p in model.dynamics.parameters())


def test_ledger_command_accepts_mini(capsys):
    app = App(result_action="return_value")
    app.command("vitrail.cli.ledger_command:print_ledger", name="ledger")
    app(["ledger", "mini", "--context-length", "20"], exit_on_error=False)
    assert "drawing" in capsys.readouterr().out
    app(["ledger", "genie-coinrun"], exit_on_error=False)
    assert "tokens, a video" in capsys.readouterr().out
