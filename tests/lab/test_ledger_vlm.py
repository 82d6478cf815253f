"""The ledger of vision-language models against their modules, torch's FLOP counter and published sizes."""

import json
from pathlib import Path

import pytest
import torch
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import test_cross_attention_vlm as cross_vlm
from models import test_vlm as vlm
from vitrail.backbones.fusion import DeepStackConfig, make_image_plan
from vitrail.connectors import MergerConfig
from vitrail.encoders import HybridTowerConfig, SAMConfig
from vitrail.encoders.multi_tower import MultiTowerConfig, TowerConfig
from vitrail.errors import ConfigError
from vitrail.hub import save
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, compute_ledger
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.presets import ALL_VLM_PRESETS
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import Workload, cost
from vitrail.processing.resolution_policies import FramedPolicy, NativePolicy
from vitrail.stream import StreamRules, build_stream, pack_streams, text_part


def counted(call) -> int:
    # torch's counter ignores the fused CPU attention kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


# ---- presets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_VLM_PRESETS)
def test_components_add_up(name):
    """Components have the parameters and weights of the modules; FLOPs and cache add up."""
    config = ALL_VLM_PRESETS[name]
    with torch.device("meta"):
        model = (VLM if isinstance(config, VLMConfig) else CrossAttentionVLM)(config)
    one = compute_ledger(name, context_length=64, devices=["h200"])
    parts = one.components.values()
    assert one.parameters == sum(p.numel() for p in model.parameters()) == sum(part.parameters for part in parts)
    assert one.weight_bytes == 2 * one.parameters == sum(part.weight_bytes for part in parts)
    assert one.forward_flops == sum(part.forward_flops for part in parts)
    assert (
        one.cache_bytes[one.tokens] == sum(part.cache_bytes for part in parts) == one.components["decoder"].cache_bytes
    )
    (floor,) = one.rooflines
    for kind in ("compute", "memory"):
        whole, each = getattr(floor.forward, kind), [getattr(time, kind) for time in floor.components.values()]
        assert whole == pytest.approx(sum(each)) and min(each) > 0
    assert floor.decode[one.tokens].bound == "memory"
    assert sorted(one.cache_bytes) == sorted({one.tokens, *CONTEXT_LENGTHS})


def test_llava_matches_a_manual_computation():
    """LLaVA-1.5-7B: 23 of CLIP-L's 24 blocks over 577 tokens, a projector of two layers, and Llama-2-7B."""
    one = compute_ledger("llava-1.5-7b", context_length=64)
    block = 4 * 1024**2 + 2 * 1024 * 4096
    tower = 2 * 23 * block * 577 + 23 * 4 * 1024 * 577**2 + 2 * 588 * 1024 * 576
    assert (one.image_tokens, one.tokens) == (576, 640)
    assert one.components["tower"].forward_flops == tower
    assert one.components["connector"].forward_flops == 2 * 576 * (1024 * 4096 + 4096**2)
    assert one.components["decoder"].forward_flops == compute_ledger("llama-2-7b", context_length=640).forward_flops
    assert one.decode_flops == compute_ledger("llama-2-7b", context_length=640).decode_flops
    assert (
        one.training_flops
        == 3 * (tower + one.components["connector"].forward_flops)
        + 640 * compute_ledger("llama-2-7b", context_length=640).training_flops
    )


def test_images_add_tokens_and_cost():
    none, one, two = (compute_ledger("qwen2.5-vl-7b", context_length=64, num_images=n) for n in range(3))
    assert (none.image_tokens, one.image_tokens, two.image_tokens) == (
        0,
        391,
        782,
    )  # 644 × 476 pixels, tokens of 28 × 28
    assert none.forward_flops == compute_ledger("qwen2.5-7b", context_length=64).forward_flops
    assert (
        two.components["tower"].forward_flops
        == 2 * one.components["tower"].forward_flops
        > none.components["tower"].forward_flops
        == 0
    )
    large = compute_ledger("qwen2.5-vl-7b", context_length=64, image_size=(960, 1280))
    assert large.components["tower"].forward_flops > 4 * one.components["tower"].forward_flops
    # Another row reads the same weights.
    batch = compute_ledger("qwen2.5-vl-7b", context_length=64, batch_size=8).rooflines[0]
    assert batch.forward.compute == pytest.approx(8 * one.rooflines[0].forward.compute)
    assert batch.forward.memory < 1.1 * one.rooflines[0].forward.memory


