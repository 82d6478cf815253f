"""A model that makes fewer tokens of a picture: the first queries of one that has more."""

from vitrail.connectors import QFormerConfig
from vitrail.errors import ConfigError
from vitrail.models.vlm import VLM


def cut(model: VLM, tokens: int) -> VLM:
    """The same model with its first queries alone. Queries that are fused with the question see those before them, so
    that what they say stays as it was."""
    config, state = model.config, dict(model.state_dict())
    if config.queries is not None:
        made, key = config.with_(queries=config.queries.with_(first=tokens)), "queries.queries"
        there = config.queries.first
    elif isinstance(config.connector, QFormerConfig):
        made, key = config.with_(connector=config.connector.with_(queries=tokens)), "connector.queries"
        there = config.connector.queries
    else:
        raise ConfigError(f"a {type(config.connector).__name__} has no queries", "give a Q-Former, or fused ones")
    if tokens > there:
        raise ConfigError(f"{tokens} of {there} queries", "train more of them first")
    state[key] = state[key][:tokens]
    fewer = VLM(made)
    fewer.load_state_dict(state)
    return fewer
