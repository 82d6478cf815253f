"""A vision-language model in which a few learned tokens stand for each picture: text sees them and not the picture."""

import pytest
import torch

from models.test_vlm import DECODER, PACKED, POLICIES, TOWER, TURNED, WHOLE, made, pictures
from vitrail import hub
from vitrail.backbones.fusion import ExpertConfig
from vitrail.connectors import FusedConfig, MergerConfig, ProjectorConfig
from vitrail.connectors.reduce import VisPrunerConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.generate import GREEDY
from vitrail.generate.seen import write
from vitrail.models.rows import Rows
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import Work
from vitrail.processing.resolution import Native
from vitrail.stream import Rules, build, pack, split, words
from vitrail.stream.pack import rows

VOCO = 3
CASES = {
    "plain": {},
    "expert": {"decoder": DECODER.with_(fusion=ExpertConfig())},
    "tiles": {"policy": POLICIES["anyres"], "newline": True},
    "reduced": {"reduce": VisPrunerConfig(keep=7), "layer": -2},
}


def voco(case: str = "plain") -> VLM:
    return made(VLMConfig(**WHOLE | CASES[case], voco=VOCO))


def streams(model: VLM, shown) -> list:
    """A picture and words behind it; a picture, words, another and words."""
    parts = [model.config.parts(shape) for shape in shown.shapes]
    one = [words([1, 2]), *parts[0], words([7, 8, 9])]
    two = [words([4]), *parts[1], words([5, 6]), *parts[2], words([3, 2])]
    return [build(own, model.config.rules) for own in (one, two)]


