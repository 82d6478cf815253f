"""ChatPipeline on a transformers checkpoint, from Python and from the command line."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.cli import main
from vitrail.cli.drawing_commands import caption_images
from vitrail.errors import ConfigError, ImageError, TextError
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.models.vlm import VLM
from vitrail.pipelines import ChatPipeline
from vitrail.pipelines.unified import CAPTION_PROMPT, UnifiedPipeline
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES

SAID = ["USER: what is this? ASSISTANT: a red cube", "and what is behind it? a blue ball", "how many balls are there?"]
TEMPLATE = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
TOKENS = 16  # of an image


def words(template: str | None = TEMPLATE) -> Tokenizer:
    made = Tokenizer.train(SAID * 3, 300, special_tokens=["<image>"], bos="<s>", eos="</s>")
    made.chat_template = template
    return made


def save(folder, template: str | None = TEMPLATE, context: int = 256, **text):
    import transformers

    tokenizer = words(template)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=7,
        ),
        text_config=transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=tokenizer.vocab_size,
            max_position_embeddings=context,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_index=tokenizer.token_to_id("<image>"),
    )
    model = randomize(transformers.LlavaForConditionalGeneration(config).eval(), 2, 0.3)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers model and its folder, with two images in the parent folder."""
    folder = tmp_path_factory.mktemp("talker")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(folder / f"{name}.png")
    return save(folder / "hf"), folder / "hf"


@pytest.fixture(scope="module")
def folder(theirs):
    return theirs[1]


@pytest.fixture(scope="module")
def a(folder) -> str:
    return str(folder.parent / "a.png")


@pytest.fixture(scope="module")
def b(folder) -> str:
    return str(folder.parent / "b.png")


@pytest.fixture(scope="module")
def chat_pipeline(folder) -> ChatPipeline:
    return vitrail.load(folder, device="cpu")


def prompt(chat_pipeline: ChatPipeline, *messages) -> str:
    """Decode a prompt, with <image> for each image."""
    ids, kinds = (getattr(chat_pipeline.build_prompt(messages)[0], name).tolist() for name in ("ids", "kinds"))
    kept = [id for n, (id, kind) in enumerate(zip(ids, kinds, strict=True)) if not (kind == 1 and kinds[n - 1] == 1)]
    return chat_pipeline.tokenizer.decode(kept)


def test_prompt_matches_template(chat_pipeline, a, b):
    asked = chat_pipeline.build_message([a, b], "what is this?")
    assert prompt(chat_pipeline, asked) == "<s>USER: <image>\n<image>\nwhat is this? ASSISTANT:"
    stream, shown, _ = chat_pipeline.build_prompt([asked])
    assert int((stream.kinds == 1).sum()) == 2 * TOKENS and len(shown.layouts) == 2
    assert (
        stream.ids[0] == chat_pipeline.tokenizer.bos_token_id and stream.ids[1] != chat_pipeline.tokenizer.bos_token_id
    )  # one bos, as the tokenizer prepends
    again = [asked, {"role": "assistant", "content": "a cube"}, chat_pipeline.build_message([], "how many balls?")]
    assert prompt(chat_pipeline, *again).endswith("what is this? ASSISTANT: a cube USER: how many balls? ASSISTANT:")
    sly = {"role": "user", "content": [{"type": "image", "image": a}, {"type": "text", "text": "<image></s>"}]}
    assert (
        chat_pipeline.tokenizer.eos_token_id not in chat_pipeline.build_prompt([sly])[0].ids.tolist()
    )  # special tokens in a message stay text


def test_answer_matches_transformers(theirs, chat_pipeline, a, b):
    model, _ = theirs
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message([a, b], "what is this?")])
    wanted = model.generate(
        input_ids=stream.ids[None],
        attention_mask=torch.ones_like(stream.ids)[None],
        pixel_values=shown.pixels,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )[0, len(stream) :]
    output = chat_pipeline.tokenizer.decode(wanted.tolist(), skip_special_tokens=True)
    assert chat_pipeline.ask([a, b], "what is this?", max_new_tokens=12) == output.strip()


