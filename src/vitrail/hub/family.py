"""What a family is: a row that reads and writes configs and maps names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.errors import CheckpointError
from vitrail.hub.maps import Move


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers, or one kind of `architecture` of timm.

    read       config.json → our config        write  our config → config.json, without model_type and dtype
    fits       can a config be written as this family?
    moves      the map between tensor names
    leftovers  endings of tensors that hold nothing to learn
    outer      what older versions wrote before every name
    key        the key of config.json that names the family
    """

    name: str
    model: type
    read: Callable[[dict[str, Any]], Any]
    write: Callable[[Any], dict[str, Any]]
    fits: Callable[[Any], bool]
    moves: Callable[[Any], list[Move]]
    leftovers: tuple[str, ...] = (".rotary_emb.inv_freq", ".position_ids")
    outer: str = ""
    key: Literal["model_type", "architecture"] = "model_type"

    def ignores(self, name: str) -> bool:
        return name.endswith(self.leftovers)


def need(about: dict[str, Any], *keys: str) -> Any:
    """The first of several spellings of a key; none is an error that names it."""
    for key in keys:
        if about.get(key) is not None:
            return about[key]
    raise CheckpointError(f"config.json lacks {keys[0]!r}")


def refuse(about: dict[str, Any], **unsupported: str) -> None:
    """Refuse settings that would change the result and are not built: key=reason, refused when truthy."""
    for key, reason in unsupported.items():
        if about.get(key):
            raise CheckpointError(f"config.json sets {key} = {about[key]!r}: {reason}")
