"""Vision-language model with VoCo tokens: text attends to them instead of the image."""

import pytest
import torch

from models.test_vlm import DECODER, PACKED, POLICIES, TOWER, TURNED, WHOLE, made, pictures
from vitrail import hub
from vitrail.backbones.fusion import VisualExpertConfig
from vitrail.connectors import FusedQueryConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.feature_reduction import VisPrunerConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.generate import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import Workload
from vitrail.processing.resolution_policies import NativePolicy
from vitrail.stream import StreamRules, build_stream, pack_streams, split_by_sample, text_part
from vitrail.stream.packing import pad_streams

VOCO = 3
CASES = {
    "plain": {},
    "expert": {"decoder": DECODER.replace(fusion=VisualExpertConfig())},
    "tiles": {"policy": POLICIES["anyres"], "newline": True},
    "reduced": {"feature_reduction": VisPrunerConfig(keep=7), "vision_feature_layer": -2},
}


def voco(case: str = "plain") -> VLM:
    return made(VLMConfig(**WHOLE | CASES[case], voco_tokens=VOCO))


def streams(model: VLM, shown) -> list:
    """An image and text; and an image, text, another image and text."""
    parts = [model.config.make_parts(shape) for shape in shown.layouts]
    one = [text_part([1, 2]), *parts[0], text_part([7, 8, 9])]
    two = [text_part([4]), *parts[1], text_part([5, 6]), *parts[2], text_part([3, 2])]
    return [build_stream(own, model.config.rules) for own in (one, two)]


