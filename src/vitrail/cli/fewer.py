"""Options of commands that ask a vision-language model: how many tokens are left of each picture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.connectors.reduce import AnyReduction


@Parameter(name="*")
@dataclass
class Fewer:
    """Fewer tokens of a picture than the model was trained with."""

    reduce: Literal["vispruner", "visionzip", "pool"] | None = None
    "How features of a vision-language model are left out before its connector; goes with --keep."
    keep: int | None = None
    "How many are left of each view of a picture."

    @property
    def chosen(self) -> "AnyReduction | None":
        if (self.reduce is None) != (self.keep is None):
            raise ConfigError("--reduce and --keep go together", "give both: --reduce vispruner --keep 64")
        if self.reduce is None or self.keep is None:
            return None
        from vitrail.connectors.reduce import reduction

        return reduction(self.reduce, self.keep)

    @property
    def plain(self) -> dict[str, Any]:
        """What is said of it beside scores."""
        return {} if self.reduce is None else {"reduce": self.reduce, "keep": self.keep}

    def named(self, model: str) -> str:
        """What a model is called whose answers are kept."""
        return model if self.reduce is None else f"{model} ({self.reduce}, {self.keep})"


FEWER = Fewer()
