"""Shapes drawn here, for tasks that learn from scenes."""

import pytest

from data.scenes.conftest import drawn
from vitrail.data.scenes.sprites import Atlas


@pytest.fixture(scope="session")
def atlas() -> Atlas:
    return Atlas.build(drawn())
