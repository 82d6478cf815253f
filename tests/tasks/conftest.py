"""Fixtures: an atlas of simple shapes, and tokenizers for the texts about its scenes."""

import pytest

from data.scenes.conftest import drawn
from tasks.small_vlms import scenes_of, small
from tasks.test_contrastive_task import make_named_source
from vitrail.data.qa import build_qa_dataset
from vitrail.data.scenes.atlas import Atlas
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def atlas() -> Atlas:
    return Atlas.build(drawn())


@pytest.fixture(scope="session")
def both(atlas) -> dict[str | None, Tokenizer]:
    """A tokenizer that prepends bos to every text, and one that does not."""
    sources = scenes_of(small("mini-vlm-llava"), atlas), make_named_source()
    texts = [text for source in sources for text in build_qa_dataset(source, 1).pieces.texts[1:]]
    specials = ("<|endoftext|>", "<image>")
    return {bos: Tokenizer.train(texts, 420, special_tokens=specials, bos=bos) for bos in (None, "<s>")}


@pytest.fixture(scope="session")
def words(both) -> Tokenizer:
    return both[None]
