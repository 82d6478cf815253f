"""BLIP-2 and Idefics asked: the prompt is what their processors make of their authors' words, and the answer is what
transformers' generate writes."""

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.errors import TextError
from vitrail.processing.text import Tokenizer

SAID = ["Question: what is this? Answer: a red cube. User: what is behind it?\nAssistant: a blue ball"]
SIDE, QUERIES = 20, 5
ADDED = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
TOWER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "image_size": SIDE, "patch_size": 5}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    for name, pixels in zip(
        "ab", np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8), strict=True
    ):
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return [str(folder / f"{name}.png") for name in "ab"]


def save_blip2(folder):
    words = Tokenizer.train(
        SAID * 3, 300, bos="</s>", eos="</s>"
    )  # OPT's, which begins texts with the one that ends them
    [image] = words.add_specials(["<image>"])
    newline = words.encode("\n")[0]
    text = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 30}
    config = T.Blip2Config(
        vision_config={"hidden_size": 16, **TOWER},
        qformer_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20},
        text_config=T.OPTConfig(
            **text, vocab_size=words.size, max_position_embeddings=128, eos_token_id=newline
        ).to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=image,
    )
    model = randomize(T.Blip2ForConditionalGeneration(config).eval(), 3, 0.3)
    model.generation_config.eos_token_id = newline  # as released: a line is an answer
    model.save_pretrained(folder)
    words.save(folder)
    return model


def save_idefics(folder, added=ADDED, **more):
    words = Tokenizer.train(SAID * 3, 300, bos="<s>", eos="</s>")
    size = words.size
    words.add_specials(added)
    config = T.IdeficsConfig(
        vocab_size=size,
        additional_vocab_size=len(added),
        hidden_size=24,
        num_attention_heads=2,
        intermediate_size=30,
        num_hidden_layers=2,
        cross_layer_interval=1,
        use_resampler=True,
        max_position_embeddings=256,
        bos_token_id=words.bos,
        eos_token_id=words.eos,
        pad_token_id=words.eos,
        vision_config={"embed_dim": 16, **TOWER},
        perceiver_config={
            "resampler_n_latents": 3,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 4,
        },
        **more,
    )
    model = randomize(T.IdeficsForVisionText2Text(config).eval(), 1, 0.3)
    model.save_pretrained(folder)
    words.save(folder)
    return model


# ---- BLIP-2 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blip2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blip2")
    return save_blip2(folder), folder, vitrail.load(folder, device="cpu")


def test_blip2_answers_as_transformers_does(blip2, pictures):
    model, folder, talker = blip2
    size = {"height": SIDE, "width": SIDE}
    words = T.PreTrainedTokenizerFast.from_pretrained(folder)
    words.image_token = "<image>"
    words.image_token_id = words.convert_tokens_to_ids("<image>")
    processor = T.Blip2Processor(BlipImageProcessorPil(size=size), words, num_query_tokens=QUERIES)
    processor.image_token = T.AddedToken("<image>")
    given = processor(Image.open(pictures[0]), "Question: what is this? Answer:", return_tensors="pt")
    stream, shown, _ = talker.prompt([talker.turn(pictures[0], "what is this?")])
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    assert stream.ids[QUERIES] == talker.words.bos and (stream.ids[:QUERIES] == talker.marks["image"]).all()
    torch.testing.assert_close(given["pixel_values"], shown.pixels, atol=1e-5, rtol=0)
    made = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=1)[0]
    said = words.decode(made[len(stream) :] if len(made) > 12 else made, skip_special_tokens=True)
    assert talker.ask(pictures[0], "what is this?", max_new=12) == said.strip() and said.strip()


