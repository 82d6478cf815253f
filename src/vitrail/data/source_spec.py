"""Specification with which a data source registers itself: `DATA_SOURCES.register(KIND, DataSourceSpec(...))`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vitrail.config import Config
from vitrail.processing.tokenizer import Tokenizer


class SourceContext(NamedTuple):
    """What a recipe gives to a data source that it opens.

    name       name of the source in the recipe
    tokenizer  tokenizer of the recipe, for sources that need one
    shared     objects that sources of one recipe share, by any key
    """

    name: str
    tokenizer: Tokenizer | None
    shared: dict[Any, Any]


class DataSourceSpec(NamedTuple):
    """How to open a data source, and what it contains.

    config           config, whose tag is the `kind` in recipes
    open_source      opens the source; it has `__len__`, `__getitem__` and a `fingerprint` of its data
    contents         what tasks can use it for; a task accepts sources that contain one of its `source_contents`
    needs_tokenizer  whether a source with this config needs the tokenizer of the recipe
    read_texts       reads texts to train the tokenizer on, for sources that need it to be opened
    list_contents    which of the `contents` a source with this config has; all if not given

    | contents      | a source needs                                                                                |
    |---------------|-----------------------------------------------------------------------------------------------|
    | images        | `source[i]` is `SceneSample(name, index)`; `pixels(index)` is uint8 (B, 3, H, W); `config`    |
    | captions      | images, and a registered `data.image_captions.build_caption_source`                           |
    | questions     | images, and a registered `data.qa.build_qa_dataset`                                           |
    | scenes        | a `SceneSource`                                                                               |
    | text          | a `TextSource`: windows of token ids                                                          |
    | conversations | `source[i]` is a `data.formats.Sample`; `pieces`, `extreme_items`                             |
    | episodes      | `source[i]` has the keys frames (T, H, W, 3) and, if known, actions (T − 1,)                  |
    """

    config: type[Config]
    open_source: Callable[[Any, SourceContext], Any]
    contents: tuple[str, ...]
    needs_tokenizer: Callable[[Any], bool] = lambda _config: False
    read_texts: Callable[[Any], list[str]] = lambda _config: []
    list_contents: Callable[[Any], tuple[str, ...]] | None = None

    def get_contents(self, config: Any) -> tuple[str, ...]:
        """Return what a source with this config contains."""
        return self.contents if self.list_contents is None else self.list_contents(config)