@pytest.mark.parametrize("case", CASES)
def test_text_reaches_images_through_voco_only(case):
    """Packed samples equal single ones. Gradients reach the pixels only through the VoCo tokens."""
    model = voco(case)
    shown = model.prepare_images(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    assert len(mine[0]) == 5 + model.config.count_tokens(shown.layouts[0])
    batch = pack_streams(mine, sum(map(len, mine)))
    pixels = shown.pixels.requires_grad_()
    logits = split_by_sample(batch, model(batch, shown))
    alone = model(pack_streams(mine[:1], len(mine[0])), model.prepare_images(pictures((30, 50))))[0]
    assert torch.allclose(logits[0], alone, atol=1e-4)
    (gradient,) = torch.autograd.grad(logits[0][-1].square().sum(), pixels)
    views = len(shown.layouts[0].views)
    assert gradient[:views].any() and not gradient[views:].any()
    result = [
        build_stream(
            [text_part([1]), model.config._make_image_part(shown.layouts[0]), text_part([7])], model.config.rules
        )
    ]
    silent = model(
        pack_streams(result, len(result[0])), shown._replace(pixels=pixels[:views], layouts=shown.layouts[:1])
    )
    last = silent[0, -1].square().sum()
    assert not torch.autograd.grad(last, pixels, allow_unused=True)[0][:views].any()


@pytest.mark.parametrize("case", CASES)
def test_dropping_image_keys_changes_nothing(case):
    """Prefill rows of unequal length, drop image keys and values, and decode: logits equal those of one full pass."""
    model = voco(case)
    shown = model.prepare_images(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    cache = model.decoder.make_cache(2)
    batch = pad_streams(mine)
    hidden = model.forward_hidden(batch, shown, cache=cache)
    given = [
        sum(model.config.count_connector_tokens(shape) for shape in own)
        for own in (shown.layouts[:1], shown.layouts[1:])
    ]
    assert cache.lengths.tolist() == [len(one) - n for one, n in zip(mine, given, strict=True)]
    assert cache.max_row_length == max(cache.lengths.tolist()) < cache.capacity <= max(64, cache.max_row_length)
    found = [hidden[torch.arange(2), torch.tensor(batch.lengths) - 1]]
    places = torch.tensor([[int(one.positions.max()) + 1] for one in mine])
    more = [[11, 12, 13], [21, 22, 23]]
    for n in range(3):
        ids = torch.tensor([[own[n]] for own in more])
        found.append(model.decoder.forward_hidden(ids, positions=places + n, cache=cache)[:, 0])
    parts = [model.config.make_parts(shape) for shape in shown.layouts]
    one = [text_part([1, 2]), *parts[0], text_part([7, 8, 9, *more[0]])]
    two = [text_part([4]), *parts[1], text_part([5, 6]), *parts[2], text_part([3, 2, *more[1]])]
    whole = [build_stream(own, model.config.rules) for own in (one, two)]
    packed = pack_streams(whole, sum(map(len, whole)))
    wanted = split_by_sample(packed, model.forward_hidden(packed, shown))
    for b in range(2):
        for n in range(4):
            assert torch.allclose(found[n][b], wanted[b][len(mine[b]) - 1 + n], atol=1e-5)


def test_generation_equals_full_passes():
    model = voco()
    shown = model.prepare_images(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    output = [one.ids for one in generate_from_streams(model, mine, shown, max_new_tokens=4, sampling=GREEDY)]
    for b, own in enumerate((shown.layouts[:1], shown.layouts[1:])):
        views = slice(0, 1) if b == 0 else slice(1, 3)
        ids: list[int] = []
        for _ in range(4):
            parts = [model.config.make_parts(shape) for shape in own]
            lead = [text_part([1, 2]), *parts[0], text_part([7, 8, 9, *ids])] if b == 0 else \
                [text_part([4]), *parts[0], text_part([5, 6]), *parts[1], text_part([3, 2, *ids])]  # fmt: skip
            stream = build_stream(lead, model.config.rules)
            logits = model(pack_streams([stream], len(stream)), shown._replace(pixels=shown.pixels[views], layouts=own))
            ids.append(int(logits[0, -1].argmax()))
        assert output[b] == ids


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", ["plain", "expert", "reduced"])
def test_fixed_shape_training_equals_the_model(case, apart):
    """Rows of one shape, and independent turns, each as if it were asked alone."""
    model = voco(case)
    shown = model.prepare_images(pictures((24, 24), (24, 24)))
    ids = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    starts = [0, 0, 0, 3, 3, 3]
    template = model.make_row_template([3], 6)
    since = torch.tensor([starts, starts]) if apart else None
    found = model.forward_rows(template, shown.pixels, ids, None, since)
    for b, shape in enumerate(shown.layouts):
        own = shown._replace(pixels=shown.pixels[b : b + 1], layouts=(shape,))
        for first, last in ((0, 3), (3, 6)) if apart else ((0, 6),):
            stream = build_stream(
                [text_part([3]), *model.config.make_parts(shape), text_part(ids[b, first:last])], model.config.rules
            )
            wanted = model.forward_hidden(pack_streams([stream], len(stream)), own)[0, -(last - first) :]
            assert torch.allclose(found[b, first:last], wanted, atol=1e-5)
    assert template.prefix_length == 1 + model.config.count_tokens(shown.layouts[0])
    (gradient,) = torch.autograd.grad(found.square().sum(), model.voco)
    assert gradient.any(1).all()


def test_costs():
    """Compare pairs and cached tokens with the plan's mask and the cache."""
    model = voco()
    shown = model.prepare_images(pictures((30, 50), (24, 24)))
    parts = [one for shape in shown.layouts for one in model.config.make_parts(shape)]
    stream = build_stream([*parts, text_part([1, 2, 3])], model.config.rules)
    from vitrail.stream.voco_plan import voco_groups, voco_plan

    plan = voco_plan(voco_groups(stream.kinds[None] == 1, stream.kinds[None] == 4))
    work, sizes = model.workload([(30, 50), (24, 24)], 3, 2), [(30, 50), (24, 24)]
    assert work.attention_pairs == Workload.from_plan(plan, len(stream), 2).attention_pairs and work.tokens == 2 * len(
        stream
    )
    cache = model.decoder.make_cache(1)
    model.forward_hidden(pack_streams([stream], len(stream)), shown, cache=cache)
    assert work.cached_tokens == 2 * int(cache.lengths[0]) == 2 * (2 * VOCO + 3)
    assert model.decode_step_workload(len(stream) + 1, sizes) == Workload.decode(2 * VOCO + 4)
    assert sum(component.parameters for component in model.cost_components(work).values()) == sum(
        p.numel() for p in model.parameters()
    )


def test_invalid_configs_raise(tmp_path):
    fused = FusedQueryConfig(
        in_features=16,
        out_features=32,
        vocab_size=50,
        first_queries=5,
        layers=2,
        width=24,
        heads=2,
        intermediate_size=32,
    )
    between = {"connector": ProjectorConfig(in_features=16, out_features=16), "queries": fused}
    merger = MergerConfig(in_features=16, out_features=32, order="blocks")
    native = {"tower": PACKED, "connector": merger, "decoder": TURNED, "policy": NativePolicy(patch_size=4)}
    for change in (between, native, {"rules": StreamRules(bidirectional=("image",))}):
        with pytest.raises(ConfigError, match="voco_tokens = 0"):
            VLMConfig(**WHOLE | change, voco_tokens=VOCO)
    with pytest.raises(ConfigError, match="voco_tokens is -1"):
        VLMConfig(**WHOLE, voco_tokens=-1)
    with pytest.raises(ConfigError, match="make_parts"):
        voco().config.make_part(POLICIES["naive"].layout(1, 1))
    with pytest.raises(CheckpointError, match="VoCo tokens"):
        hub.to_hf(voco(), tmp_path / "hf")
    hub.save(voco(), tmp_path / "ours")
    assert torch.equal(hub.load(tmp_path / "ours").voco, voco().voco)
    assert TOWER.grid_size**2 + VOCO == voco().config.count_tokens(POLICIES["naive"].layout(1, 1))