@pytest.mark.parametrize("case", CASES)
def test_text_reaches_pictures_through_what_stands_for_them(case):
    """Packed in one row as alone. With the learned tokens' own path closed no gradient is left to the pixels, and it is
    open otherwise."""
    model = voco(case)
    shown = model.prepare(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    assert len(mine[0]) == 5 + model.config.tokens(shown.shapes[0])
    batch = pack(mine, sum(map(len, mine)))
    pixels = shown.pixels.requires_grad_()
    logits = split(batch, model(batch, shown))
    alone = model(pack(mine[:1], len(mine[0])), model.prepare(pictures((30, 50))))[0]
    assert torch.allclose(logits[0], alone, atol=1e-4)
    (gradient,) = torch.autograd.grad(logits[0][-1].square().sum(), pixels)
    views = len(shown.shapes[0].views)
    assert gradient[:views].any() and not gradient[views:].any()
    told = [build([words([1]), model.config._picture(shown.shapes[0]), words([7])], model.config.rules)]
    silent = model(pack(told, len(told[0])), shown._replace(pixels=pixels[:views], shapes=shown.shapes[:1]))
    last = silent[0, -1].square().sum()
    assert not torch.autograd.grad(last, pixels, allow_unused=True)[0][:views].any()


@pytest.mark.parametrize("case", CASES)
def test_dropping_the_picture_changes_nothing(case):
    """Rows of unequal length, prefilled, their pictures' keys and values dropped, and then read on word by word: the
    logits are those of one pass over all of it, in which the pictures are all there."""
    model = voco(case)
    shown = model.prepare(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    cache = model.decoder.cache(2)
    batch = rows(mine)
    hidden = model.hidden(batch, shown, cache=cache)
    given = [sum(model.config.given(shape) for shape in own) for own in (shown.shapes[:1], shown.shapes[1:])]
    assert cache.lengths.tolist() == [len(one) - n for one, n in zip(mine, given, strict=True)]
    assert cache.filled == max(cache.lengths.tolist()) < cache.capacity <= max(64, cache.filled)
    found = [hidden[torch.arange(2), torch.tensor(batch.lengths) - 1]]
    places = torch.tensor([[int(one.positions.max()) + 1] for one in mine])
    more = [[11, 12, 13], [21, 22, 23]]
    for n in range(3):
        ids = torch.tensor([[own[n]] for own in more])
        found.append(model.decoder.hidden(ids, positions=places + n, cache=cache)[:, 0])
    parts = [model.config.parts(shape) for shape in shown.shapes]
    one = [words([1, 2]), *parts[0], words([7, 8, 9, *more[0]])]
    two = [words([4]), *parts[1], words([5, 6]), *parts[2], words([3, 2, *more[1]])]
    whole = [build(own, model.config.rules) for own in (one, two)]
    packed = pack(whole, sum(map(len, whole)))
    wanted = split(packed, model.hidden(packed, shown))
    for b in range(2):
        for n in range(4):
            assert torch.allclose(found[n][b], wanted[b][len(mine[b]) - 1 + n], atol=1e-5)


def test_what_it_writes_is_what_whole_passes_say():
    model = voco()
    shown = model.prepare(pictures((30, 50), (24, 24), (61, 33)))
    mine = streams(model, shown)
    said = [one.ids for one in write(model, mine, shown, max_new=4, sampling=GREEDY)]
    for b, own in enumerate((shown.shapes[:1], shown.shapes[1:])):
        views = slice(0, 1) if b == 0 else slice(1, 3)
        ids: list[int] = []
        for _ in range(4):
            parts = [model.config.parts(shape) for shape in own]
            lead = [words([1, 2]), *parts[0], words([7, 8, 9, *ids])] if b == 0 else \
                [words([4]), *parts[0], words([5, 6]), *parts[1], words([3, 2, *ids])]  # fmt: skip
            stream = build(lead, model.config.rules)
            logits = model(pack([stream], len(stream)), shown._replace(pixels=shown.pixels[views], shapes=own))
            ids.append(int(logits[0, -1].argmax()))
        assert said[b] == ids


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", ["plain", "expert", "reduced"])
def test_training_reads_what_the_model_reads(case, apart):
    """Rows of one shape, and turns that know nothing of each other, each as if it alone were asked."""
    model = voco(case)
    shown = model.prepare(pictures((24, 24), (24, 24)))
    ids = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    starts = [0, 0, 0, 3, 3, 3]
    grid = Rows(model, [3], 6)
    since = torch.tensor([starts, starts]) if apart else None
    found = grid.hidden(grid.frame(torch.device("cpu")), shown.pixels, ids, None, since)
    for b, shape in enumerate(shown.shapes):
        own = shown._replace(pixels=shown.pixels[b : b + 1], shapes=(shape,))
        for first, last in ((0, 3), (3, 6)) if apart else ((0, 6),):
            stream = build([words([3]), *model.config.parts(shape), words(ids[b, first:last])], model.config.rules)
            wanted = model.hidden(pack([stream], len(stream)), own)[0, -(last - first) :]
            assert torch.allclose(found[b, first:last], wanted, atol=1e-5)
    assert grid.before == 1 + model.config.tokens(shown.shapes[0])
    (gradient,) = torch.autograd.grad(found.square().sum(), model.voco)
    assert gradient.any(1).all()


def test_costs_are_counted_as_seen():
    """Pairs and what is kept, against the plan's own mask and the cache."""
    model = voco()
    shown = model.prepare(pictures((30, 50), (24, 24)))
    parts = [one for shape in shown.shapes for one in model.config.parts(shape)]
    stream = build([*parts, words([1, 2, 3])], model.config.rules)
    from vitrail.connectors.voco import voco_groups, voco_plan

    plan = voco_plan(voco_groups(stream.kinds[None] == 1, stream.kinds[None] == 4))
    work, sizes = model.work([(30, 50), (24, 24)], 3, 2), [(30, 50), (24, 24)]
    assert work.pairs == Work.planned(plan, len(stream), 2).pairs and work.tokens == 2 * len(stream)
    cache = model.decoder.cache(1)
    model.hidden(pack([stream], len(stream)), shown, cache=cache)
    assert work.held == 2 * int(cache.lengths[0]) == 2 * (2 * VOCO + 3)
    assert model.step(len(stream) + 1, sizes) == Work.decode(2 * VOCO + 4)
    assert sum(leg.parameters for leg in model.legs(work).values()) == sum(p.numel() for p in model.parameters())


def test_what_does_not_fit_is_refused(tmp_path):
    fused = FusedConfig(reads=16, gives=32, vocab=50, first=5, layers=2, width=24, heads=2, hidden=32)
    between = {"connector": ProjectorConfig(reads=16, gives=16), "queries": fused}
    merger = MergerConfig(reads=16, gives=32, order="blocks")
    native = {"tower": PACKED, "connector": merger, "decoder": TURNED, "policy": Native(patch=4)}
    for change in (between, native, {"rules": Rules(both=("image",))}):
        with pytest.raises(ConfigError, match="leave voco out"):
            VLMConfig(**WHOLE | change, voco=VOCO)
    with pytest.raises(ConfigError, match="-1 tokens"):
        VLMConfig(**WHOLE, voco=-1)
    with pytest.raises(ConfigError, match=r"parts\(shape\)"):
        voco().config.part(POLICIES["naive"].cut(1, 1))
    with pytest.raises(CheckpointError, match="stand for a picture"):
        hub.to_hf(voco(), tmp_path / "hf")
    hub.save(voco(), tmp_path / "ours")
    assert torch.equal(hub.load(tmp_path / "ours").voco, voco().voco)
    assert TOWER.side**2 + VOCO == voco().config.tokens(POLICIES["naive"].cut(1, 1))
