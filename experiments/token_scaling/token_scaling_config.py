"""Configuration of `python -m experiments.token_scaling run`: two recipes, their changes, and the number of runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitrail import recipe as recipes
from vitrail.config import Config
from vitrail.errors import ConfigError


class TokenScalingConfig(Config):
    """Settings of a token-scaling experiment.

    base, queries  names of the two recipes
    tokens         numbers of visual tokens to compare
    seeds          seeds of the runs
    steps          training steps of each run, after those of the queries
    num_questions  test questions of each kind
    changes        dotted key → value; a key that both recipes have needs the prefix `base.` or `queries.`
    """

    base: str = "scaling-base"
    queries: str = "scaling-queries"
    tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 200
    num_questions: int = 1000
    changes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(set(self.tokens)) < 3 or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ConfigError(f"invalid numbers of tokens {self.tokens}", "give three or more ascending numbers from 1")
        if not self.seeds or self.steps < 2 or self.num_questions < 1:
            raise ConfigError(
                f"{len(self.seeds)} seeds, {self.steps} steps, {self.num_questions} questions",
                "give at least one seed, two steps and one question",
            )
        if self.base == self.queries:
            raise ConfigError(f"{self.base} is both the base and the queries recipe", "give two recipes")


def split_changes(changes: Mapping[str, Any], plain: Mapping[str, recipes.Recipe]) -> dict[str, dict[str, Any]]:
    """Assign each change to the recipe that its prefix names, or to the only one that has the key."""
    known = {which: _collect_keys(one) for which, one in plain.items()}
    found: dict[str, dict[str, Any]] = {which: {} for which in known}
    for key, value in changes.items():
        named, _, rest = key.partition(".")
        bare, among = (rest, [named]) if named in known else (key, list(known))
        has = [which for which in among if bare in known[which]]
        if not has:
            raise ConfigError(f"the recipe of {' or '.join(among)} has no key {bare!r}", "see the recipe files")
        if len(has) > 1:
            raise ConfigError(f"both recipes have {key!r}", f"write {' or '.join(f'{which}.{key}' for which in has)}")
        found[has[0]][bare] = value
    return found


def _collect_keys(recipe: recipes.Recipe) -> set[str]:
    """Collect all dotted keys of a recipe, including defaults."""

    def under(node: Any, path: str) -> Iterator[str]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in items:
            yield f"{path}{key}"
            yield from under(value, f"{path}{key}.")

    return set(under(recipe.to_dict(), ""))
