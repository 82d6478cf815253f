"""Compare vision-language models with transformers: logits, gradients, exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers import relative
from hub.test_llava import pictures
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.registry import FAMILIES
from vitrail.stream import TOKEN_KINDS, Stream, build_stream, pack_streams, split_by_sample, text_part

VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|
PICTURES = ((), ((40, 90),), ((33, 31), (64, 20), (100, 7)))  # sizes (height, width) of the pictures of each sample

Inputs = Callable[[Stream, Tensor, list[Tensor]], dict[str, Any]]


def build_samples(ours: VLM) -> tuple[list[Stream], list[VisionInputs | None]]:
    """Build samples with no, one and several pictures of unequal sizes between texts."""
    samples, shown = [], []
    for sizes in PICTURES:
        images = ours.prepare_images(pictures(*sizes)) if sizes else None
        parts = [text_part([1, 5])]
        for layout in () if images is None else images.layouts:
            parts += [*ours.config.make_parts(layout), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3, 2])], ours.config.rules))
        shown.append(images)
    return samples, shown


def split_pixels(images: VisionInputs) -> list[Tensor]:
    """Split the views, or the patches of views of unequal sizes, by image."""
    if images.pixels.ndim == 2:
        return list(images.pixels.split([sum(v.grid.num_patches for v in layout.views) for layout in images.layouts]))
    return list(images.pixels.split([len(layout.views) for layout in images.layouts]))


def compute_logits(ours: VLM, samples: list[Stream], shown: list[VisionInputs | None]) -> list[Tensor]:
    """Run all samples as one packed row."""
    batch = pack_streams(samples, sum(map(len, samples)))
    given = [images for images in shown if images is not None]
    pixels, layouts = torch.cat([one.pixels for one in given]), tuple(x for one in given for x in one.layouts)
    return split_by_sample(batch, ours(batch, VisionInputs(pixels, layouts)))


def compute_reference(reference: Any, samples: list[Stream], shown: list[Any], inputs: Inputs) -> list[Tensor]:
    """Run transformers sample by sample. `inputs` builds the arguments from the ids and the views of each image."""
    found = []
    for sample, images in zip(samples, shown, strict=True):
        views = [] if images is None else split_pixels(images)
        found.append(reference(input_ids=sample.ids[None], **inputs(sample, is_image(sample), views)).logits[0])
    return found


def is_image(sample: Stream) -> Tensor:
    return sample.kinds == TOKEN_KINDS["image"].id


def pixels_alone(sample: Stream, mask: Tensor, views: list[Tensor]) -> dict[str, Any]:
    return {"pixel_values": torch.cat(views)} if views else {}


def save_reference(reference: Any, folder: Path) -> None:
    reference.save_pretrained(folder)


def check_parity(
    reference: Any, folder: Path, inputs: Inputs = pixels_alone, write: Callable[[Any, Path], None] = save_reference
) -> VLM:
    """Check logits and gradients; gradients are written and read as a checkpoint, which renames them.

    `write` writes the reference in the layout that is read.
    """
    write(reference, folder / "hf")
    ours = from_hf(folder / "hf").eval()
    samples, shown = build_samples(ours)
    logits, expected = compute_logits(ours, samples, shown), compute_reference(reference, samples, shown, inputs)
    check_gradients(ours, reference, logits, expected, folder, write)
    return ours


def check_gradients(
    ours: VLM,
    reference: Any,
    logits: list[Tensor],
    expected: list[Tensor],
    folder: Path,
    write: Callable[[Any, Path], None] = save_reference,
) -> None:
    """Check logits, and the gradients of a random sum of them."""
    for a, b in zip(logits, expected, strict=True):
        assert a.shape == b.shape and relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    for outputs in (logits, expected):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    write(reference, folder / "gradients")
    wanted = dict(from_hf(folder / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        assert (g - wanted[name]).abs().max() <= GRADIENTS * wanted[name].abs().max().clamp_min(1e-2), name


def check_exports(reference: Any, folder: Path, normalize: Callable[[Any], Any]) -> None:
    """Check that export and native round trips keep weights and config, bit by bit."""
    reference.save_pretrained(folder / "hf")
    ours = from_hf(folder / "hf")
    to_hf(ours, folder / "back")
    about = json.loads((folder / "back/config.json").read_text())
    assert about["architectures"] == [type(reference).__name__]
    back = getattr(transformers, type(reference).__name__).from_pretrained(folder / "back")
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = FAMILIES[about["model_type"]].from_hf_config(about)
    assert normalize(again) == normalize(ours.config)
    save(ours, folder / "own")
    again = load(folder / "own")
    assert again.config == ours.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())
