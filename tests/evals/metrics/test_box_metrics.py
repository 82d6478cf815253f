"""Box formats of model families, and IoU compared with pycocotools."""

import numpy as np
import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.evals.metrics.box_metrics import iou, parse_boxes


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen-vl", "<ref>dog</ref><box>(100,200),(500,600)</box>"),
        ("qwen-vl", "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(100, 200),(500, 600)<|box_end|>"),
        ("qwen3-vl", '```json\n[{"bbox_2d": [100, 200, 500, 600], "label": "dog"}]\n```'),
        ("qwen2.5-vl", '{"bbox_2d": [80, 80, 400, 240]}'),
        ("internvl", "<ref>dog</ref><box>[[100, 200, 500, 600]]</box>"),
        ("internvl", "[100, 200, 500, 600]"),  # one pair of brackets suffices in their script
        ("llava", "[0.1, 0.20, .5, 0.6]"),
        ("pixels", "It is at [80, 80, 400, 240]."),
        ("pixels", "[400, 240, 80, 80]"),  # swapped corners
    ],
)
def test_box_styles(style, text):
    assert parse_boxes(text, style, (400, 800)) == [pytest.approx((80, 80, 400, 240))]


def test_resized_model_inputs():
    text = '[{"bbox_2d": [10, 10, 50, 30]}, {"bbox_2d": [0, 0, 1, 1]}]'
    assert parse_boxes(text, "qwen2.5-vl", (400, 800), model_size=(50, 100)) == [(80, 80, 400, 240), (0, 0, 8, 8)]
    assert parse_boxes("[[10,20,30,40],[1,2,3,4]]", "internvl", (1000, 1000)) == [(10, 20, 30, 40), (1, 2, 3, 4)]
    assert parse_boxes("nowhere", "llava", (4, 4)) == []
    with pytest.raises(ConfigError, match="did you mean 'qwen-vl'"):
        parse_boxes("", "qwenvl", (4, 4))


def test_iou_matches_pycocotools():
    mask = pytest.importorskip("pycocotools.mask")
    chance = np.random.default_rng(0)
    corners = chance.uniform(0, 20, (2, 50, 2))
    sizes = chance.uniform(0.1, 15, (2, 50, 2))
    a, b = (np.concatenate([corners[i], sizes[i]], 1) for i in range(2))
    expected = [mask.iou(a[n : n + 1], b[n : n + 1], [0])[0, 0] for n in range(50)]
    as_ends = (torch.tensor(np.concatenate([corners[i], corners[i] + sizes[i]], 1)) for i in range(2))
    found = iou(*as_ends)
    assert found.tolist() == pytest.approx(expected) and found.max() > 0.3 and (found == 0).any()
    assert iou(torch.zeros(1, 4), torch.zeros(1, 4)).item() == 0
