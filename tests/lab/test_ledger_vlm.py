"""The ledger of whole vision-language models against the modules themselves, torch's counter and released sizes."""

import json
from pathlib import Path

import pytest
import torch
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import test_looking as looking
from models import test_vlm as vlm
from vitrail.backbones.fusion import DeepStackConfig, picture_plan
from vitrail.connectors import MergerConfig
from vitrail.encoders import HybridConfig, SAMConfig
from vitrail.encoders.towers import TowerConfig, TowersConfig
from vitrail.errors import ConfigError
from vitrail.hub import save
from vitrail.lab.ledger import LENGTHS, ledger
from vitrail.models.looking import LookingVLM
from vitrail.models.presets import SYSTEMS
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import Work, cost
from vitrail.processing.resolution import Framed, Native
from vitrail.stream import Rules, build, pack, words


def counted(call) -> int:
    # torch's counter has no entry for the fused CPU kernel, so it would count attention as free.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


# ---- presets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_parts_are_the_whole(name):
    """Parameters and weights of the module as it is; FLOPs and cache add up."""
    config = SYSTEMS[name]
    with torch.device("meta"):
        model = (VLM if isinstance(config, VLMConfig) else LookingVLM)(config)
    one = ledger(name, context=64, devices=["h200"])
    parts = one.parts.values()
    assert one.parameters == sum(p.numel() for p in model.parameters()) == sum(part.parameters for part in parts)
    assert one.weights == 2 * one.parameters == sum(part.weights for part in parts)
    assert one.forward == sum(part.forward for part in parts)
    assert one.cache[one.tokens] == sum(part.cache for part in parts) == one.parts["decoder"].cache
    (floor,) = one.floors
    for kind in ("compute", "memory"):
        whole, each = getattr(floor.forward, kind), [getattr(time, kind) for time in floor.parts.values()]
        assert whole == pytest.approx(sum(each)) and min(each) > 0
    assert floor.decode[one.tokens].bound == "memory"
    assert sorted(one.cache) == sorted({one.tokens, *LENGTHS})


def test_llava_by_hand():
    """LLaVA-1.5-7B: 23 of CLIP-L's 24 blocks over 577 tokens, a projector of two layers, and Llama-2-7B."""
    one = ledger("llava-1.5-7b", context=64)
    block = 4 * 1024**2 + 2 * 1024 * 4096
    tower = 2 * 23 * block * 577 + 23 * 4 * 1024 * 577**2 + 2 * 588 * 1024 * 576
    assert (one.seen, one.tokens) == (576, 640)
    assert one.parts["tower"].forward == tower
    assert one.parts["connector"].forward == 2 * 576 * (1024 * 4096 + 4096**2)
    assert one.parts["decoder"].forward == ledger("llama-2-7b", context=640).forward
    assert one.decode == ledger("llama-2-7b", context=640).decode
    assert one.train == 3 * (tower + one.parts["connector"].forward) + 640 * ledger("llama-2-7b", context=640).train


def test_pictures_are_paid_for():
    none, one, two = (ledger("qwen2.5-vl-7b", context=64, pictures=n) for n in range(3))
    assert (none.seen, one.seen, two.seen) == (0, 391, 782)  # 644 × 476 pixels, tokens of 28 × 28
    assert none.forward == ledger("qwen2.5-7b", context=64).forward
    assert two.parts["tower"].forward == 2 * one.parts["tower"].forward > none.parts["tower"].forward == 0
    large = ledger("qwen2.5-vl-7b", context=64, picture=(960, 1280))
    assert large.parts["tower"].forward > 4 * one.parts["tower"].forward
    # A row more is read with the same weights.
    batch = ledger("qwen2.5-vl-7b", context=64, batch=8).floors[0]
    assert batch.forward.compute == pytest.approx(8 * one.floors[0].forward.compute)
    assert batch.forward.memory < 1.1 * one.floors[0].forward.memory


def test_a_picture_beside_the_stream_costs_no_tokens():
    one = ledger("llama-3.2-11b-vision", context=64)
    assert (one.tokens, one.seen) == (65, 2 * 1601)  # one tile high, two wide
    text = ledger("llama-3.2-11b-vision", context=65, pictures=0)
    kept = 8 * 2 * 8 * 128 * 2 * one.seen
    assert one.cache[65] == text.cache[65] + kept and one.cache[8192] == text.cache[8192] + kept
    assert text.parts["decoder"].forward == ledger("llama-3.1-8b", context=65).forward


def test_of_many_pictures_the_last_is_looked_at_and_all_are_kept():
    one, three = (ledger("idefics-9b", context=64, pictures=n, devices=()) for n in (1, 3))
    assert three.seen == 3 * 64
    assert three.decode - one.decode == 2 * 4 * 4096 * 32  # two words more before it
    kept = 8 * 2 * 4096 * 2 * 64
    assert three.cache[8192] - one.cache[8192] == 2 * kept


