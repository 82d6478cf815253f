"""What a family is: a row that reads and writes configs and maps names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub.about import check_about
from vitrail.hub.habit import Habit
from vitrail.hub.maps import Move
from vitrail.processing import footage
from vitrail.processing.preprocessing import blamed, said
from vitrail.processing.processors import Processor

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""transformers' name → ours"""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers, or one kind of `architecture` of timm.

    read       config.json → our config        write  our config → config.json, without model_type and dtype
    fits       can a config be written as this family?
    moves      the map between tensor names
    leftovers  endings of tensors that hold nothing to learn
    copies     tensors that some files store again: name → the one it must equal
    outer      what older versions wrote before every name
    key        the key of config.json that names the family: diffusers has _class_name; QLIP calls itself a clip, and
               only its architectures tell
    stem       what its files of weights are called
    older      what older versions called parts of a name: (now, then)
    pictures   the image processor whose words set policy, mean and std of a config
    videos     whether a video processor's words set its footage
    habit      how a vision-language model is spoken to, and what its processor is told
    """

    name: str
    model: type
    read: Callable[[dict[str, Any]], Any]
    write: Callable[[Any], dict[str, Any]]
    fits: Callable[[Any], bool]
    moves: Callable[[Any], list[Move]]
    leftovers: tuple[str, ...] = (".rotary_emb.inv_freq", ".position_ids")
    copies: tuple[tuple[str, str], ...] = ()
    outer: str = ""
    key: Literal["model_type", "architecture", "_class_name", "architectures"] = "model_type"
    stem: str = "model"
    older: tuple[tuple[str, str], ...] = ()
    pictures: Processor | None = None
    videos: bool = False
    habit: Habit | None = None

    def ignores(self, name: str) -> bool:
        return name.endswith(self.leftovers)

    def config(self, about: dict[str, Any], source: Path) -> Any:
        """`read`, where whatever is wrong with the file is an error that names it; with what lies beside it about
        pictures, where the family's config holds that."""
        try:
            with blamed(source):
                check_about(about)
                config = self.read(about)
            if self.pictures is None:
                return config
            words, source = said(source.parent)
            with blamed(source):
                config = self.pictures.read(config, words) if words else config
            if not self.videos:
                return config
            words, source = said(source.parent, footage.FILE, footage.PART)
            with blamed(source):
                films = config.films.told(words or {})
                return config if films == config.films else config.with_(footage=films)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(
                f"{source} is no config of a {self.name}: {type(error).__name__}: {error}", "fetch it again"
            ) from error


def round_trip(
    read: Callable[[dict[str, Any]], Any],
    write: Callable[[Any], dict[str, Any]],
    spelt: Callable[[Any], Any] = lambda config: config,
    pictures: Processor | None = None,
) -> Callable[[Any], bool]:
    """A config fits a family if what is written of it reads as the same config; `spelt` undoes mere ways of saying."""

    def fits(config: Any) -> bool:
        try:
            again = read(write(config))
            again = again if pictures is None else pictures.read(again, pictures.write(config))
            return spelt(again) == spelt(config)
        except VitrailError:
            return False

    return fits


def need(about: dict[str, Any], *keys: str) -> Any:
    """The first of several spellings of a key; none is an error that names it."""
    for key in keys:
        if about.get(key) is not None:
            return about[key]
    raise CheckpointError(f"{keys[0]!r} is missing", "fetch the file again")


def refuse(about: dict[str, Any], **unsupported: str) -> None:
    """Refuse settings that would change the result and are not built: key=reason, refused when truthy."""
    for key, reason in unsupported.items():
        if about.get(key):
            raise CheckpointError(f"{key} is {about[key]!r}: {reason}")
