"""A detector's arithmetic: what its cells say and what is read back are one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.detector import Cells, Detector, DetectorConfig, choose, iou
from vitrail.nn import AttentionConfig, BlockConfig, Work, cost
from vitrail.nn.mlp import PlainConfig
from vitrail.objectives.detection import detection_losses, targets


def config(**more) -> DetectorConfig:
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=32))
    image = ViTConfig(layers=1, block=block, image=32, patch=8)
    return DetectorConfig(**({"image": image, "concepts": ("cat", "dog", "tree"), "colours": ("", "red")} | more))


def perfect(box, filled, what, hue, grid, concepts, colours) -> Cells:
    """Cells that say exactly what the targets ask for."""
    wanted = targets(box, filled, grid)
    slot, there = wanted.owner.clamp(min=0), wanted.owner >= 0

    def logits(label, classes):
        return 20.0 * torch.nn.functional.one_hot(label.gather(1, slot), classes).float()

    return Cells(there * 20.0 - 10, wanted.box, logits(what, concepts), logits(hue, colours), grid)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 9), st.integers(2, 9))
def test_what_the_cells_are_taught_is_what_is_found(seed, objects, h, w):
    g = torch.Generator().manual_seed(seed)
    centre, size = torch.rand(2, objects, 2, generator=g), 0.02 + 0.5 * torch.rand(2, objects, 2, generator=g)
    box = torch.cat([centre - size / 2, centre + size / 2], -1)
    filled = torch.rand(2, objects, generator=g) < 0.8
    what, hue = torch.randint(0, 3, (2, objects), generator=g), torch.randint(0, 2, (2, objects), generator=g)
    cells = perfect(box, filled, what, hue, (h, w), 3, 2)
    found = choose(cells, 0.5, 2.0, h * w)
    for b in range(2):
        owners = {int(o) for o in targets(box, filled, (h, w)).owner[b] if o >= 0}
        assert int(found.count[b]) == len(owners) and owners <= set(filled[b].nonzero()[:, 0].tolist())
        cell = {o: (int(centre[b, o, 1] * h), int(centre[b, o, 0] * w)) for o in range(objects) if filled[b, o]}
        assert owners == {max(o for o in cell if cell[o] == c) for c in cell.values()}  # the later of two
        got = sorted((int(c), int(k), *[round(x, 3) for x in r]) for c, k, r in zip(
            found.concept[b, : len(owners)], found.colour[b], found.box[b].tolist(), strict=False))  # fmt: skip
        want = sorted((int(what[b, o]), int(hue[b, o]), *[round(x, 3) for x in box[b, o].tolist()]) for o in owners)
        assert [x[:2] for x in got] == [x[:2] for x in want]
        torch.testing.assert_close(
            torch.tensor([x[2:] for x in got]), torch.tensor([x[2:] for x in want]), atol=2e-3, rtol=0
        )
    losses = detection_losses(*cells[:4], targets(box, filled, (h, w)), what, hue)
    assert all(float(loss) < 1e-2 for loss in losses.values())


def test_the_surer_of_two_on_one_place_stays():
    cells = Cells(
        torch.tensor([[3.0, 2.0, -9.0, 1.0]]),
        torch.tensor([[[0.5, 0.5, 0, 0], [-0.5, 0.5, 0, 0], [0, 0, 0, 0], [0.0, 0.0, 0, 0]]]),
        torch.zeros(1, 4, 3),
        torch.zeros(1, 4, 2),
        (2, 2),
    )  # the first two cells mean the same box
    found = choose(cells, 0.5, 0.6, 4)
    assert found.count.tolist() == [2]
    assert torch.allclose(found.score[0, :2], torch.tensor([3.0, 1.0]).sigmoid())
    assert found.concept[0, 2:].tolist() == [-1, -1]


def test_overlap_is_that_of_plain_rectangles():
    a = torch.tensor([[[0.0, 0.0, 2.0, 2.0]]])
    b = torch.tensor([[[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]]])
    assert torch.allclose(iou(a, b), torch.tensor([[[1 / 7, 1.0, 0.0]]]))


def test_it_learns_one_picture_at_any_size():
    torch.manual_seed(0)
    model = Detector(config())
    box, filled = torch.tensor([[[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.8]]]), torch.ones(1, 2, dtype=torch.bool)
    what, hue = torch.tensor([[0, 2]]), torch.tensor([[1, 0]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    pixels = torch.randn(1, 3, 32, 48)
    for _ in range(60):
        cells = model(pixels)
        loss = sum(detection_losses(*cells[:4], targets(box, filled, cells.grid), what, hue).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = model.find(pixels)
    assert found.count.tolist() == [2] and sorted(found.concept[0, :2].tolist()) == [0, 2]
    assert float(iou(found.box, box).amax(1).min()) > 0.7
    assert model.find(torch.randn(2, 3, 64, 64)).score.shape == (2, 32)
    assert cost.flops(model, Work.full(16)) > 0


def test_impossible_detectors_are_refused():
    with pytest.raises(ConfigError, match="two concepts"):
        config(concepts=("cat",))
    with pytest.raises(ConfigError, match="patches alone"):
        config(image=config().image.with_(cls=True))