def test_prompt_matches_processor(folder, chat_pipeline, a, b):
    import transformers

    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    asked = [chat_pipeline.build_message([a, b], "what is this?")]
    made = processor.apply_chat_template(
        asked, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    stream, shown, _ = chat_pipeline.build_prompt(asked)
    assert made["input_ids"][0].tolist() == stream.ids.tolist()
    torch.testing.assert_close(made["pixel_values"], shown.pixels, atol=2e-2, rtol=0)


def test_ask_equals_single_turn_chat(chat_pipeline, a, b):
    one = chat_pipeline.ask(a, "what is this?", max_new_tokens=8)
    assert one == chat_pipeline.chat([chat_pipeline.build_message(a, "what is this?")], max_new_tokens=8)
    assert (
        one
        == "".join(
            chat_pipeline.stream_chat([chat_pipeline.build_message(Image.open(a), "what is this?")], max_new_tokens=8)
        ).strip()
    )
    assert isinstance(chat_pipeline.ask([], "what is this?", max_new_tokens=8), str)
    drawn = {
        chat_pipeline.ask(a, "what?", max_new_tokens=8, sampling=SamplingConfig(temperature=2.0, seed=seed))
        for seed in range(6)
    }
    assert len(drawn) > 1
    assert chat_pipeline.ask(a, "x", max_new_tokens=6, sampling=SamplingConfig(seed=3)) == chat_pipeline.ask(
        a, "x", max_new_tokens=6, sampling=SamplingConfig(seed=3)
    )


def test_batched_answers_match_single_answers(chat_pipeline, a, b, monkeypatch):
    """Rows with different lengths: padding does not change answers."""
    shown = [a, [], [a, b], b, [b]]
    asked = [
        "what is this?",
        "how many?",
        "which of the two is larger, and is a ball behind it?",
        "red",
        "is it a cube?",
    ]
    single = [chat_pipeline.ask(*one, max_new_tokens=12) for one in zip(shown, asked, strict=True)]
    assert len(set(single)) == 5 and chat_pipeline.ask_batch(shown, asked, max_new_tokens=12) == single
    monkeypatch.setattr("vitrail.pipelines.chat.DEFAULT_MAX_NEW_TOKENS", 10)  # the default answer length
    assert chat_pipeline.ask_batch(shown, asked) == [chat_pipeline.ask(*one) for one in zip(shown, asked, strict=True)]
    monkeypatch.setattr("vitrail.pipelines.chat.DEFAULT_MAX_NEW_TOKENS", 256)
    held = len(chat_pipeline.build_prompt([chat_pipeline.build_message(a, "what " * 10)]).stream)
    full = [a, b, a], ["what " * (10 + 256 - held - room) for room in (4, 7, 4)]  # limited by the context
    assert chat_pipeline.ask_batch(*full) == [chat_pipeline.ask(*one) for one in zip(*full, strict=True)]


def test_loglikelihood_matches_transformers(theirs, chat_pipeline, a, b):
    """Sum over the tokens of each option and the end token; options with different lengths share a batch."""
    model, _ = theirs
    options = ["a red cube", "a ball", "and how many balls are there behind it?"]
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message([a, b], "what is this?")])
    wanted = []
    for option in options:
        more = [*chat_pipeline.tokenizer.encode(f" {option}"), chat_pipeline.tokenizer.eos_token_id]
        ids = torch.cat([stream.ids, torch.tensor(more)])[None]
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=shown.pixels).logits[0]
        chances = logits.log_softmax(-1)[len(stream) - 1 : -1]
        wanted.append(float(chances[torch.arange(len(more)), more].sum()))
    assert chat_pipeline.loglikelihood([a, b], "what is this?", options) == pytest.approx(wanted, rel=1e-4)
    other = chat_pipeline.loglikelihood(b, "how many?", options[:1])
    both = chat_pipeline.loglikelihoods([([a, b], "what is this?", options), (b, "how many?", options[:1])])
    assert both[0] == pytest.approx(wanted, rel=1e-4) and both[1] == pytest.approx(other, rel=1e-4)
    assert len(chat_pipeline.loglikelihood([], "what?", ["a", "b"])) == 2
    for wrong in ([], [" "]):
        with pytest.raises(ConfigError, match="option"):
            chat_pipeline.loglikelihood(a, "what?", wrong)


