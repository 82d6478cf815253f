"""A contrastive model as an eye: pictures and words in one space.

N pictures or texts, E width of the embedding
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.data.sources.fetch import to_stderr
from vitrail.devices import usable
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.contrastive import to_ids
from vitrail.hub.configs import read_config, resolve
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.models.qlip import QLIPConfig
from vitrail.processing.preprocessing import Preprocessing
from vitrail.processing.text import Tokenizer


class ContrastiveEye:
    """Pictures by the model's own preprocessing, words by its own tokenizer, which only words need."""

    def __init__(
        self,
        model: Contrastive,
        preprocessing: Preprocessing,
        tokenizer: Callable[[], Tokenizer],
        say: Callable[[str], Any] = to_stderr,
    ):
        self.model, self.preprocessing, self.tokenizer, self.say = model.eval(), preprocessing, tokenizer, say
        self.key = _key(model, preprocessing)

    def read(self, picture: Image.Image) -> Tensor:
        return self.preprocessing(picture)

    def embed(self, pictures: Sequence[Tensor]) -> np.ndarray:
        """(N, E), each of length one."""
        return self._unit(self.model.encode_image, torch.stack(list(pictures)))

    def words(self, texts: Sequence[str]) -> np.ndarray:
        """(N, E), each of length one."""
        config = self.model.config.text
        ids, cut = to_ids(texts, self.tokenizer(), config)
        if cut:
            self.say(f"the model reads {config.context} tokens: the end of {cut} text{'s' * (cut > 1)} is cut off")
        return self._unit(self.model.encode_text, ids)

    @torch.no_grad()
    def _unit(self, encode: Callable[[Tensor], Tensor], x: Tensor) -> np.ndarray:
        found = F.normalize(encode(x.to(self.model.log_scale.device)), dim=-1).cpu()
        if not found.isfinite().all():
            raise CheckpointError("the model's embeddings are not finite", "are its weights whole?")
        return found.numpy()


def open_eye(model: str, *, device: str | None = None) -> ContrastiveEye:
    """The eye of a CLIP or SigLIP in a folder, or by its hub id."""
    device = usable(device)
    path, config = resolve(model), read_config(model)
    if not isinstance(config, ContrastiveConfig | QLIPConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise CheckpointError(f"{model} is a {kind} and does not compare pictures", "give a CLIP or a SigLIP")
    preprocessing = Preprocessing.read(path, config.image)
    try:
        loaded = hub.load(path, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {first}", "try --device cpu") from None
    return ContrastiveEye(getattr(loaded, "contrastive", loaded), preprocessing, lambda: hub.tokenizer(path))


def _key(model: Contrastive, preprocessing: Preprocessing) -> str:
    """Of all that a picture's vector depends on, wherever the model lies: what its tower is, weighs, and is shown."""
    made = hashlib.sha256(json.dumps(model.config.image.plain(), sort_keys=True).encode())
    made.update(repr(preprocessing).encode())
    for part in (model.image, model.image_projection):
        for name, tensor in part.state_dict().items():
            made.update(name.encode())
            made.update(tensor.detach().cpu().contiguous().numpy().data)
    return made.hexdigest()[:16]
