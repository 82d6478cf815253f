"""Occlusion maps of answers."""

import pytest
import torch
from PIL import Image

from generate.test_unified_generation import unified
from vitrail.errors import ConfigError
from vitrail.plots.occlusion import compute_occlusion_map, draw_occlusion_map


@torch.no_grad()
def output(model, pixels, question, answer):
    seen, _ = model.encode_images(pixels[None])
    hidden = model(model.make_input_image_piece(seen), model.make_text_piece(torch.tensor([question + answer])))
    logits = model.decoder.compute_logits(hidden)[0].log_softmax(-1)
    first = logits.shape[0] - len(answer) - 1
    return sum(logits[first + i, token] for i, token in enumerate(answer))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 1), (2, 2), (3, 3), (9, 1)])
def test_map_is_the_mean_over_windows(window, stride):
    model = unified()
    torch.manual_seed(0)
    pixels, question, answer = torch.rand(3, 12, 12) * 2 - 1, [5, 9, 0], [7, 3]
    result = []
    found = compute_occlusion_map(
        model, pixels, question, answer, window_size=window, stride=stride, progress=lambda *at: result.append(at)
    )
    size = min(window, 3)
    corners = sorted({*range(0, 3 - size + 1, stride), 3 - size})
    wanted = [[[] for _ in range(3)] for _ in range(3)]
    for y in corners:
        for x in corners:
            covered = pixels.clone()
            covered[:, 4 * y : 4 * (y + size), 4 * x : 4 * (x + size)] = pixels.mean((1, 2), keepdim=True)
            lost = output(model, pixels, question, answer) - output(model, covered, question, answer)
            for i in range(y, y + size):
                for j in range(x, x + size):
                    wanted[i][j].append(float(lost))
    means = torch.tensor([[sum(cell) / len(cell) for cell in row] for row in wanted])
    torch.testing.assert_close(found, means, rtol=1e-3, atol=1e-4)
    assert result[-1] == (len(corners) ** 2 + 1,) * 2


def test_overlay_is_bright_where_occlusion_matters():
    lost = torch.zeros(3, 3)
    lost[1, 1], lost[0, 0] = 2.0, -1.0
    image = draw_occlusion_map(Image.new("RGB", (30, 30), (200, 0, 0)), lost)
    red, green, _ = image.getpixel((15, 15))
    assert red > 180 and green < 20
    red, green, blue = image.getpixel((2, 2))
    assert red == green == blue
    assert draw_occlusion_map(Image.new("RGB", (4, 4)), torch.zeros(2, 2)).size == (4, 4)


def test_invalid_windows_raise():
    for wrong in ({"window_size": 1, "stride": 2}, {"stride": 0}, {"window_size": 0}):
        with pytest.raises(ConfigError):
            compute_occlusion_map(unified(), torch.zeros(3, 12, 12), [1], [2], **wrong)
    with pytest.raises(ConfigError):
        compute_occlusion_map(unified(), torch.zeros(3, 12, 12), [1], [])