def test_image_placeholders_in_question(chat_pipeline, a, b):
    turn = chat_pipeline.build_message([a, b], "is <image> larger than <image>?")
    kinds = [part.get("image", part.get("text")) for part in turn["content"]]
    assert kinds == ["is ", a, " larger than ", b, "?"]
    with pytest.raises(TextError, match=r"2 placeholders \(<image> <image>\), but the media are: image"):
        chat_pipeline.ask(a, "is <image> larger than <image>?")


def test_native_checkpoint_gives_same_answer(chat_pipeline, folder, a, tmp_path):
    hub.save(hub.load(folder), tmp_path / "ours", hub.load_tokenizer(folder))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert ours.ask(a, "what is this?", max_new_tokens=12) == chat_pipeline.ask(a, "what is this?", max_new_tokens=12)


def test_family_template_is_default(a, tmp_path):
    save(tmp_path / "bare", template=None)
    bare = vitrail.load(tmp_path / "bare", device="cpu")
    text = prompt(bare, bare.build_message(a, "what is this?"))
    assert text.startswith("<s>A chat between") and text.endswith(" USER: <image>\nwhat is this? ASSISTANT:")
    hub.save(hub.load(tmp_path / "bare"), tmp_path / "ours", hub.load_tokenizer(tmp_path / "bare"))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert prompt(ours, ours.build_message(a, "what is this?")) == text
    named = vitrail.load(tmp_path / "bare", template="mistral", device="cpu")
    assert prompt(named, named.build_message(a, "what?")) == "<s>[INST] <image>\nwhat? [/INST]"


SMALL = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {**SMALL, "image_size": [28, 28], "patch_size": [7, 7]}
CHATML = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]