def test_cross_attended_image_adds_no_tokens():
    one = compute_ledger("llama-3.2-11b-vision", context_length=64)
    assert (one.tokens, one.image_tokens) == (65, 2 * 1601)  # one tile high, two wide
    text = compute_ledger("llama-3.2-11b-vision", context_length=65, num_images=0)
    kept = 8 * 2 * 8 * 128 * 2 * one.image_tokens
    assert one.cache_bytes[65] == text.cache_bytes[65] + kept and one.cache_bytes[8192] == text.cache_bytes[8192] + kept
    assert text.components["decoder"].forward_flops == compute_ledger("llama-3.1-8b", context_length=65).forward_flops


def test_only_the_last_image_is_attended_and_all_are_cached():
    one, three = (compute_ledger("idefics-9b", context_length=64, num_images=n, devices=()) for n in (1, 3))
    assert three.image_tokens == 3 * 64
    assert three.decode_flops - one.decode_flops == 2 * 4 * 4096 * 32  # two more text tokens before it
    kept = 8 * 2 * 4096 * 2 * 64
    assert three.cache_bytes[8192] - one.cache_bytes[8192] == 2 * kept


def test_visual_expert_weights_are_read_for_images_only():
    """CogVLM's visual experts add no FLOPs, and text tokens do not read them."""
    one, plain = compute_ledger("cogvlm-17b", context_length=64), compute_ledger("llama-2-7b", context_length=64 + 1225)
    assert one.components["decoder"].forward_flops == plain.forward_flops
    time, word = one.rooflines[0].decode[1289].memory, plain.rooflines[0].decode[1289].memory
    assert time == pytest.approx(word)
    assert one.rooflines[0].components["decoder"].memory > 1.9 * word


# ---- torch's counter --------------------------------------------------------------------------------------------


def seeing(**more) -> VLMConfig:
    return VLMConfig(**{"tower": vlm.TOWER, "decoder": vlm.DECODER, "policy": vlm.POLICIES["naive"], **more})


MERGER = MergerConfig(in_features=16, out_features=32, order="blocks")
NATIVE = {
    "policy": NativePolicy(patch_size=4, min_pixels=64, max_pixels=1024),
    "rules": StreamRules(positions="qwen3-vl"),
}
TAPPED = {
    "tower": vlm.PACKED.replace(feature_layers=(1, 2)),
    "stack": MERGER.replace(norm_position="after"),
    "decoder": vlm.TURNED.replace(fusion=DeepStackConfig(layer_indices=(0, 1))),
}
BOTH = MultiTowerConfig(towers=(TowerConfig(vit=vlm.TOWER, layer=-2), TowerConfig(vit=vlm.TOWER)), image_size=24)
FINE = SAMConfig(
    layers=2,
    block=vlm.TOWER.block,
    image_size=35,
    patch_size=5,
    window_size=2,
    full_attention_layers=(0,),
    out_features=3,
)
TWICE = {
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "tower": HybridTowerConfig(low=TowerConfig(vit=vlm.TOWER, layer=-2), high=FINE),
    "policy": FramedPolicy(image_size=24, patch_size=vlm.TOWER.patch_size, high_res_size=35),
    "connector": vlm.PROJECTOR.replace(in_features=28, split_widths=(12, 16)),
}
SEEING = {
    **{name: seeing(connector=connector, vision_feature_layer=-2) for name, connector in vlm.CONNECTORS.items()},
    "last layer": seeing(connector=vlm.PROJECTOR),
    "prefix": seeing(connector=vlm.CONNECTORS["resampler"], keep_prefix_tokens=True, vision_feature_layer=1),
    "newlines": seeing(connector=vlm.PROJECTOR, policy=vlm.POLICIES["anyres"], newline=True),
    "towers": seeing(connector=vlm.PROJECTOR.replace(in_features=32), tower=BOTH, mean=(0.0,) * 3, std=(1.0,) * 3),
    "twice": seeing(**TWICE),
    "packed": seeing(connector=MERGER, **NATIVE, tower=vlm.PACKED, decoder=vlm.TURNED),
    "deepstack": seeing(connector=MERGER, **NATIVE, **TAPPED),
    "expert": seeing(connector=vlm.PROJECTOR, decoder=vlm.DECODER.replace(fusion=vlm.FUSIONS["expert"])),
}


