"""Chat templates are found in every file that transformers reads, and errors name the file."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from vitrail.errors import TextError
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    Tokenizer.train(["hi there"], 300).save(tmp_path)
    return tmp_path


def write(folder, place: str, template) -> None:
    """Write a template to a file, or to a key of a JSON file."""
    file = folder / place
    file.parent.mkdir(exist_ok=True)
    if place.endswith(".jinja"):
        file.write_text(template)
    else:
        found = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(found | {"chat_template": template}))


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
PLACES = {
    "chat_template.jinja": "chat_template.jinja",
    "chat_template.json": "chat_template.json",
    "processor_config.json": "processor_config.json",
    "tokenizer_config.json": "tokenizer_config.json",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("template", ["usual", NAMED, {"default": "usual", "tool_use": "tools"}])
def test_each_place_and_form(folder, place, template):
    if place.endswith(".jinja") and not isinstance(template, str):
        return
    write(folder, place, template)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template == "usual" and tokenizer.chat_template_file == folder / place
    assert tokenizer.named_chat_templates == ({} if template == "usual" else {"tool_use": "tools"})
    assert ChatTemplate.from_tokenizer(tokenizer).render(MESSAGES) == "usual"
    assert ChatTemplate.load(folder).render(MESSAGES) == "usual"
    if place in ("chat_template.jinja", "tokenizer_config.json"):  # those that tokenizers of transformers read
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "usual"


def test_newer_files_take_precedence(folder):
    for n, place in enumerate(reversed(PLACES)):
        write(folder, place, f"template {n}")
        assert Tokenizer.load(folder).chat_template == f"template {n}"


def test_folder_of_further_templates(folder):
    """`additional_chat_templates`, as transformers writes and reads it."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = {"default": "usual", "tool_use": "tools", "rag": "documents"}
    theirs.save_pretrained(folder / "theirs")
    ours = Tokenizer.load(folder / "theirs")
    assert ours.chat_template == "usual" and ours.named_chat_templates == {"tool_use": "tools", "rag": "documents"}
    assert ChatTemplate.from_tokenizer(ours, "rag").render(MESSAGES) == "documents"
    ours.save(folder / "ours")
    again = PreTrainedTokenizerFast.from_pretrained(folder / "ours")
    assert again.chat_template == theirs.chat_template
    assert Tokenizer.load(folder / "ours").named_chat_templates == ours.named_chat_templates
    with pytest.raises(TextError, match="chat template 'code' is missing"):
        ChatTemplate.from_tokenizer(ours, "code")


def test_one_template_of_another_name_is_the_default(folder):
    write(folder, "tokenizer_config.json", [{"name": "chat", "template": "only"}])
    assert Tokenizer.load(folder).chat_template == "only"
    write(folder, "tokenizer_config.json", [{"name": "a", "template": "1"}, {"name": "b", "template": "2"}])
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template is None and tokenizer.named_chat_templates == {"a": "1", "b": "2"}


@pytest.mark.parametrize("place", PLACES)
def test_template_that_is_not_jinja(folder, place):
    write(folder, place, "first line\n{% for m in messages %}{{ m")
    with pytest.raises(TextError, match="line 2") as error:
        ChatTemplate.from_tokenizer(Tokenizer.load(folder))
    assert str(folder / place) in error.value.problem and "fix the template" in error.value.remedy


@pytest.mark.parametrize("place", [place for place in PLACES if place.endswith(".json")])
@pytest.mark.parametrize("template", [5, [1], [{"name": "x"}], [{"name": "../x", "template": ""}], {"default": 3}])
def test_template_of_the_wrong_type(folder, place, template):
    write(folder, place, template)
    with pytest.raises(TextError, match="chat_template is") as error:
        Tokenizer.load(folder)
    assert str(folder / place) in error.value.problem and "one template" in error.value.remedy


def test_template_that_is_not_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError, match=r"chat_template\.jinja is not valid UTF-8"):
        Tokenizer.load(folder)