def test_a_conversation_with_blip2(blip2, pictures):
    _, _, talker = blip2
    turns = [
        talker.turn(pictures[0], "what is this?"),
        {"role": "assistant", "content": "a cube"},
        talker.turn([], "why?"),
    ]
    text = talker.words.decode(talker.prompt(turns).stream.ids[QUERIES:].tolist())
    assert text == "</s>Question: what is this? Answer: a cube. Question: why? Answer:"
    turns[1]["content"] = "a cube."
    assert talker.words.decode(talker.prompt(turns).stream.ids[QUERIES:].tolist()) == text
    blind = talker.prompt([talker.turn([], "why?")]).stream.ids.tolist()
    assert talker.words.decode(blind) == "</s>Question: why? Answer:"
    with pytest.raises(TextError, match="pictures before the words 'what is this"):
        talker.chat([*turns[:2], talker.turn(pictures[1], "and this?")])
    with pytest.raises(TextError, match="the role system"):
        talker.chat([{"role": "system", "content": "be brief"}, turns[0]])
    assert talker.words.encode("\n")[0] in talker.stops


# ---- Idefics ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idefics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("idefics")
    return save_idefics(folder), folder, vitrail.load(folder, device="cpu")


def processed(folder, prompts: list) -> dict:
    processor = T.IdeficsProcessor(
        IdeficsImageProcessorPil(image_size=SIDE), T.PreTrainedTokenizerFast.from_pretrained(folder, pad_token="</s>")
    )
    return processor(text=prompts, add_end_of_utterance_token=False, return_tensors="pt")


@pytest.mark.parametrize("several", [False, True])
def test_idefics_answers_as_transformers_does(idefics, pictures, several):
    """In the words of its model card."""
    model, folder, talker = idefics
    a, b = (Image.open(path) for path in pictures)
    if several:
        prompts = ["User:", a, b, "what is this?<end_of_utterance>"]
        prompts += [
            "\nAssistant: a cube<end_of_utterance>",
            "\nUser: and",
            b,
            "here?<end_of_utterance>",
            "\nAssistant:",
        ]
        later = talker.turn(pictures[1], "and <image>here?")
        turns = [talker.turn(pictures, "what is this?"), {"role": "assistant", "content": "a cube"}, later]
    else:
        prompts = ["User:", a, "what is this?<end_of_utterance>", "\nAssistant:"]
        turns = [talker.turn(pictures[0], "what is this?")]
    given = processed(folder, prompts)
    stream, shown, _ = talker.prompt(turns)
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    torch.testing.assert_close(given["pixel_values"][0], shown.pixels, atol=1e-5, rtol=0)
    ends = [talker.words.eos, talker.words.id("<end_of_utterance>")]
    made = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=ends)[0, len(stream) :]
    said = talker.words.decode(made.tolist(), skip_specials=True)
    assert talker.chat(turns, max_new=12) == said.strip() and said.strip()
    assert set(talker.stops) == set(ends)


def test_idefics_that_was_not_taught_to_talk(pictures, tmp_path):
    save_idefics(tmp_path / "base", ADDED[:2])
    talker = vitrail.load(tmp_path / "base", device="cpu")
    given = processed(tmp_path / "base", ["User:", Image.open(pictures[0]), "what is this?\nAssistant:"])
    stream = talker.prompt([talker.turn(pictures[0], "what is this?")]).stream
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    hub.save(hub.load(tmp_path / "base"), tmp_path / "ours", hub.tokenizer(tmp_path / "base"))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert ours.ask(pictures, "what is this?", max_new=6) == talker.ask(pictures, "what is this?", max_new=6)
    assert isinstance(talker.ask([], "what is this?", max_new=2), str)


def test_the_folders_own_template_goes_first(idefics, pictures, tmp_path):
    _, folder, _ = idefics
    words = hub.tokenizer(folder)
    words.chat_template = "{{ '<s>' }}{% for m in messages %}{{ '<image>SAY: ' + m.content[-1].text }}{% endfor %}"
    hub.save(hub.load(folder), tmp_path, words)
    talker = vitrail.load(tmp_path, device="cpu")
    ids = talker.prompt([talker.turn(pictures[0], "what?")]).stream.ids.tolist()
    assert talker.words.decode(ids) == "<s><image>SAY: what?"
