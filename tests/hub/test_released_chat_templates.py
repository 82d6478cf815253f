"""Chat templates of released models render as in transformers, wherever the folder stores them."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hub.test_released_configs import RELEASED
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer

FILES = ("chat_template.jinja", "chat_template.json")
TEMPLATES = {
    name: content[file] if file.endswith(".jinja") else content[file]["chat_template"]
    for name, content in RELEASED.items()
    for file in FILES
    if file in content
}
NAMED = {"bos": "<s>", "eos": "</s>"}
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATIONS = {
    "a question": [{"role": "user", "content": [text("How many legs has a spider?")]}],
    "a picture": [{"role": "user", "content": [IMAGE, text(" What is this? ")]}],
    "pictures in several turns": [
        {"role": "user", "content": [IMAGE, IMAGE, text("Which is larger?")]},
        {"role": "assistant", "content": [text("The first.")]},
        {"role": "user", "content": [text("And compared to"), IMAGE, text("?")]},
    ],
    "a system message": [
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "user", "content": [IMAGE, text("Name it.")]},
    ],
}
PLACES = {
    "chat_template.jinja": lambda template: template,
    "chat_template.json": lambda template: json.dumps({"chat_template": template}),
    "processor_config.json": lambda template: json.dumps({"chat_template": template}),
    "tokenizer_config.json": lambda template: json.dumps({"chat_template": template}),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_is_that_of_transformers(name, conversation):
    messages = CONVERSATIONS[conversation]
    given = {f"{role}_token": token for role, token in NAMED.items()}
    expected = render_jinja_template([messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **given)
    ours = ChatTemplate(TEMPLATES[name]).render(messages, add_generation_prompt=True, **given)
    assert [ours] == expected[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_template_is_found_in_every_file(name, place, tmp_path):
    Tokenizer.train(["a"], 300, **NAMED).save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    content = PLACES[place](TEMPLATES[name])
    if place == "tokenizer_config.json":
        content = json.dumps(settings | json.loads(content))
    (tmp_path / place).write_text(content)
    assert Tokenizer.load(tmp_path).chat_template == TEMPLATES[name]