def test_experts_of_pictures_are_read_with_a_picture_alone():
    """CogVLM's second set of weights adds no product, and a word does not read it."""
    one, plain = ledger("cogvlm-17b", context=64), ledger("llama-2-7b", context=64 + 1225)
    assert one.parts["decoder"].forward == plain.forward
    time, word = one.floors[0].decode[1289].memory, plain.floors[0].decode[1289].memory
    assert time == pytest.approx(word)
    assert one.floors[0].parts["decoder"].memory > 1.9 * word


# ---- torch's counter --------------------------------------------------------------------------------------------


def seeing(**more) -> VLMConfig:
    return VLMConfig(**{"tower": vlm.TOWER, "decoder": vlm.DECODER, "policy": vlm.POLICIES["naive"], **more})


MERGER = MergerConfig(reads=16, gives=32, order="blocks")
NATIVE = {"policy": Native(patch=4, min_pixels=64, max_pixels=1024), "rules": Rules(positions="qwen3-vl")}
TAPPED = {
    "tower": vlm.PACKED.with_(taps=(1, 2)),
    "stack": MERGER.with_(norm_at="after"),
    "decoder": vlm.TURNED.with_(fusion=DeepStackConfig(at=(0, 1))),
}
BOTH = TowersConfig(towers=(TowerConfig(vit=vlm.TOWER, layer=-2), TowerConfig(vit=vlm.TOWER)), image=24)
FINE = SAMConfig(layers=2, block=vlm.TOWER.block, image=35, patch=5, window=2, full=(0,), gives=3)
TWICE = {
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "tower": HybridConfig(low=TowerConfig(vit=vlm.TOWER, layer=-2), high=FINE),
    "policy": Framed(size=24, patch=vlm.TOWER.patch, fine=35),
    "connector": vlm.PROJECTOR.with_(reads=28, apart=(12, 16)),
}
SEEING = {
    **{name: seeing(connector=connector, layer=-2) for name, connector in vlm.CONNECTORS.items()},
    "last layer": seeing(connector=vlm.PROJECTOR),
    "prefix": seeing(connector=vlm.CONNECTORS["resampler"], prefix=True, layer=1),
    "newlines": seeing(connector=vlm.PROJECTOR, policy=vlm.POLICIES["anyres"], newline=True),
    "towers": seeing(connector=vlm.PROJECTOR.with_(reads=32), tower=BOTH, mean=(0.0,) * 3, std=(1.0,) * 3),
    "twice": seeing(**TWICE),
    "packed": seeing(connector=MERGER, **NATIVE, tower=vlm.PACKED, decoder=vlm.TURNED),
    "deepstack": seeing(connector=MERGER, **NATIVE, **TAPPED),
    "expert": seeing(connector=vlm.PROJECTOR, decoder=vlm.DECODER.with_(fusion=vlm.FUSIONS["expert"])),
}


def unmasked(work, **more):
    """Masked pairs are computed too where nothing is fused, and all logits are asked for."""
    tower, connector = work.looks
    return work.with_(pairs=work.tokens**2 // work.rows, asked=None, looks=(tower.with_(**more), connector))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", SEEING)
def test_flops_are_those_of_torch(kind, batch):
    model = vlm.made(SEEING[kind])
    shown = model.prepare(vlm.pictures(*[(30, 50)] * batch))
    streams = [build([words([1, 2]), model.config.part(one), words([3])], model.config.rules) for one in shown.shapes]
    rows = pack(streams, len(streams[0]))
    assert len(rows.ids) == batch
    work = model.work([(30, 50)], 3, batch)
    assert work.tokens == rows.ids.numel()
    assert cost.flops(model, unmasked(work)) == counted(lambda: model(rows, shown))
    held = cost.bytes(model, work)
    assert held.weights == sum(p.nbytes for p in model.parameters())
    assert held.cache == work.tokens * 2 * 32 * 4 * model.config.decoder.layers


def test_what_is_spared_is_not_read():
    """Read at the last block but one, a tower leaves that block and its norm alone; a word leaves all of it alone."""
    model = vlm.made(SEEING["projector"])
    work = model.work([(24, 24)], 3)
    spared = sum(p.nbytes for part in (model.tower.blocks[-1], model.tower.norm_last) for p in part.parameters())
    unread = model.decoder.embed.weight.nbytes * (50 - work.tokens) // 50
    held, word = cost.bytes(model, work), cost.bytes(model, Work.decode(9))
    assert held.weights - held.read == spared + unread
    assert word.read == cost.bytes(model.decoder, Work.decode(9)).read


@pytest.mark.parametrize("kind", looking.KINDS)
def test_flops_of_those_that_look(kind):
    model = looking.model(kind)
    one = looking.KINDS[kind].tower
    tiled = hasattr(one, "tiles")
    size = (4, 8) if tiled else (9, 9)
    views = looking.pictures(kind, 2)
    views = views._replace(ratios=[(1, 2)] * 2) if tiled else views
    rows = looking.batch("×ab", "×ba")
    work = model.work([size], 2, 2)
    every = {"pairs": 2 * (one.tiles * one.filled) ** 2} if tiled else {}
    assert not tiled or work.looks[0].pairs < every["pairs"]
    assert cost.flops(model, unmasked(work, **every)) == counted(lambda: model(rows, views))

    cache = model.decoder.cache(2, 4)
    model.hidden(rows, views, cache=cache)
    step = model.step(4, [size], 2)
    assert cost.flops(model, step) == counted(lambda: model.decoder(torch.ones(2, 1, dtype=torch.long), cache=cache))
    kept = sum(k.nbytes + v.nbytes for k, v in cache.context.kept)
    text = 2 * 2 * 12 * 4 * model.config.decoder.layers  # of one token in both rows
    assert cost.bytes(model, step).cache == kept + 4 * text
    assert cost.bytes(model, work).cache == kept + 3 * text


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=4), more=st.integers(1, 5)
)
def test_who_sees_what(sizes, more):
    """Pictures first, then words: as many pairs as the plan of the model allows."""
    for kind in ("llama", "flamingo"):
        with torch.device("meta"):
            model = LookingVLM(looking.KINDS[kind])
        work = model.work(sizes, more)
        counts = torch.tensor([model.work([size], more).context for size in sizes])
        assert work.context == int(counts.sum())
        marks = torch.tensor([[True] * len(sizes) + [False] * more])
        seen = picture_plan(marks, counts, joined=model.config.joined).mask(
            marks.shape[1], work.context, torch.device("cpu")
        )
        assert work.context_pairs == int(seen.sum())
        assert model.step(work.tokens + 1, sizes).context_pairs == int(seen[0, 0, -1].sum())


