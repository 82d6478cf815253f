"""Floors against the clock, with tiny models; what is asserted is arithmetic, never a speed."""

import pytest
import torch

from models import test_looking as looking
from models import test_unified as unified
from models import test_vlm as vlm
from vitrail.backbones.decoder import Decoder
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.presets import CODECS
from vitrail.encoders.presets import TEXTS, VITS
from vitrail.errors import ConfigError
from vitrail.lab import measure as lab
from vitrail.lab.ledger import Device, ledger
from vitrail.models.clip import ContrastiveConfig
from vitrail.models.vlm import VLMConfig
from vitrail.nn import Work, cost
from worlds import genie_config

AT = Device(flops=1e9, bandwidth=1e8, memory=1e10, origin="made up")
BLOCK = VITS["clip-b16"].block
SMALL = BLOCK.with_(width=32, attention=BLOCK.attention.with_(heads=2), mlp=BLOCK.mlp.with_(hidden=48))
VIT = VITS["clip-b16"].with_(layers=2, image=32, block=SMALL)
WORDS = DECODERS["stories15m"].with_(layers=2, vocab=60)


def measured(config, **more):
    return lab.measure(config, AT, dtype="float32", **more)


def test_a_decoder_reads_and_writes():
    read, word = measured(WORDS, name="tiny", context=12, batch=2)
    assert (read.name, read.what, word.what) == ("tiny", "prefill, 12 tokens", "a token at 12")
    one = ledger(WORDS, context=12, batch=2, dtype="float32", devices=())
    assert read.flops == 2 * one.forward
    # Two steps are rehearsed and seven timed, each at a token more: the one in the middle is behind 12 + 2 + 3 others.
    with torch.device("meta"):
        assert word.flops == cost.flops(Decoder(WORDS), Work.decode(18, 2))
    for found in (read, word):
        assert found.floor == max(found.flops / AT.flops, found.bytes / AT.bandwidth)
        assert found.bound == ("compute" if found.flops / AT.flops >= found.bytes / AT.bandwidth else "memory")
        assert found.ratio == pytest.approx(found.seconds / found.floor) and found.seconds > 0


def test_no_work_is_refused():
    for more in ({"batch": 0}, {"context": 0}):
        with pytest.raises(ConfigError, match="are no work"):
            measured(WORDS, **more)


def test_towers_and_codecs():
    net = CODECS["bsq-vit-b16-28"].net
    pair = net.with_(
        encoder=net.encoder.with_(layers=1, image=32, block=SMALL),
        decoder=net.decoder.with_(layers=1, image=2, block=SMALL),
        hidden=40,
    )
    for config in (VIT, CODECS["bsq-vit-b16-28"].with_(net=pair)):
        (found,) = measured(config, batch=3)
        assert found.what == "forward" and found.flops == 3 * ledger(config, devices=()).forward


def test_a_pair():
    text = next(iter(TEXTS.values()))
    text = text.with_(
        layers=1, vocab=50, eos=49, context=7, block=text.block.with_(width=32, attention=SMALL.attention)
    )
    config = ContrastiveConfig(image=VIT, text=text, embed=16)
    (found,) = measured(config, batch=2)
    assert found.flops > 2 * ledger(VIT, devices=()).forward
    (alone,) = measured(text)
    assert alone.flops == ledger(text, devices=()).forward


def test_a_question():
    config = VLMConfig(
        tower=vlm.TOWER, decoder=vlm.DECODER, policy=vlm.POLICIES["naive"], connector=vlm.PROJECTOR, layer=-2
    )
    found, word = measured(config, context=5, picture=(30, 50), batch=2)
    assert found.what == "first token, a picture and 5 words"
    assert found.flops == 2 * ledger(config, context=5, picture=(30, 50), devices=()).forward
    assert word.what.startswith("a token at") and 0 < word.flops < found.flops


@pytest.mark.parametrize("kind", ["llama", "flamingo", "idefics", "patches"])
def test_a_question_to_one_that_looks(kind):
    config = looking.KINDS[kind]
    config = config.with_(tower=config.tower.with_(channels=3))  # of a picture, where those tests have grey ones
    found, word = measured(config, context=5, picture=(30, 50), batch=2)
    assert found.what == "first token, a picture and 5 words"
    assert found.flops == 2 * ledger(config, context=5, picture=(30, 50), devices=()).forward
    assert word.what.startswith("a token at") and 0 < word.flops < found.flops


def test_a_question_to_one_that_draws_too():
    config = unified.made(order="masked").config
    found, word = measured(config, context=5, batch=2)
    assert found.what == "first token, a picture and 5 words"
    assert found.flops == 2 * ledger(config, context=5, devices=()).forward
    assert word.what == "a token at 15"  # a mark and nine codes
    with torch.device("meta"):
        assert word.flops == cost.flops(Decoder(config.decoder), Work.decode(21, 2))


@pytest.mark.parametrize("acts", ["added", "token"])
def test_a_world(acts):
    config = genie_config(acts=acts)
    (found,) = measured(config, batch=2)
    assert found.what == f"dynamics, {config.dynamics.transformer.memory} frames"
    assert found.flops == 2 * ledger(config, devices=()).forward


def test_rates_are_those_of_what_was_timed(monkeypatch):
    monkeypatch.setitem(lab.SIZES, "cpu", (64, 2**16))
    monkeypatch.setattr(lab, "_times", lambda call, device: [call() is None or 0.5, 0.25])
    found = lab.rates("cpu", torch.float32)
    assert (found.flops, found.bandwidth) == (2 * 64**3 / 0.25, 2 * 2**16 / 0.25)
    assert found.memory > 0 and found.origin.startswith("CPU")


def test_what_is_refused_says_what_to_do():
    with pytest.raises(ConfigError, match=r"llama needs 13\.7 GB, and there are 10\.0"):
        lab.measure(DECODERS["llama-2-7b"], AT, name="llama")
