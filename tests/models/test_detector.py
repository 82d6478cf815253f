"""Detector: encoding and decoding of boxes, and selection of detections."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.detector import CellPredictions, Detector, DetectorConfig, box_iou, select_detections
from vitrail.nn import AttentionConfig, BlockConfig, Workload, cost
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.objectives.detection_loss import build_detection_targets, compute_detection_losses


def config(**more) -> DetectorConfig:
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
    image = ViTConfig(layers=1, block=block, image_size=32, patch_size=8)
    return DetectorConfig(**({"image": image, "concepts": ("cat", "dog", "tree"), "colours": ("", "red")} | more))


def perfect(box, filled, what, hue, grid, concepts, colours) -> CellPredictions:
    """Cell predictions that equal the training targets."""
    wanted = build_detection_targets(box, filled, grid)
    slot, there = wanted.object_index.clamp(min=0), wanted.object_index >= 0

    def logits(label, classes):
        return 20.0 * torch.nn.functional.one_hot(label.gather(1, slot), classes).float()

    return CellPredictions(there * 20.0 - 10, wanted.box, logits(what, concepts), logits(hue, colours), grid)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 9), st.integers(2, 9))
def test_decoding_inverts_targets(seed, objects, h, w):
    g = torch.Generator().manual_seed(seed)
    centre, size = torch.rand(2, objects, 2, generator=g), 0.02 + 0.5 * torch.rand(2, objects, 2, generator=g)
    box = torch.cat([centre - size / 2, centre + size / 2], -1)
    filled = torch.rand(2, objects, generator=g) < 0.8
    what, hue = torch.randint(0, 3, (2, objects), generator=g), torch.randint(0, 2, (2, objects), generator=g)
    cells = perfect(box, filled, what, hue, (h, w), 3, 2)
    found = select_detections(cells, 0.5, 2.0, h * w)
    for b in range(2):
        owners = {int(o) for o in build_detection_targets(box, filled, (h, w)).object_index[b] if o >= 0}
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
    losses = compute_detection_losses(*cells[:4], build_detection_targets(box, filled, (h, w)), what, hue)
    assert all(float(loss) < 1e-2 for loss in losses.values())


def test_non_maximum_suppression_keeps_the_best_box():
    cells = CellPredictions(
        torch.tensor([[3.0, 2.0, -9.0, 1.0]]),
        torch.tensor([[[0.5, 0.5, 0, 0], [-0.5, 0.5, 0, 0], [0, 0, 0, 0], [0.0, 0.0, 0, 0]]]),
        torch.zeros(1, 4, 3),
        torch.zeros(1, 4, 2),
        (2, 2),
    )  # the first two cells mean the same box
    found = select_detections(cells, 0.5, 0.6, 4)
    assert found.count.tolist() == [2]
    assert torch.allclose(found.score[0, :2], torch.tensor([3.0, 1.0]).sigmoid())
    assert found.concept[0, 2:].tolist() == [-1, -1]


def test_iou_of_rectangles():
    a = torch.tensor([[[0.0, 0.0, 2.0, 2.0]]])
    b = torch.tensor([[[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]]])
    assert torch.allclose(box_iou(a, b), torch.tensor([[[1 / 7, 1.0, 0.0]]]))


def test_overfits_one_image_at_any_size():
    torch.manual_seed(0)
    model = Detector(config())
    box, filled = torch.tensor([[[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.8]]]), torch.ones(1, 2, dtype=torch.bool)
    what, hue = torch.tensor([[0, 2]]), torch.tensor([[1, 0]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    pixels = torch.randn(1, 3, 32, 48)
    for _ in range(60):
        cells = model(pixels)
        loss = sum(
            compute_detection_losses(*cells[:4], build_detection_targets(box, filled, cells.grid), what, hue).values()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = model.detect_objects(pixels)
    assert found.count.tolist() == [2] and sorted(found.concept[0, :2].tolist()) == [0, 2]
    assert float(box_iou(found.box, box).amax(1).min()) > 0.7
    assert model.detect_objects(torch.randn(2, 3, 64, 64)).score.shape == (2, 32)
    assert cost.count_flops(model, Workload.full_attention(16)) > 0


def test_invalid_configs_raise():
    with pytest.raises(ConfigError, match="at least 2 `concepts`"):
        config(concepts=("cat",))
    with pytest.raises(ConfigError, match="prefix tokens or a pool"):
        config(image=config().image.replace(cls_token=True))