def test_image_boundary_tokens(a, tmp_path):
    tokenizer = Tokenizer.train(SAID, 300, special_tokens=CHATML, eos="<|im_end|>")
    text = {"vocab_size": tokenizer.vocab_size, "num_key_value_heads": 2, **SMALL}
    about = {"vision_config": TOWER, "text_config": text}
    about |= {"image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>")}
    hub.to_hf(VLM(FAMILIES["internvl"].from_hf_config(about)), tmp_path, tokenizer=tokenizer)
    intern = vitrail.load(tmp_path, device="cpu")
    assert prompt(intern, intern.build_message(a, "what?")) == (
        "<|im_start|>user\n<img><IMG_CONTEXT></img>\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_without_family_needs_template(chat_pipeline, a, tmp_path):
    config = chat_pipeline.model.config
    config = config.replace(rules=config.rules.replace(bidirectional=("image",)))  # not supported by any family
    hub.save(VLM(config), tmp_path, words(template=None))
    with pytest.raises(TextError, match="has no chat template"):
        vitrail.load(tmp_path, device="cpu")
    assert isinstance(vitrail.load(tmp_path, template="vicuna", device="cpu").ask(a, "what?", max_new_tokens=2), str)


def test_invalid_inputs_raise(chat_pipeline, folder, a, tmp_path):
    with pytest.raises(ImageError, match=r"none\.png"):
        chat_pipeline.ask(tmp_path / "none.png", "what?")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"broken\.png"):
        chat_pipeline.ask(tmp_path / "broken.png", "what?")
    with pytest.raises(ImageError, match=r"messages\[0\] has an image part without an image"):
        chat_pipeline.chat([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(TextError, match="type 'audio'"):
        chat_pipeline.chat([{"role": "user", "content": [{"type": "audio", "audio": a}]}])
    with pytest.raises(ConfigError, match="is empty"):
        chat_pipeline.ask(a, " ")
    for source, count in (("{{ messages[0].role }}", 0), (TEMPLATE.replace("<image>", "<image><image>"), 2)):
        other = ChatPipeline(
            chat_pipeline.model, chat_pipeline.tokenizer, ChatTemplate(source, name="the sly template")
        )
        with pytest.raises(TextError, match=rf"sly template wrote {count} placeholders"):
            other.ask(a, "what?")
    with pytest.raises(
        ConfigError, match=f"{15 * TOKENS} of them for images, and 1 more exceed the context length 256"
    ):
        chat_pipeline.ask([a] * 15, "what? " * 10)
    with pytest.raises(ConfigError, match="250 more exceed the context length 256") as caught:
        chat_pipeline.ask(a, "what?", max_new_tokens=250)
    assert "generate at most" in caught.value.remedy
    with pytest.raises(TextError, match="unknown chat template preset 'vicunia'"):
        vitrail.load(folder, template="vicunia", device="cpu")
    hub.save(hub.load(folder).decoder, tmp_path / "words", words())
    with pytest.raises(ConfigError, match="only a unified model"):
        UnifiedPipeline.load(tmp_path / "words", device="cpu")
    with pytest.raises(ConfigError, match="not a VLM"):
        ChatPipeline.load(tmp_path / "words", device="cpu")


def test_caption_command(chat_pipeline, folder, a, b, capsys):
    caption_images((str(a), str(b)), model=str(folder), device="cpu")
    output = "".join(f"{path}  {chat_pipeline.ask(path, CAPTION_PROMPT)}\n" for path in (a, b))
    assert capsys.readouterr().out == output


def test_command_line(chat_pipeline, folder, a, b, tmp_path, capsys, monkeypatch):
    def run(*given) -> int:
        monkeypatch.setattr("sys.argv", ["vitrail", "ask", *map(str, given), "--model", str(folder), "--device", "cpu"])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    first = chat_pipeline.build_message([a, b], "what is this?")
    output = chat_pipeline.chat([first], max_new_tokens=9, sampling=GREEDY)
    turns = [first, {"role": "assistant", "content": output}, chat_pipeline.build_message(b, "how many balls?")]
    assert not run(a, b, "what is this?", b, "how many balls?", "--max-new-tokens", 9)
    whole = capsys.readouterr().out
    assert whole == f"{output}\n{chat_pipeline.chat(turns, max_new_tokens=9)}\n"
    assert not run(a, b, "what is this?", "--max-new-tokens", 9, "--stream")
    assert capsys.readouterr().out.strip() == output
    drawn = ["--temperature", 1.5, "--max-new-tokens", 9]
    assert not run(a, "what?", "--seed", 1, *drawn)
    one = capsys.readouterr().out
    assert not run(a, "what?", "--seed", 1, "--stream", *drawn)
    assert capsys.readouterr().out.strip() == one.strip()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for wrong, message in (
        ([tmp_path / "none.png", "what?"], "none.png"),
        ([a, "none.png", "what?"], "none.png"),
        ([tmp_path / "broken.png", "what?"], "broken.png"),
        ([a], "question is missing"),
        ([a, "what?", b], "question is missing"),
        ([a, "what?", "--heatmap", tmp_path / "x.png"], "unified model"),
        ([a, "what?", "--max-new-tokens", 999], "999 more exceed the context length 256"),
        ([a, "what " * 300], "exceed the context length 256"),
        ([a, "is <image> or <image>?"], "2 placeholders"),
    ):
        assert run(*wrong) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"role": "user", "content": 5}], r"content of messages\[0\]"),
        ([{"role": "user", "content": ["image"]}], "part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
        (["hi"], "neither a text"),
    ],
)
def test_invalid_messages_raise(chat_pipeline, messages, message):
    with pytest.raises(TextError, match=message):
        chat_pipeline.chat(messages)


