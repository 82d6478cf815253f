"""What `vitrail scaling run` is asked for: two recipes, what is changed of each, and how many runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitrail import recipe as recipes
from vitrail.config import Config
from vitrail.errors import ConfigError


class Design(Config):
    """`base` and `queries` are recipes. `changes` are laid over the one that has the key; before a key that both have
    stands `base.` or `queries.`. Every run has `steps` steps behind the queries', and is asked `count` questions of
    each kind that those were trained on."""

    base: str = "scaling-base"
    queries: str = "scaling-queries"
    tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 200
    count: int = 1000
    changes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(set(self.tokens)) < 3 or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ConfigError(f"numbers of tokens {self.tokens}", "give three or more, ascending, from 1 on")
        if not self.seeds or self.steps < 2 or self.count < 1:
            raise ConfigError(
                f"{len(self.seeds)} seeds, {self.steps} steps, {self.count} questions",
                "give a seed, two steps and a question at least",
            )
        if self.base == self.queries:
            raise ConfigError(f"{self.base} is the base, and what is put on it", "give two recipes")


def apart(changes: Mapping[str, Any], plain: Mapping[str, recipes.Recipe]) -> dict[str, dict[str, Any]]:
    """Each recipe's own changes: of the recipe that is named before a key, or of the only one that has it."""
    known = {which: _keys(one) for which, one in plain.items()}
    found: dict[str, dict[str, Any]] = {which: {} for which in known}
    for key, value in changes.items():
        named, _, rest = key.partition(".")
        bare, among = (rest, [named]) if named in known else (key, list(known))
        has = [which for which in among if bare in known[which]]
        if not has:
            raise ConfigError(f"there is no {bare!r} in the recipe of {' or '.join(among)}", "see their files")
        if len(has) > 1:
            raise ConfigError(f"both recipes have {key!r}", f"write {' or '.join(f'{which}.{key}' for which in has)}")
        found[has[0]][bare] = value
    return found


def _keys(recipe: recipes.Recipe) -> set[str]:
    """All dotted keys of a recipe, defaults included."""

    def under(node: Any, path: str) -> Iterator[str]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in items:
            yield f"{path}{key}"
            yield from under(value, f"{path}{key}.")

    return set(under(recipe.plain(), ""))
