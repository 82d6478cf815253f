"""ChatPipeline with BLIP-2 and Idefics: prompts match their processors, and answers match transformers."""

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
from vitrail.processing.tokenizer import Tokenizer

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
    words = Tokenizer.train(SAID * 3, 300, bos="</s>", eos="</s>")  # OPT starts texts with its end token
    [image] = words.add_special_tokens(["<image>"])
    newline = words.encode("\n")[0]
    text = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 30}
    config = T.Blip2Config(
        vision_config={"hidden_size": 16, **TOWER},
        qformer_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20},
        text_config=T.OPTConfig(
            **text, vocab_size=words.vocab_size, max_position_embeddings=128, eos_token_id=newline
        ).to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=image,
    )
    model = randomize(T.Blip2ForConditionalGeneration(config).eval(), 3, 0.3)
    model.generation_config.eos_token_id = newline  # as released: an answer is one line
    model.save_pretrained(folder)
    words.save(folder)
    return model


def save_idefics(folder, added=ADDED, **more):
    words = Tokenizer.train(SAID * 3, 300, bos="<s>", eos="</s>")
    size = words.vocab_size
    words.add_special_tokens(added)
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
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.eos_token_id,
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


def test_blip2_answers_match_transformers(blip2, pictures):
    model, folder, chat_pipeline = blip2
    size = {"height": SIDE, "width": SIDE}
    words = T.PreTrainedTokenizerFast.from_pretrained(folder)
    words.image_token = "<image>"
    words.image_token_id = words.convert_tokens_to_ids("<image>")
    processor = T.Blip2Processor(BlipImageProcessorPil(size=size), words, num_query_tokens=QUERIES)
    processor.image_token = T.AddedToken("<image>")
    given = processor(Image.open(pictures[0]), "Question: what is this? Answer:", return_tensors="pt")
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[0], "what is this?")])
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    assert (
        stream.ids[QUERIES] == chat_pipeline.tokenizer.bos_token_id
        and (stream.ids[:QUERIES] == chat_pipeline.vision_token_ids["image"]).all()
    )
    torch.testing.assert_close(given["pixel_values"], shown.pixels, atol=1e-5, rtol=0)
    made = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=1)[0]
    output = words.decode(made[len(stream) :] if len(made) > 12 else made, skip_special_tokens=True)
    assert chat_pipeline.ask(pictures[0], "what is this?", max_new_tokens=12) == output.strip() and output.strip()


def test_blip2_conversation(blip2, pictures):
    _, _, chat_pipeline = blip2
    turns = [
        chat_pipeline.build_message(pictures[0], "what is this?"),
        {"role": "assistant", "content": "a cube"},
        chat_pipeline.build_message([], "why?"),
    ]
    text = chat_pipeline.tokenizer.decode(chat_pipeline.build_prompt(turns).stream.ids[QUERIES:].tolist())
    assert text == "</s>Question: what is this? Answer: a cube. Question: why? Answer:"
    turns[1]["content"] = "a cube."
    assert chat_pipeline.tokenizer.decode(chat_pipeline.build_prompt(turns).stream.ids[QUERIES:].tolist()) == text
    blind = chat_pipeline.build_prompt([chat_pipeline.build_message([], "why?")]).stream.ids.tolist()
    assert chat_pipeline.tokenizer.decode(blind) == "</s>Question: why? Answer:"
    with pytest.raises(TextError, match="images before the text 'what is this"):
        chat_pipeline.chat([*turns[:2], chat_pipeline.build_message(pictures[1], "and this?")])
    with pytest.raises(TextError, match="the role system"):
        chat_pipeline.chat([{"role": "system", "content": "be brief"}, turns[0]])
    assert chat_pipeline.tokenizer.encode("\n")[0] in chat_pipeline.stop_ids


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
def test_idefics_answers_match_transformers(idefics, pictures, several):
    """With the prompt format of the model card."""
    model, folder, chat_pipeline = idefics
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
        later = chat_pipeline.build_message(pictures[1], "and <image>here?")
        turns = [
            chat_pipeline.build_message(pictures, "what is this?"),
            {"role": "assistant", "content": "a cube"},
            later,
        ]
    else:
        prompts = ["User:", a, "what is this?<end_of_utterance>", "\nAssistant:"]
        turns = [chat_pipeline.build_message(pictures[0], "what is this?")]
    given = processed(folder, prompts)
    stream, shown, _ = chat_pipeline.build_prompt(turns)
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    torch.testing.assert_close(given["pixel_values"][0], shown.pixels, atol=1e-5, rtol=0)
    ends = [chat_pipeline.tokenizer.eos_token_id, chat_pipeline.tokenizer.token_to_id("<end_of_utterance>")]
    made = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=ends)[0, len(stream) :]
    output = chat_pipeline.tokenizer.decode(made.tolist(), skip_special_tokens=True)
    assert chat_pipeline.chat(turns, max_new_tokens=12) == output.strip() and output.strip()
    assert set(chat_pipeline.stop_ids) == set(ends)


def test_idefics_without_chat_tokens(pictures, tmp_path):
    save_idefics(tmp_path / "base", ADDED[:2])
    chat_pipeline = vitrail.load(tmp_path / "base", device="cpu")
    given = processed(tmp_path / "base", ["User:", Image.open(pictures[0]), "what is this?\nAssistant:"])
    stream = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[0], "what is this?")]).stream
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    hub.save(hub.load(tmp_path / "base"), tmp_path / "ours", hub.load_tokenizer(tmp_path / "base"))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert ours.ask(pictures, "what is this?", max_new_tokens=6) == chat_pipeline.ask(
        pictures, "what is this?", max_new_tokens=6
    )
    assert isinstance(chat_pipeline.ask([], "what is this?", max_new_tokens=2), str)


def test_template_of_checkpoint_takes_precedence(idefics, pictures, tmp_path):
    _, folder, _ = idefics
    words = hub.load_tokenizer(folder)
    words.chat_template = "{{ '<s>' }}{% for m in messages %}{{ '<image>SAY: ' + m.content[-1].text }}{% endfor %}"
    hub.save(hub.load(folder), tmp_path, words)
    chat_pipeline = vitrail.load(tmp_path, device="cpu")
    ids = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[0], "what?")]).stream.ids.tolist()
    assert chat_pipeline.tokenizer.decode(ids) == "<s><image>SAY: what?"