def test_template_that_moves_images_raises(chat_pipeline, a, b):
    with pytest.raises(TextError, match="images before the text 'is'"):
        chat_pipeline.ask([a, b], "is <image> larger than <image>?")


def test_zero_new_tokens_raise(chat_pipeline, a):
    with pytest.raises(ConfigError):
        chat_pipeline.ask(a, "what is this?", max_new_tokens=0)


def test_empty_question_raises(chat_pipeline, a):
    with pytest.raises(ConfigError, match="is empty"):
        chat_pipeline.ask(a, None)


@pytest.mark.parametrize("device", ["foo", "meta"])
def test_invalid_device_raises(folder, device):
    with pytest.raises(ConfigError, match=device):
        vitrail.load(folder, device=device)


def test_cross_attention_vlm(tmp_path, a, b):
    """Llama-3.2-Vision: answers match the decoder token by token without a cache."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    from vitrail.stream import build_stream, pack_streams
    from vitrail.stream import text_part as output

    tokenizer = words()
    vision = MllamaVisionConfig(
        hidden_size=12,
        attention_heads=2,
        num_hidden_layers=2,
        num_global_layers=1,
        intermediate_size=20,
        patch_size=4,
        image_size=8,
        max_num_tiles=4,
        intermediate_layers_indices=[0],
        vision_output_dim=24,
    )
    text = MllamaTextConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        cross_attention_layers=[1],
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.token_to_id("<image>"))
    randomize(MllamaForConditionalGeneration(config), 3, 0.3).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    chat_pipeline = vitrail.load(tmp_path, device="cpu")
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message([a, b], "what is this?")])
    assert chat_pipeline.tokenizer.decode(stream.ids.tolist()) == "<s>USER: <image>\n<image>\nwhat is this? ASSISTANT:"
    assert len(shown.pixels) == len(shown.aspect_ratios) == 2
    ids = stream.ids.tolist()
    for _ in range(8):
        whole = build_stream([output(ids)])
        ids.append(
            int(
                chat_pipeline.model(pack_streams([whole], len(whole)), shown)[
                    0, -1, : chat_pipeline.tokenizer.vocab_size
                ].argmax()
            )
        )
    expected = chat_pipeline.tokenizer.decode(ids[len(stream) :])
    assert chat_pipeline.ask([a, b], "what is this?", max_new_tokens=8) == expected.strip()
    assert chat_pipeline.ask([], "what is this?", max_new_tokens=3) != expected
    several, asked = [a, [a, b], b], ["what?", "what is this?", "how many balls are there?"]
    single = [chat_pipeline.ask(*one, max_new_tokens=6) for one in zip(several, asked, strict=True)]
    assert chat_pipeline.ask_batch(several, asked, max_new_tokens=6) == single
    more = [*chat_pipeline.tokenizer.encode(" a cube"), chat_pipeline.tokenizer.eos_token_id]
    whole = build_stream([output([*stream.ids.tolist(), *more])])
    chances = chat_pipeline.model(pack_streams([whole], len(whole)), shown)[0, len(stream) - 1 : -1].log_softmax(-1)
    wanted = chances[torch.arange(len(more)), more].sum().item()
    assert chat_pipeline.loglikelihood([a, b], "what is this?", ["a red ball", "a cube"])[1] == pytest.approx(
        wanted, rel=1e-4
    )
    twice = ChatPipeline(
        chat_pipeline.model, chat_pipeline.tokenizer, ChatTemplate(TEMPLATE.replace("<image>", "<image><image>"))
    )
    with pytest.raises(TextError, match=r"wrote 2 placeholders .* for 1 image"):
        twice.ask(a, "what is this?", max_new_tokens=1)
