"""Specification with which a task registers itself: `TASKS.register(NAME, TaskSpec(...))`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from vitrail.config import Config
from vitrail.data.language.text_pieces import PieceTable
from vitrail.processing.tokenizer import Tokenizer
from vitrail.training.task import Task

SourceMap = dict[str, Any]


class TaskSpec(NamedTuple):
    """How to build the task of a stage, and what it accepts.

    make_task        takes the model, the sources by name, the tokenizer and the settings
    model_types      classes of the models that the task trains
    source_contents  what a source may contain (see `DataSourceSpec`)
    settings_config  config of the stage's `settings`
    source_texts     returns the texts of a source, to train a tokenizer on; None: the task uses no texts of sources
    fixed_shape      whether all batches share few shapes, as compilation requires
    """

    make_task: Callable[[Any, SourceMap, Tokenizer | None, Any], Task]
    model_types: type[nn.Module] | tuple[type[nn.Module], ...]
    source_contents: tuple[str, ...]
    settings_config: type[Config] = Config
    source_texts: Callable[[Any], PieceTable] | None = None
    fixed_shape: bool = True