def unmasked(work, **more):
    """Count masked pairs too, as unfused attention does, and all logits."""
    tower, connector = work.vision_workloads
    return work.replace(
        attention_pairs=work.tokens**2 // work.sequences,
        logit_tokens=None,
        vision_workloads=(tower.replace(**more), connector),
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", SEEING)
def test_flops_match_torch(kind, batch):
    model = vlm.made(SEEING[kind])
    shown = model.prepare_images(vlm.pictures(*[(30, 50)] * batch))
    streams = [
        build_stream([text_part([1, 2]), model.config.make_part(one), text_part([3])], model.config.rules)
        for one in shown.layouts
    ]
    rows = pack_streams(streams, len(streams[0]))
    assert len(rows.ids) == batch
    work = model.workload([(30, 50)], 3, batch)
    assert work.tokens == rows.ids.numel()
    assert cost.count_flops(model, unmasked(work)) == counted(lambda: model(rows, shown))
    held = cost.count_bytes(model, work)
    assert held.weights == sum(p.nbytes for p in model.parameters())
    assert held.cache == work.tokens * 2 * 32 * 4 * model.config.decoder.layers


def test_unused_layers_are_not_read():
    """A tower read before its last block does not read that block and its norm; text tokens read no tower weights."""
    model = vlm.made(SEEING["projector"])
    work = model.workload([(24, 24)], 3)
    spared = sum(p.nbytes for part in (model.tower.blocks[-1], model.tower.norm_last) for p in part.parameters())
    unread = model.decoder.embed.weight.nbytes * (50 - work.tokens) // 50
    held, word = cost.count_bytes(model, work), cost.count_bytes(model, Workload.decode(9))
    assert held.weights - held.read == spared + unread
    assert word.read == cost.count_bytes(model.decoder, Workload.decode(9)).read


@pytest.mark.parametrize("kind", cross_vlm.KINDS)
def test_cross_attention_flops_match_torch(kind):
    model = cross_vlm.model(kind)
    one = cross_vlm.KINDS[kind].tower
    tiled = hasattr(one, "max_tiles")
    size = (4, 8) if tiled else (9, 9)
    views = cross_vlm.pictures(kind, 2)
    views = views._replace(aspect_ratios=[(1, 2)] * 2) if tiled else views
    rows = cross_vlm.batch("×ab", "×ba")
    work = model.workload([size], 2, 2)
    every = {"attention_pairs": 2 * (one.max_tiles * one.padded_tokens_per_tile) ** 2} if tiled else {}
    assert not tiled or work.vision_workloads[0].attention_pairs < every["attention_pairs"]
    assert cost.count_flops(model, unmasked(work, **every)) == counted(lambda: model(rows, views))

    cache = model.decoder.make_cache(2, 4)
    model.forward_hidden(rows, views, cache=cache)
    step = model.decode_step_workload(4, [size], 2)
    assert cost.count_flops(model, step) == counted(
        lambda: model.decoder(torch.ones(2, 1, dtype=torch.long), cache=cache)
    )
    kept = sum(k.nbytes + v.nbytes for k, v in cache.context.key_values)
    text = 2 * 2 * 12 * 4 * model.config.decoder.layers  # of one token in both rows
    assert cost.count_bytes(model, step).cache == kept + 4 * text
    assert cost.count_bytes(model, work).cache == kept + 3 * text


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=4), more=st.integers(1, 5)
)
def test_attention_pairs_match_the_plan(sizes, more):
    """Images first, then text: the pairs that the attention plan allows."""
    for kind in ("llama", "flamingo"):
        with torch.device("meta"):
            model = CrossAttentionVLM(cross_vlm.KINDS[kind])
        work = model.workload(sizes, more)
        counts = torch.tensor([model.workload([size], more).context_tokens for size in sizes])
        assert work.context_tokens == int(counts.sum())
        marks = torch.tensor([[True] * len(sizes) + [False] * more])
        seen = make_image_plan(marks, counts, join_adjacent=model.config.join_adjacent).mask(
            marks.shape[1], work.context_tokens, torch.device("cpu")
        )
        assert work.context_pairs == int(seen.sum())
        assert model.decode_step_workload(work.tokens + 1, sizes).context_pairs == int(seen[0, 0, -1].sum())


