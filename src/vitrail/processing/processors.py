"""The image processors of transformers that vision-language models come with: what each one's preprocessor_config.json
says as a policy with its mean and deviation, and the way back.

A config is that of any model that has `tower`, `policy`, `mean` and `std`. What a file leaves out is as its family
usually has it; what it says of the tower must be so.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from vitrail.errors import CheckpointError, ConfigError
from vitrail.processing.cut import Colour
from vitrail.processing.preprocessing import Preprocessing, levels_of, resample_number, resample_of, side_of
from vitrail.processing.resolution import AnyPolicy, AnyRes, Canvas, Crop, Framed, Letterbox, Naive, Native, Tiles

About = dict[str, Any]
MOST = 1000
"""Tiles of a picture that a file may ask for: a stranger's number must not make us count for ever."""


class Processor(NamedTuple):
    """
    name    of its class
    kinds   of policy that it can follow
    policy  a config, with the policy that its family usually has, and what a file says → the policy
    words   a config → what a file says of its policy
    """

    name: str
    kinds: tuple[type, ...]
    policy: Callable[[Any, About], AnyPolicy]
    words: Callable[[Any], About]

    def read(self, config: Any, about: About) -> Any:
        """The config with what a file says. One that says nothing changes nothing."""
        about = self.write(config) | {key: value for key, value in about.items() if value is not None}
        mean, std = _levels(about)
        config = config.with_(mean=mean, std=std)
        return config.with_(policy=self.policy(config, about).with_(resample=resample_of(about)))

    def write(self, config: Any) -> About:
        """As the file says it, every choice spelt out."""
        if config.policy is None:  # left to the tower
            config = config.with_(policy=config.fitted)
        policy = config.policy
        if not isinstance(policy, self.kinds):
            raise ConfigError(
                f"a {self.name} does not follow the policy {type(policy).__name__}",
                f"it can be one of {', '.join(kind.__name__ for kind in self.kinds)}",
            )
        return {
            "image_processor_type": self.name,
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": resample_number(policy.resample),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(config.mean),
            "image_std": list(config.std),
            **self.words(config),
        }