def test_pictures_read_both_ways_have_more_pairs():
    config = SEEING["last layer"]
    causal, both = (VLM(config.with_(rules=Rules(both=kinds))).work([(24, 24)], 5) for kinds in ((), ("image",)))
    stream = build([words([1]), config.part(config.policy.cut(24, 24)), words([2] * 4)], Rules(both=("image",)))
    plan = pack([stream], len(stream)).plan()
    assert both.pairs == Work.planned(plan, len(stream)).pairs > causal.pairs


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    app = App(result_action="return_value")
    app.command("vitrail.cli.ledger:ledger", name="ledger")

    def call(*words) -> str:
        app(["ledger", *map(str, words)], exit_on_error=False)
        return capsys.readouterr().out

    return call


def test_a_column_each_with_its_own_tokens(run, tmp_path):
    names = ["qwen3-vl-8b", "llama-3.2-11b-vision"]
    out = run(*names, "--picture", "640x480", "--pictures", 2, "--context", 64, "--json", "l.json")
    shown = {line[:25].strip(): line[25:].split() for line in out.splitlines() if line[25:].strip()}
    assert shown["picture tokens"] == ["600", "6,404"]
    assert shown["tokens of the question"] == ["664", "66"]
    assert "looked at from beside it" in out
    said = json.loads((tmp_path / "l.json").read_text())["ledgers"]
    expected = [ledger(name, picture=(480, 640), pictures=2, context=64).plain() for name in names]
    assert said == json.loads(json.dumps(expected))
    assert said[0]["shown"] == [[480, 640]] * 2 and set(said[0]["parts"]) == {"tower", "connector", "decoder"}


def test_the_page_shows_what_the_command_prints(run):
    page = Path(__file__).parents[2] / "docs" / "ledger.md"
    out = run("qwen2.5-vl-7b", "llama-3.2-11b-vision", "--picture", "640x480", "--context", 64)
    assert out.split("\n\n")[0] in page.read_text()


def test_models_without_a_connector_have_a_gap(run, tmp_path):
    (tmp_path / "mine").mkdir()
    save(looking.model("idefics"), tmp_path / "mine")
    out = run("mine", "--context", 3)
    assert out.count("  connector") == out.count("–") == 4
    assert ledger(looking.KINDS["idefics"], context=3).parts.keys() == {"tower", "decoder"}


@pytest.mark.parametrize("size", ["640", "640x", "big", "640x480x3", "-1x5"])
def test_what_is_no_size(run, size):
    with pytest.raises(ConfigError, match="no size") as caught:
        run("qwen3-vl-8b", f"--picture={size}")
    assert "640x480" in caught.value.remedy


def test_pictures_below_nothing(run):
    with pytest.raises(ConfigError, match="no work"):
        run("qwen3-vl-8b", "--pictures", -1)


def test_a_context_that_is_too_long_is_said(run):
    assert "cogvlm-17b was made for 2,048 tokens, not 3,225" in run("cogvlm-17b", "--context", 2000)
