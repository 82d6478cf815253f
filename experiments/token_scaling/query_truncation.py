"""Truncate the learned queries of a vision-language model, so that images take fewer tokens."""

from vitrail.connectors import QFormerConfig
from vitrail.errors import ConfigError
from vitrail.models.vlm import VLM


def truncate_queries(model: VLM, num_queries: int) -> VLM:
    """Return a copy of the model that keeps only its first queries.

    Attention among fused queries is causal, so the outputs of the remaining queries do not change.
    """
    config, state = model.config, dict(model.state_dict())
    if config.queries is not None:
        truncated_config, key = (
            config.replace(queries=config.queries.replace(first_queries=num_queries)),
            "queries.queries",
        )
        available = config.queries.first_queries
    elif isinstance(config.connector, QFormerConfig):
        truncated_config, key = (
            config.replace(connector=config.connector.replace(num_queries=num_queries)),
            "connector.queries",
        )
        available = config.connector.num_queries
    else:
        raise ConfigError(
            f"a {type(config.connector).__name__} has no queries", "use a Q-Former or question-conditioned queries"
        )
    if num_queries > available:
        raise ConfigError(
            f"cannot keep {num_queries} queries: the model has {available}", "train a model with more queries"
        )
    state[key] = state[key][:num_queries]
    truncated = VLM(truncated_config)
    truncated.load_state_dict(state)
    return truncated
