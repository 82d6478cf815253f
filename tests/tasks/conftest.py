"""Shapes drawn here, for tasks that learn from scenes, and words for what is said of them."""

import pytest

from data.scenes.conftest import drawn
from tasks.small_vlms import scenes_of, small
from tasks.test_contrast import named
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.talks import talks
from vitrail.processing.text import Tokenizer


@pytest.fixture(scope="session")
def atlas() -> Atlas:
    return Atlas.build(drawn())


@pytest.fixture(scope="session")
def both(atlas) -> dict[str | None, Tokenizer]:
    """One that begins every text with a bos, and one that does not."""
    sources = scenes_of(small("mini-vlm-llava"), atlas), named()
    texts = [text for source in sources for text in talks(source, 1).pieces.texts[1:]]
    specials = ("<|endoftext|>", "<image>")
    return {bos: Tokenizer.train(texts, 420, specials=specials, bos=bos) for bos in (None, "<s>")}


@pytest.fixture(scope="session")
def words(both) -> Tokenizer:
    return both[None]
