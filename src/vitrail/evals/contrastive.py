"""Data sets through a contrastive model: pictures by its own preprocessing, texts by its own tokenizer.

N pictures or texts, L tokens, C channels, H, W pixels, E width of the embedding, D width of a pooled feature
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.sources.progress import bar
from vitrail.encoders.text import TextConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.clip import Contrastive
from vitrail.processing.cut import Policy, Resample
from vitrail.processing.images import NORMS, Source, load_image, to_array
from vitrail.processing.resolution import Crop, Naive
from vitrail.processing.text import Tokenizer

Picture: TypeAlias = "Source | Callable[[], Source]"
"""What `load_image` reads, or a function that gives it when it is wanted."""

_T = TypeVar("_T")
_RESAMPLE: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True)
class Preprocessing:
    """How pictures become the pixels that a tower reads."""

    policy: Policy
    mean: tuple[float, ...] = NORMS["half"].mean
    std: tuple[float, ...] = NORMS["half"].std
    rescale: float = 1 / 255

    @classmethod
    def own(cls, config: ViTConfig) -> "Preprocessing":
        """Of the models trained here: squashed to the tower's side, values in −1…1."""
        return cls(Naive(size=config.image, patch=config.patch, unread=config.image % config.patch))

    @classmethod
    def read(cls, folder: Path, config: ViTConfig) -> "Preprocessing":
        """What a folder says of itself. A Hugging Face folder has a preprocessor_config.json (or, written by a whole
        processor, a processor_config.json); ours needs none."""
        file, about = folder / "preprocessor_config.json", None
        if file.is_file():
            about = _json(file)
        elif (file := folder / "processor_config.json").is_file():
            about = _json(file).get("image_processor")
        if about is not None:
            return cls._of(about, file, config)
        if (folder / "vitrail.json").is_file():
            return cls.own(config)
        raise CheckpointError(
            f"{folder} does not say how its pictures are prepared", "put its preprocessor_config.json beside it"
        )

    @classmethod
    def _of(cls, about: dict[str, Any], file: Path, config: ViTConfig) -> "Preprocessing":
        if "max_num_patches" in about or not isinstance(about.get("size"), dict | int):
            raise CheckpointError(f"{file}: pictures of no one size", "suites read models with square pictures only")
        if not about.get("do_resize", True):
            raise CheckpointError(f"{file}: pictures are not resized", "set do_resize and size in it")
        resample = _RESAMPLE.get(about.get("resample", 3))
        if resample is None:
            raise CheckpointError(f"{file}: resample {about['resample']}", f"known: {_RESAMPLE}")
        size, crop = about["size"], _side(about.get("crop_size"), file) if about.get("do_center_crop") else None
        if isinstance(size, int):  # written before sizes were dicts: the shortest edge where a crop follows
            size = {"shortest_edge": size} if crop else {"height": size, "width": size}
        side = crop or _side(size, file)
        shape: dict[str, Any] = {"patch": config.patch, "unread": side % config.patch, "resample": resample}
        policy: Policy
        if crop is None and "shortest_edge" not in size:
            policy = Naive(size=side, **shape)
        elif crop is not None and "shortest_edge" in size:
            policy = Crop(size=crop, edge=size["shortest_edge"], **shape)
        elif crop is not None and _side(size, file) == crop:
            policy = Naive(size=crop, **shape)  # the crop takes all of a square
        else:
            raise CheckpointError(f"{file}: size {size} with crop {crop}", "give square pictures, cropped or squashed")
        if side != config.image:
            raise CheckpointError(
                f"{file} makes pictures of {side} pixels, the tower is for {config.image}", "do they belong together?"
            )
        mean, std = (0.0,) * 3, (1.0,) * 3
        if about.get("do_normalize", True):
            mean, std = (_levels(about, key, file) for key in ("image_mean", "image_std"))
        rescale = about.get("rescale_factor", 1 / 255) if about.get("do_rescale", True) else 1.0
        return cls(policy, mean, std, rescale)

    def __call__(self, picture: Source) -> Tensor:
        """(C, H, W)"""
        return to_array(self.policy.apply(load_image(picture))[0], self.mean, self.std, self.rescale)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "fetch the file again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object", "fetch the file again")
    return found


def _side(size: object, file: Path) -> int:
    if isinstance(size, int):
        return size
    if isinstance(size, dict):
        sides = {size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))}
        if len(sides) == 1 and isinstance(side := sides.pop(), int):
            return side
    raise CheckpointError(f"{file}: pictures of {size}", "suites read models with square pictures only")


