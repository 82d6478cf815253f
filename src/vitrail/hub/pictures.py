"""How a model's pictures are prepared, kept with it from folder to folder.

A model that was made here reads pictures squashed to its tower's side, with values in −1…1, and nothing is said of it.
One that was loaded keeps what its folder said, word for word; where a folder of strangers said nothing, it keeps that
nobody knows, so that an export cannot claim anything.

Of vision-language models none of this is kept: their config itself says how pictures are prepared.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitrail.encoders import Hybrid, Towers, ViT
from vitrail.errors import ConfigError
from vitrail.evals.viewer import Tower, tower_of
from vitrail.hub.family import Family
from vitrail.hub.files import read_json, write_json
from vitrail.processing import footage
from vitrail.processing.images import NORMS, Norm
from vitrail.processing.preprocessing import FILE, WHOLE, Preprocessing, levels_of, said

KEPT = "prepared"  # the attribute of a model: what its folder said, {} if nobody knows; none if it was made here

# Families → their processor in transformers. SigLIP 2's reads pictures in their own proportions, which squashed ones
# are not: nothing is said rather than something wrong.
PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip_vision_model": "SiglipImageProcessor",
    "dinov2": "BitImageProcessor",
    "dinov2_with_registers": "BitImageProcessor",
    "eva02": "BitImageProcessor",  # timm itself goes by its config.json
}
STILLS = ("image_processor_type", "crop_to_patches", "min_patches", "max_patches", "image_grid_pinpoints", "do_pad")
"""What is said of pictures alone."""
TIMM = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # what a timm config says of pictures


def remember(model: nn.Module, folder: Path, *, own: bool) -> None:
    """Keep with a model what its folder, our own or strangers', says of its pictures."""
    if tower_of(model) is None or not folder.is_dir():
        return
    found = said(folder)[0]
    if found is None and not own:
        timm = read_json(folder / "config.json").get("pretrained_cfg") or {}
        words = {key: timm[key] for key in TIMM if key in timm}
        found = {"timm": words} if words else {}
    if found is not None:
        setattr(model, KEPT, found)


OURS = NORMS["half"]  # what all models that are made here read


def eyes(model: nn.Module) -> list[tuple[nn.Module, Norm]]:
    """The parts of a vision-language model that read pixels, and by which levels: its tower, or those it is made of,
    which have their own. Where SAM is among them its are left out: it is no ViT that could be started from."""
    whole: Any = model
    tower, config = whole.tower, whole.config
    if isinstance(tower, Towers):
        return [(eye, Norm(one.mean, one.std)) for eye, one in zip(tower.towers, tower.config.towers, strict=True)]
    if isinstance(tower, Hybrid):
        return [(tower.low, Norm(tower.config.low.mean, tower.config.low.std))]
    return [(tower, Norm(config.mean, config.std))]


def levels(model: nn.Module, part: nn.Module | None = None) -> Norm | None:
    """What a model's tower, or a part of it, reads pixels of 0 … 1 by; None where nobody knows."""
    config: Any = getattr(model, "config", None)
    about = getattr(model, KEPT, None)
    if hasattr(config, "policy"):
        found = (norm for eye, norm in eyes(model) if part is not None and part in set(eye.modules()))
        return next(found, Norm(config.mean, config.std))
    if about is None:
        return OURS
    if "timm" in about and "image_mean" not in about:
        about = {f"image_{key}": list(about["timm"][key]) for key in ("mean", "std") if key in about["timm"]}
    if "image_mean" not in about and about.get("do_normalize", True):
        return None
    mean, std, rescale = levels_of(about)
    most = 255 * rescale
    return Norm(tuple(x / most for x in mean), tuple(x / most for x in std))


def read_as(model: nn.Module, tower: Any, wanted: Norm, fresh: Sequence[str] = ()) -> None:
    """Make a model that was loaded read pixels of other levels, those of training, and give the same features: the
    difference goes into its tower's first layer, of which nothing that holds it may be `fresh`. Nothing is then kept of
    how its folder prepared pictures."""
    found = levels(model, tower)
    if hasattr(model, KEPT):
        delattr(model, KEPT)
    if found is None:
        sys.stderr.write("how the pictures of what is started from were prepared is not said: taken as they come\n")
        return
    if found == OURS:  # of any number of channels
        found = Norm(*(level[:1] * len(wanted.mean) for level in OURS))
    scale = [w / f for w, f in zip(wanted.std, found.std, strict=True)]
    offset = [(w - f) / s for w, f, s in zip(wanted.mean, found.mean, found.std, strict=True)]
    if np.allclose(scale, 1) and np.allclose(offset, 0):
        return
    if not isinstance(tower, ViT):
        raise ConfigError(
            f"a {type(tower).__name__} reads pixels less {found.mean} by {found.std}, and is shown others",
            f"start from one that reads {wanted.mean} and {wanted.std}",
        )
    if "positions" in fresh and tower.embed.proj.bias is None:
        raise ConfigError(
            "pixels of other levels, and positions afresh that would have to hold the difference",
            f"start from a tower that reads {wanted.mean} and {wanted.std}",
        )
    tower.read_through(scale, offset)


def see_alike(model: nn.Module, mine: nn.Module, whole: nn.Module, theirs: nn.Module, fresh: Sequence[str]) -> None:
    """For a part of a model, `mine`, that starts from `theirs`, a part of another: what reads pixels there is made to
    read those that this model shows as it read its own."""
    tower, config = tower_of(whole), getattr(whole, "config", None)
    found = [eye for eye, _ in eyes(whole)] if hasattr(config, "policy") else []
    for eye in found + ([tower] if isinstance(tower, nn.Module) else []):
        place = next((name for name, part in theirs.named_modules() if part is eye), None)
        if place is not None or theirs in set(eye.modules()):
            read_as(whole, eye, levels(model, mine.get_submodule(place or "")) or OURS, fresh)


def keep(model: nn.Module, folder: Path) -> None:
    """Write beside a model of ours how its pictures are prepared, unless they are as ours are."""
    if tower_of(model) is not None:
        _put(folder, getattr(model, KEPT, None))


def export(model: nn.Module, folder: Path, family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Write how a model's pictures are prepared for transformers, and return its config.json, in which timm looks."""
    if family.pictures is not None:
        ours: Any = model.config
        _put(folder, family.pictures.write(ours) if ours.tower.channels == 3 else None)
        if family.videos and ours.tower.channels == 3:
            words = family.pictures.write(ours) | ours.films.words()
            write_json(folder / footage.FILE, {key: words[key] for key in words if key not in STILLS})
        return config
    tower = tower_of(model)
    if tower is None:
        return config
    found = getattr(model, KEPT, None)
    if found is None:
        found = _ours(tower, family.name)
    _put(folder, {key: value for key, value in found.items() if key != "timm"} or None)
    if "timm" in found and "pretrained_cfg" in config:
        return config | {"pretrained_cfg": config["pretrained_cfg"] | found["timm"]}
    return config


def _ours(tower: Tower, family: str) -> dict[str, Any]:
    if family not in PROCESSORS or tower.config.channels != 3:
        return {}
    ours = Preprocessing.own(tower.config)
    timm = {"mean": ours.mean, "std": ours.std, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
    return {"image_processor_type": PROCESSORS[family], **ours.plain(), "timm": timm}


def _put(folder: Path, found: dict[str, Any] | None) -> None:
    for file in (FILE, WHOLE, footage.FILE):  # of a model that lay there before
        (folder / file).unlink(missing_ok=True)
    if found is not None:
        write_json(folder / FILE, found)
