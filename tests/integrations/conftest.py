"""Fixtures: a small vision-language model with image placeholders, and the adapters."""

import importlib
import sys

import numpy as np
import pytest
from PIL import Image

import vitrail
from integrations import doubles
from pipelines.test_chat import save

IN_PLACE = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for content in message['content'] %}\
{{ '<image>' if content['type'] == 'image' else content['text'] }}{% endfor %} {% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers model and its folder."""
    folder = tmp_path_factory.mktemp("asked")
    return save(folder, IN_PLACE), folder


@pytest.fixture(scope="module")
def chat_pipeline(theirs):
    return vitrail.load(theirs[1], device="cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 30, 40, 3), dtype=np.uint8)
    for n, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{n}.png")
    return [str(folder / f"{n}.png") for n in range(3)]


@pytest.fixture
def heard(monkeypatch, chat_pipeline):
    """Record the messages and options of each chat call."""
    asked = []

    def chat(messages, **how):
        asked.append((messages, how))
        return f"answer {len(asked)}"

    monkeypatch.setattr(chat_pipeline, "chat", chat)
    return asked


@pytest.fixture
def adapter(monkeypatch):
    """Return a function that imports an adapter with its framework or a test double."""

    def get(name, package):
        doubles.install(package, monkeypatch)
        monkeypatch.delitem(sys.modules, f"vitrail.integrations.{name}", raising=False)
        return importlib.import_module(f"vitrail.integrations.{name}")

    return get
