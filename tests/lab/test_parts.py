"""Ledgers of models of which parts rest in a pass, against the modules themselves and torch's counter."""

import pytest
import torch
from cyclopts import App

from lab.test_ledger_vlm import counted
from models.test_unified import MROPE, made
from vitrail import hub, recipe
from vitrail.hub.configs import read_config
from vitrail.lab.ledger import ledger
from vitrail.lab.parts import Playing, Reading
from vitrail.models.genie import Genie
from vitrail.nn import Work, cost


def test_mini_weighs_what_is_loaded():
    model = hub.load("mini", dtype=torch.bfloat16)
    one = ledger(read_config("mini"), context=20)
    assert one.parameters == sum(p.numel() for p in model.parameters()) == sum(p.parameters for p in one.parts.values())
    assert one.weights == sum(p.nbytes for p in model.parameters()) == sum(p.weights for p in one.parts.values())
    assert one.parts["decoder"].parameters == sum(p.numel() for p in model.decoder.parameters())
    assert (one.seen, one.tokens, one.row) == (145, 165, "question")
    assert one.forward == sum(part.forward for part in one.parts.values()) and one.parts["drawing"].forward == 0
    # The tower by hand: six blocks of width 256 over 144 patches of 8 × 8.
    assert one.parts["tower"].forward == 144 * 2 * (6 * (4 + 8) * 256**2 + 192 * 256) + 6 * 4 * 256 * 144**2
    assert one.parts["connector"].forward == 144 * 2 * 256 * 512


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_flops_are_those_of_torch(batch):
    own = made(rotary=MROPE, order="masked", sees="features")
    model = Reading(own.config)
    work = model.work(1, 4, batch)
    pixels, ids = torch.randn(batch, 3, 12, 12), torch.zeros(batch, 4, dtype=torch.long)

    def ask() -> None:
        laid = own.lay(own.shown(own.codec.features(pixels)), own.words(ids))
        own.decoder.logits(own.hidden(laid))

    # The mark and nine codes see each other alone, and need no mask; four words are held against all.
    unmasked = work.with_(pairs=batch * (10 * 10 + 4 * 14), asked=None)
    assert cost.flops(model, unmasked) == counted(ask)
    seen = Work.planned(own.lay(own.shown(torch.randn(batch, 3, 3, 16)), own.words(ids)).plan, 14)
    assert work.pairs == seen.pairs  # the mark and nine codes see each other
    assert cost.bytes(model, work).read < cost.bytes(model, work).weights  # what draws is not read


def test_a_question_without_a_picture_is_the_decoders():
    none = ledger(read_config("mini"), context=64, pictures=0)
    with torch.device("meta"):
        decoder = Reading(read_config("mini")).model.decoder
    assert none.forward == cost.flops(decoder, Work.prefill(64)) and none.seen == 0
    assert none.parts["tower"].forward == 0 < none.parts["tower"].weights


def test_a_world_is_shown_what_it_remembers():
    config = recipe.read("genie-coinrun").model_config()
    with torch.device("meta"):
        model, own = Genie(config), Playing(config)
    one = ledger(config)
    assert one.parameters == sum(p.numel() for p in model.parameters())
    memory = config.dynamics.transformer.memory
    assert one.tokens == memory * config.codec.grid[0] * config.codec.grid[1] and one.row == "video"
    assert one.forward == cost.flops(model.dynamics, model.work(memory))
    assert cost.bytes(own, own.work()).read <= sum(p.nbytes for p in model.dynamics.parameters())


def test_named_on_the_command_line(capsys):
    app = App(result_action="return_value")
    app.command("vitrail.cli.ledger:ledger", name="ledger")
    app(["ledger", "mini", "--context", "20"], exit_on_error=False)
    assert "drawing" in capsys.readouterr().out
    app(["ledger", "genie-coinrun"], exit_on_error=False)
    assert "tokens, a video" in capsys.readouterr().out