def _levels(about: About) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std, rescale = levels_of(about)
    if not math.isclose(rescale, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(f"pixels are multiplied with {rescale}", "only a rescale_factor of 1/255 is built")
    return mean, std


def _same(about: About, **wanted: Any) -> None:
    """What a file says of the model must be what the model is."""
    for key, value in wanted.items():
        if about[key] != value:
            raise CheckpointError(f"{key} is {about[key]}, and the model's is {value}", "do they belong together?")


def _tile(about: About, side: int) -> None:
    for key in ("size", "crop_size"):
        if key in about and side_of(about[key]) != side:
            raise CheckpointError(
                f"{key} is {about[key]}, and the tower is for {side} pixels", "do they belong together?"
            )


def _square(side: int) -> About:
    return {"height": side, "width": side}


# ── one view ───────────────────────────────────────────────────────────────────────────────────────────────────


def _one_view(config: Any, about: About) -> AnyPolicy:
    usual = config.policy
    if "image_size" in about:  # Idefics' word, which goes first
        about = about | {"size": _square(side_of(about["image_size"]))}
    found = Preprocessing.of(about, usual.size).policy
    place = {"size": found.size, "patch": usual.patch, "unread": usual.unread}
    if isinstance(found, Crop):
        edge = None if found.edge == found.size else found.edge
        if not about.get("do_pad"):
            return Crop(edge=edge, **place)
        if edge is not None:
            raise CheckpointError(f"pictures are padded, and then cropped from {edge} pixels", "pad or crop, not both")
    if about.get("do_pad"):
        if not str(about["image_processor_type"]).startswith("Llava"):
            raise CheckpointError(f"do_pad of a {about['image_processor_type']}", "only LLaVA's padding is built")
        return Letterbox(fill=fill_of(about["image_mean"]), **place)
    return Naive(**place)


def _one_view_words(config: Any) -> About:
    policy = config.policy
    padded = isinstance(policy, Letterbox)
    if padded and policy.fill != fill_of(config.mean):
        raise ConfigError(f"padding of {policy.fill}", f"transformers pads with the mean, {fill_of(config.mean)}")
    plain = Preprocessing(Crop(size=policy.size, patch=1) if padded else policy).plain()
    return {key: plain[key] for key in ("size", "do_center_crop", "crop_size") if key in plain} | {"do_pad": padded}


def fill_of(mean: Sequence[float]) -> Colour:
    """The colour that normalises to about zero, as transformers rounds it."""
    red, green, blue = (int(255 * level) for level in mean)
    return red, green, blue


def _framed(config: Any, about: About) -> AnyPolicy:
    _tile(about, config.policy.size)
    _same(about, do_pad=True)
    return config.policy.with_(fill=fill_of(config.mean), least=about["min_size"])


def _framed_words(config: Any) -> About:
    policy, fill = config.policy, fill_of(config.mean)
    if policy.fill != fill:
        raise ConfigError(f"padding of {policy.fill}", f"transformers pads with the mean, {fill}")
    return {"size": _square(policy.side), "min_size": policy.least, "do_pad": True}


class TwoSizes(Processor):
    """That of a tower which reads pictures at two resolutions, each with its mean and deviation. What a file calls
    `high_res_…` is said of the policy; the rest of the smaller picture, which the tower makes of the larger."""

    HIGH = {f"high_res_{key}": key for key in ("size", "resample", "image_mean", "image_std")}

    def read(self, config: Any, about: About) -> Any:
        about = self.write(config) | {key: value for key, value in about.items() if value is not None}
        large, policy, tower = (
            about | {key: about[name] for name, key in self.HIGH.items()},
            config.policy,
            config.tower,
        )
        (mean, std), (own, spread) = _levels(about), _levels(large)
        _tile(about, policy.size)
        _tile(large, policy.side)
        _same(about, do_pad=True)
        low = tower.low.with_(mean=mean, std=std)
        if (resample := resample_of(about)) == "lanczos":
            raise CheckpointError("a tower does not resample by lanczos", "known: bicubic and bilinear")
        return config.with_(
            tower=tower.with_(low=low, mean=own, std=spread, resample=resample),
            policy=policy.with_(fill=fill_of(own), least=about["min_size"], resample=resample_of(large)),
        )

    def write(self, config: Any) -> About:
        tower = config.tower
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        large = super().write(SimpleNamespace(**fields | {"mean": tower.mean, "std": tower.std}))
        small = {
            "size": _square(config.policy.size),
            "resample": resample_number(tower.resample),
            "image_mean": list(tower.low.mean),
            "image_std": list(tower.low.std),
        }
        return large | {name: large[key] for name, key in self.HIGH.items()} | small


# ── tiles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _anyres(config: Any, about: About) -> AnyPolicy:
    _tile(about, config.policy.tile)
    _same(about, image_grid_pinpoints=pinpoints(config.policy))
    return config.policy


def _anyres_words(config: Any) -> About:
    tile = config.policy.tile
    return {
        "size": {"shortest_edge": tile},
        "do_center_crop": True,
        "crop_size": _square(tile),
        "do_pad": True,  # with views of nothing, up to the most of a batch
        "image_grid_pinpoints": pinpoints(config.policy),
    }


def _onevision_words(config: Any) -> About:
    words = _anyres_words(config) | {"size": _square(config.policy.tile), "do_center_crop": False}
    return {key: value for key, value in words.items() if key != "crop_size"}


def pinpoints(policy: AnyRes) -> list[list[int]]:
    """Grids as transformers says them, in pixels."""
    return [[rows * policy.tile, columns * policy.tile] for rows, columns in policy.grids]


def _tiles(config: Any, about: About) -> AnyPolicy:
    # `crop_to_patches` is not asked: released files say false, and InternVL's whole processor cuts all the same.
    _tile(about, config.policy.tile)
    if not isinstance(most := about["max_patches"], int) or most > MOST:
        raise CheckpointError(f"max_patches is {most!r}", f"expected a number of 1 … {MOST:,}")
    return config.policy.with_(least=about["min_patches"], most=about["max_patches"])


def _tiles_words(config: Any) -> About:
    policy = config.policy
    cut = {"crop_to_patches": True, "min_patches": policy.least, "max_patches": policy.most}
    return {"size": _square(policy.tile), **cut}


def _canvas(config: Any, about: About) -> AnyPolicy:
    _tile(about, config.policy.tile)
    _same(about, max_image_tiles=config.policy.most)
    return config.policy


def _canvas_words(config: Any) -> About:
    return {"size": _square(config.policy.tile), "do_pad": True, "max_image_tiles": config.policy.most}


# ── any size ───────────────────────────────────────────────────────────────────────────────────────────────────


def _native(config: Any, about: About) -> AnyPolicy:
    policy, size = config.policy, about["size"]
    _same(about, patch_size=policy.patch, merge_size=policy.merge, temporal_patch_size=config.tower.temporal)
    if not isinstance(size, dict):
        raise CheckpointError(f"size is {size!r}", "give shortest_edge and longest_edge, in pixels of a whole picture")
    # The older words go first, as in transformers.
    budget = {ours: about.get(ours, size.get(theirs)) for ours, theirs in BUDGET.items()}
    missing = [key for key, value in budget.items() if value is None]
    if missing:
        raise CheckpointError(f"size is {size}, without a {BUDGET[missing[0]]}", "give both edges")
    return policy.with_(**budget)


BUDGET = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def _native_words(config: Any) -> About:
    policy = config.policy
    return {
        "size": {theirs: getattr(policy, ours) for ours, theirs in BUDGET.items()},
        "patch_size": policy.patch,
        "merge_size": policy.merge,
        "temporal_patch_size": config.tower.temporal,
    }


LLAVA = Processor("LlavaImageProcessor", (Crop, Naive, Letterbox), _one_view, _one_view_words)
BLIP = Processor("BlipImageProcessor", (Naive, Crop), _one_view, _one_view_words)
IDEFICS = Processor("IdeficsImageProcessor", (Naive,), _one_view, _one_view_words)
DEEPSEEK_VL = Processor("DeepseekVLImageProcessor", (Framed,), _framed, _framed_words)
DEEPSEEK_VL_HYBRID = TwoSizes("DeepseekVLHybridImageProcessor", (Framed,), _framed, _framed_words)
LLAVA_NEXT = Processor("LlavaNextImageProcessor", (AnyRes,), _anyres, _anyres_words)
LLAVA_ONEVISION = Processor("LlavaOnevisionImageProcessor", (AnyRes,), _anyres, _onevision_words)
INTERNVL = Processor("GotOcr2ImageProcessor", (Tiles,), _tiles, _tiles_words)
MLLAMA = Processor("MllamaImageProcessor", (Canvas,), _canvas, _canvas_words)
QWEN_VL = Processor("Qwen2VLImageProcessor", (Native,), _native, _native_words)