def _levels(about: dict[str, Any], key: str, file: Path) -> tuple[float, ...]:
    found = about.get(key)
    if not isinstance(found, list) or len(found) != 3 or not all(isinstance(x, float | int) for x in found):
        raise CheckpointError(f"{file}: {key} is {found}", "give three numbers")
    return tuple(found)


def to_ids(texts: Sequence[str], tokenizer: Tokenizer, config: TextConfig) -> tuple[Tensor, int]:
    """ids (N, L), and how many texts were cut because the tower reads no longer ones.

    A text ends with its end token, also one that was cut. A tower that reads both ways sees the padding, so its texts
    are filled up to its whole context, as in SigLIP's training; one that reads forwards never does.
    """
    end = config.eos if config.eos is not None else tokenizer.eos
    rows, cut = tokenizer.encode_batch(texts, specials=True), 0
    for n, row in enumerate(rows):
        if config.pool != "last" and end is not None and row[-1:] != [end]:
            row = [*row, end]
        if len(row) > config.context:
            kept = row[-1:] if row[-1] in tokenizer.specials.values() else []
            row, cut = [*row[: config.context - len(kept)], *kept], cut + 1
        rows[n] = row
    fill = tokenizer.pad if tokenizer.pad is not None else end if end is not None else 0
    if config.pool == "largest":  # padding must not be taken for the end
        fill = end if end is not None else 0
    length = max(map(len, rows), default=0) if config.causal and config.pool != "last" else config.context
    ids = torch.tensor([row + [fill] * (length - len(row)) for row in rows], dtype=torch.int64).view(len(rows), length)
    if ids.numel() and int(ids.max()) >= config.vocab:
        raise CheckpointError(
            f"the tokenizer gives id {int(ids.max())}, the text tower has {config.vocab}",
            "use the tokenizer that the model was trained with",
        )
    return ids, cut


class Embedder:
    """A contrastive model ready to read: pictures and texts → embeddings of length 1 on the CPU, in float32."""

    def __init__(
        self, model: Contrastive, preprocessing: Preprocessing, tokenizer: Tokenizer | None = None, *, batch: int = 256
    ):
        if batch < 1:
            raise ConfigError(f"batches of {batch}", "give at least 1")
        self.model, self.preprocessing, self.tokenizer, self.batch = model.eval(), preprocessing, tokenizer, batch
        self.cut = 0  # texts that were longer than the tower reads, so far

    @property
    def side(self) -> int:
        """Pixels of a side that the tower sees."""
        return self.model.config.image.image

    @property
    def device(self) -> torch.device:
        return self.model.log_scale.device

    def images(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, E)"""
        return F.normalize(self._pictures(pictures, self.model.encode_image), dim=-1)

    def features(self, pictures: Sequence[Picture]) -> Tensor:
        """(N, D) what the tower pools, before any projection, not normalised: what probes are trained on"""
        return self._pictures(pictures, self.model.image.pool)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """(N, E)"""
        if self.tokenizer is None:
            raise CheckpointError("the model came without a tokenizer", "put its tokenizer.json beside it")
        parts = []
        for some in self._batches(texts, "reading texts"):
            ids, cut = to_ids(some, self.tokenizer, self.model.config.text)
            self.cut += cut
            parts.append(_finite(self.model.encode_text(ids.to(self.device))))
        return F.normalize(torch.cat(parts), dim=-1)

    @torch.no_grad()
    def _pictures(self, pictures: Sequence[Picture], encode: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for some in self._batches(pictures, "looking at pictures"):
            pixels = torch.stack([self.preprocessing(p() if callable(p) else p) for p in some])  # (B, C, H, W)
            parts.append(_finite(encode(pixels.to(self.device, self.model.log_scale.dtype))))
        return torch.cat(parts)

    def _batches(self, items: Sequence[_T], what: str) -> Iterator[Sequence[_T]]:
        if not len(items):
            raise DataError("there is nothing to evaluate: the data set is empty", "name another, or raise the limit")
        with bar(what, len(items), unit="") as progress:
            for start in range(0, len(items), self.batch):
                some = items[start : start + self.batch]
                yield some
                progress.update(len(some))


def _finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise CheckpointError("the model's embeddings are not finite", "are its weights whole?")
    return x.float().cpu()


def some_of(n: int, limit: int | None, seed: int = 0) -> list[int]:
    """At most `limit` of n numbers, drawn alike from all of them: sets are often sorted by class."""
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit}", "give at least 1")
    if limit is None or limit >= n:
        return list(range(n))
    return sorted(torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:limit].tolist())
