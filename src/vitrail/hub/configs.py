"""A model's config without its weights."""

from pathlib import Path

from vitrail.config import Config
from vitrail.errors import CheckpointError
from vitrail.hub.families import FAMILIES, MODELS
from vitrail.hub.files import read_json
from vitrail.hub.folders import OWN, _family_of
from vitrail.hub.single import open_single


def read_config(path: str | Path) -> Config:
    """The config of a model in a folder of ours or of Hugging Face's, or in one file (GGUF, llama2.c).

    No weight is read.
    """
    path = Path(path)
    if path.is_file():
        about = open_single(path).about
        return FAMILIES[about["model_type"]].read(about)
    if (path / OWN).exists():
        about = read_json(path / OWN)
        kind = about.get("kind")
        if kind not in MODELS:
            raise CheckpointError(f"{path / OWN} is of the unknown kind {kind!r}", f"known: {', '.join(MODELS)}")
        return MODELS[kind][0].read(about.get("config", {}))
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} holds neither {OWN} nor config.json", "name the folder of a model")
    about = read_json(path / "config.json")
    return _family_of(about, path).read(about)