def test_bidirectional_images_have_more_pairs():
    config = SEEING["last layer"]
    causal, both = (
        VLM(config.replace(rules=StreamRules(bidirectional=kinds))).workload([(24, 24)], 5)
        for kinds in ((), ("image",))
    )
    stream = build_stream(
        [text_part([1]), config.make_part(config.policy.layout(24, 24)), text_part([2] * 4)],
        StreamRules(bidirectional=("image",)),
    )
    plan = pack_streams([stream], len(stream)).attention_plan()
    assert both.attention_pairs == Workload.from_plan(plan, len(stream)).attention_pairs > causal.attention_pairs


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    app = App(result_action="return_value")
    app.command("vitrail.cli.ledger_command:print_ledger", name="ledger")

    def call(*words) -> str:
        app(["ledger", *map(str, words)], exit_on_error=False)
        return capsys.readouterr().out

    return call


def test_each_model_has_a_column(run, tmp_path):
    names = ["qwen3-vl-8b", "llama-3.2-11b-vision"]
    out = run(*names, "--image-size", "640x480", "--num-images", 2, "--context-length", 64, "--json", "l.json")
    shown = {line[:25].strip(): line[25:].split() for line in out.splitlines() if line[25:].strip()}
    assert shown["image tokens"] == ["600", "6,404"]
    assert shown["prompt tokens"] == ["664", "66"]
    assert "image tokens of models with cross-attention are not part of the prompt" in out
    output = json.loads((tmp_path / "l.json").read_text())["ledgers"]
    expected = [
        compute_ledger(name, image_size=(480, 640), num_images=2, context_length=64).to_dict() for name in names
    ]
    assert output == json.loads(json.dumps(expected))
    assert output[0]["image_sizes"] == [[480, 640]] * 2 and set(output[0]["components"]) == {
        "tower",
        "connector",
        "decoder",
    }


def test_docs_show_the_output_of_the_command(run):
    page = Path(__file__).parents[2] / "docs" / "ledger.md"
    out = run("qwen2.5-vl-7b", "llama-3.2-11b-vision", "--image-size", "640x480", "--context-length", 64)
    assert out.split("\n\n")[0] in page.read_text()


def test_missing_components_are_blank(run, tmp_path):
    (tmp_path / "mine").mkdir()
    save(cross_vlm.model("idefics"), tmp_path / "mine")
    out = run("mine", "--context-length", 3)
    assert out.count("  connector") == out.count("–") == 4
    assert compute_ledger(cross_vlm.KINDS["idefics"], context_length=3).components.keys() == {"tower", "decoder"}


@pytest.mark.parametrize("size", ["640", "640x", "big", "640x480x3", "-1x5"])
def test_invalid_image_size_raises(run, size):
    with pytest.raises(ConfigError, match="is not a size") as caught:
        run("qwen3-vl-8b", f"--image-size={size}")
    assert "640x480" in caught.value.remedy


def test_negative_image_count_raises(run):
    with pytest.raises(ConfigError, match="invalid workload"):
        run("qwen3-vl-8b", "--num-images", -1)


def test_too_long_context_is_reported(run):
    assert "cogvlm-17b has a context of 2,048 tokens, less than 3,225" in run("cogvlm-17b", "--context-length", 2000)
