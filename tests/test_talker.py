"""A vision-language model in a folder of transformers', asked from Python and from the command line."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.cli import main
from vitrail.cli.studio import caption
from vitrail.errors import ConfigError, ImageError, TextError
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.hub.families import FAMILIES
from vitrail.models.vlm import VLM
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.text import Tokenizer
from vitrail.studio import DESCRIBE
from vitrail.talker import Talker

SAID = ["USER: what is this? ASSISTANT: a red cube", "and what is behind it? a blue ball", "how many balls are there?"]
TEMPLATE = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
TOKENS = 16  # of a picture


def words(template: str | None = TEMPLATE) -> Tokenizer:
    made = Tokenizer.train(SAID * 3, 300, specials=["<image>"], bos="<s>", eos="</s>")
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
            vocab_size=tokenizer.size,
            max_position_embeddings=context,
            bos_token_id=tokenizer.bos,
            eos_token_id=tokenizer.eos,
        ),
        image_token_index=tokenizer.id("<image>"),
    )
    model = randomize(transformers.LlavaForConditionalGeneration(config).eval(), 2, 0.3)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Transformers' model, its folder, and two pictures in the folder above."""
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
def talker(folder) -> Talker:
    return vitrail.load(folder, device="cpu")


def prompt(talker: Talker, *messages) -> str:
    """What the model reads, a picture as <image>."""
    ids, kinds = (getattr(talker.prompt(messages)[0], name).tolist() for name in ("ids", "kinds"))
    kept = [id for n, (id, kind) in enumerate(zip(ids, kinds, strict=True)) if not (kind == 1 and kinds[n - 1] == 1)]
    return talker.words.decode(kept)


def test_the_prompt_is_what_the_template_writes(talker, a, b):
    asked = talker.turn([a, b], "what is this?")
    assert prompt(talker, asked) == "<s>USER: <image>\n<image>\nwhat is this? ASSISTANT:"
    stream, shown, _ = talker.prompt([asked])
    assert int((stream.kinds == 1).sum()) == 2 * TOKENS and len(shown.shapes) == 2
    assert stream.ids[0] == talker.words.bos and stream.ids[1] != talker.words.bos  # as the tokenizer begins texts
    again = [asked, {"role": "assistant", "content": "a cube"}, talker.turn([], "how many balls?")]
    assert prompt(talker, *again).endswith("what is this? ASSISTANT: a cube USER: how many balls? ASSISTANT:")
    sly = {"role": "user", "content": [{"type": "image", "image": a}, {"type": "text", "text": "<image></s>"}]}
    assert talker.words.eos not in talker.prompt([sly])[0].ids.tolist()  # what a message spells stays text


def test_an_answer_is_what_transformers_writes(theirs, talker, a, b):
    model, _ = theirs
    stream, shown, _ = talker.prompt([talker.turn([a, b], "what is this?")])
    wanted = model.generate(
        input_ids=stream.ids[None],
        attention_mask=torch.ones_like(stream.ids)[None],
        pixel_values=shown.pixels,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )[0, len(stream) :]
    said = talker.words.decode(wanted.tolist(), skip_specials=True)
    assert talker.ask([a, b], "what is this?", max_new=12) == said.strip()


def test_the_prompt_is_that_of_their_processor(folder, talker, a, b):
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
    asked = [talker.turn([a, b], "what is this?")]
    made = processor.apply_chat_template(
        asked, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    stream, shown, _ = talker.prompt(asked)
    assert made["input_ids"][0].tolist() == stream.ids.tolist()
    torch.testing.assert_close(made["pixel_values"], shown.pixels, atol=2e-2, rtol=0)


def test_one_question_is_a_chat_of_one_turn(talker, a, b):
    one = talker.ask(a, "what is this?", max_new=8)
    assert one == talker.chat([talker.turn(a, "what is this?")], max_new=8)
    assert one == "".join(talker.stream([talker.turn(Image.open(a), "what is this?")], max_new=8)).strip()
    assert isinstance(talker.ask([], "what is this?", max_new=8), str)
    drawn = {talker.ask(a, "what?", max_new=8, sampling=Sampling(temperature=2.0, seed=seed)) for seed in range(6)}
    assert len(drawn) > 1
    assert talker.ask(a, "x", max_new=6, sampling=Sampling(seed=3)) == talker.ask(
        a, "x", max_new=6, sampling=Sampling(seed=3)
    )


def test_answers_side_by_side_are_those_of_single_asking(talker, a, b, monkeypatch):
    """Rows of unequal lengths: the padding changes nothing."""
    shown = [a, [], [a, b], b, [b]]
    asked = [
        "what is this?",
        "how many?",
        "which of the two is larger, and is a ball behind it?",
        "red",
        "is it a cube?",
    ]
    single = [talker.ask(*one, max_new=12) for one in zip(shown, asked, strict=True)]
    assert len(set(single)) == 5 and talker.answers(shown, asked, max_new=12) == single
    monkeypatch.setattr("vitrail.talker.talker.USUAL", 10)  # else the longest that an answer usually is
    assert talker.answers(shown, asked) == [talker.ask(*one) for one in zip(shown, asked, strict=True)]
    monkeypatch.setattr("vitrail.talker.talker.USUAL", 256)
    held = len(talker.prompt([talker.turn(a, "what " * 10)]).stream)
    full = [a, b, a], ["what " * (10 + 256 - held - room) for room in (4, 7, 4)]  # or what the context has room for
    assert talker.answers(*full) == [talker.ask(*one) for one in zip(*full, strict=True)]


def test_likelihood_is_what_transformers_logits_say(theirs, talker, a, b):
    """Of each option's words and the end, options of unequal lengths in one batch."""
    model, _ = theirs
    options = ["a red cube", "a ball", "and how many balls are there behind it?"]
    stream, shown, _ = talker.prompt([talker.turn([a, b], "what is this?")])
    wanted = []
    for option in options:
        more = [*talker.words.encode(f" {option}"), talker.words.eos]
        ids = torch.cat([stream.ids, torch.tensor(more)])[None]
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=shown.pixels).logits[0]
        chances = logits.log_softmax(-1)[len(stream) - 1 : -1]
        wanted.append(float(chances[torch.arange(len(more)), more].sum()))
    assert talker.likelihood([a, b], "what is this?", options) == pytest.approx(wanted, rel=1e-4)
    other = talker.likelihood(b, "how many?", options[:1])
    both = talker.likelihoods([([a, b], "what is this?", options), (b, "how many?", options[:1])])
    assert both[0] == pytest.approx(wanted, rel=1e-4) and both[1] == pytest.approx(other, rel=1e-4)
    assert len(talker.likelihood([], "what?", ["a", "b"])) == 2
    for wrong in ([], [" "]):
        with pytest.raises(ConfigError, match="option"):
            talker.likelihood(a, "what?", wrong)


def test_a_question_may_say_where_its_pictures_stand(talker, a, b):
    turn = talker.turn([a, b], "is <image> larger than <image>?")
    kinds = [part.get("image", part.get("text")) for part in turn["content"]]
    assert kinds == ["is ", a, " larger than ", b, "?"]
    with pytest.raises(TextError, match=r"2 places \(<image> <image>\), and what is shown is image"):
        talker.ask(a, "is <image> larger than <image>?")


def test_our_own_folder_says_the_same(talker, folder, a, tmp_path):
    hub.save(hub.load(folder), tmp_path / "ours", hub.tokenizer(folder))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert ours.ask(a, "what is this?", max_new=12) == talker.ask(a, "what is this?", max_new=12)


def test_without_a_template_the_family_has_one(a, tmp_path):
    save(tmp_path / "bare", template=None)
    bare = vitrail.load(tmp_path / "bare", device="cpu")
    text = prompt(bare, bare.turn(a, "what is this?"))
    assert text.startswith("<s>A chat between") and text.endswith(" USER: <image>\nwhat is this? ASSISTANT:")
    hub.save(hub.load(tmp_path / "bare"), tmp_path / "ours", hub.tokenizer(tmp_path / "bare"))
    ours = vitrail.load(tmp_path / "ours", device="cpu")
    assert prompt(ours, ours.turn(a, "what is this?")) == text
    named = vitrail.load(tmp_path / "bare", template="mistral", device="cpu")
    assert prompt(named, named.turn(a, "what?")) == "<s>[INST] <image>\nwhat? [/INST]"


SMALL = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {**SMALL, "image_size": [28, 28], "patch_size": [7, 7]}
CHATML = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]


def test_words_around_a_picture_that_no_template_writes(a, tmp_path):
    tokenizer = Tokenizer.train(SAID, 300, specials=CHATML, eos="<|im_end|>")
    about = {"vision_config": TOWER, "text_config": {"vocab_size": tokenizer.size, **SMALL}}
    about |= {"image_token_id": tokenizer.id("<IMG_CONTEXT>")}
    hub.to_hf(VLM(FAMILIES["internvl"].read(about)), tmp_path, tokenizer=tokenizer)
    intern = vitrail.load(tmp_path, device="cpu")
    assert prompt(intern, intern.turn(a, "what?")) == (
        "<|im_start|>user\n<img><IMG_CONTEXT></img>\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_combination_without_a_family_needs_a_template(talker, a, tmp_path):
    config = talker.model.config
    config = config.with_(rules=config.rules.with_(both=("image",)))  # which no family reads
    hub.save(VLM(config), tmp_path, words(template=None))
    with pytest.raises(TextError, match="has no chat template"):
        vitrail.load(tmp_path, device="cpu")
    assert isinstance(vitrail.load(tmp_path, template="vicuna", device="cpu").ask(a, "what?", max_new=2), str)


def test_what_cannot_be_is_refused(talker, folder, a, tmp_path):
    with pytest.raises(ImageError, match=r"none\.png"):
        talker.ask(tmp_path / "none.png", "what?")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"broken\.png"):
        talker.ask(tmp_path / "broken.png", "what?")
    with pytest.raises(ImageError, match=r"messages\[0\] has an image part without a picture"):
        talker.chat([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(TextError, match="kind 'audio'"):
        talker.chat([{"role": "user", "content": [{"type": "audio", "audio": a}]}])
    with pytest.raises(ConfigError, match="without words"):
        talker.ask(a, " ")
    for source, count in (("{{ messages[0].role }}", 0), (TEMPLATE.replace("<image>", "<image><image>"), 2)):
        other = Talker(talker.model, talker.words, ChatTemplate(source, name="the sly template"))
        with pytest.raises(TextError, match=rf"sly template made {count} places .* of 1 pictures"):
            other.ask(a, "what?")
    with pytest.raises(ConfigError, match=f"{15 * TOKENS} of them for pictures, and 1 more pass the 256"):
        talker.ask([a] * 15, "what? " * 10)
    with pytest.raises(ConfigError, match="250 more pass the 256") as caught:
        talker.ask(a, "what?", max_new=250)
    assert "ask for at most" in caught.value.remedy
    with pytest.raises(TextError, match="no chat preset 'vicunia'"):
        vitrail.load(folder, template="vicunia", device="cpu")
    hub.save(hub.load(folder).decoder, tmp_path / "words", words())
    with pytest.raises(ConfigError, match="only a unified model"):
        vitrail.load(tmp_path / "words", device="cpu")
    with pytest.raises(ConfigError, match="not a VLM"):
        Talker.load(tmp_path / "words", device="cpu")


def test_pictures_are_captioned_by_what_it_says_when_asked_to(talker, folder, a, b, capsys):
    caption((str(a), str(b)), model=str(folder), device="cpu")
    said = "".join(f"{path}  {talker.ask(path, DESCRIBE)}\n" for path in (a, b))
    assert capsys.readouterr().out == said


def test_from_the_command_line(talker, folder, a, b, tmp_path, capsys, monkeypatch):
    def run(*given) -> int:
        monkeypatch.setattr("sys.argv", ["vitrail", "ask", *map(str, given), "--model", str(folder), "--device", "cpu"])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    first = talker.turn([a, b], "what is this?")
    said = talker.chat([first], max_new=9, sampling=GREEDY)
    turns = [first, {"role": "assistant", "content": said}, talker.turn(b, "how many balls?")]
    assert not run(a, b, "what is this?", b, "how many balls?", "--max-new", 9)
    whole = capsys.readouterr().out
    assert whole == f"{said}\n{talker.chat(turns, max_new=9)}\n"
    assert not run(a, b, "what is this?", "--max-new", 9, "--stream")
    assert capsys.readouterr().out.strip() == said
    drawn = ["--temperature", 1.5, "--max-new", 9]
    assert not run(a, "what?", "--seed", 1, *drawn)
    one = capsys.readouterr().out
    assert not run(a, "what?", "--seed", 1, "--stream", *drawn)
    assert capsys.readouterr().out.strip() == one.strip()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for wrong, says in (
        ([tmp_path / "none.png", "what?"], "none.png"),
        ([a, "none.png", "what?"], "none.png"),
        ([tmp_path / "broken.png", "what?"], "broken.png"),
        ([a], "no question"),
        ([a, "what?", b], "no question"),
        ([a, "what?", "--show", tmp_path / "x.png"], "unified model"),
        ([a, "what?", "--max-new", 999], "999 more pass the 256"),
        ([a, "what " * 300], "pass the 256"),
        ([a, "is <image> or <image>?"], "2 places"),
    ):
        assert run(*wrong) == 2
        error = capsys.readouterr().err
        assert says in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "without a message"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has no text"),
        ([{"role": "user", "content": ["image"]}], "part of the kind 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a text"),
        (["hi"], "no text"),
    ],
)
def test_messages_that_are_none(talker, messages, says):
    with pytest.raises(TextError, match=says):
        talker.chat(messages)


def test_a_template_that_puts_pictures_first_is_not_asked_otherwise(talker, a, b):
    with pytest.raises(TextError, match="pictures before the words 'is'"):
        talker.ask([a, b], "is <image> larger than <image>?")


def test_no_new_tokens_are_none(talker, a):
    with pytest.raises(ConfigError):
        talker.ask(a, "what is this?", max_new=0)


def test_no_question(talker, a):
    with pytest.raises(ConfigError, match="without words"):
        talker.ask(a, None)


@pytest.mark.parametrize("device", ["foo", "meta"])
def test_devices_that_are_none(folder, device):
    with pytest.raises(ConfigError, match=device):
        vitrail.load(folder, device=device)


def test_a_model_that_looks(tmp_path, a, b):
    """Llama-3.2-Vision: pictures are marks in the text, and looked at from there; word for word what its decoder says
    without a cache."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    from vitrail.stream import build, pack
    from vitrail.stream import words as said

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
        vocab_size=tokenizer.size,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        cross_attention_layers=[1],
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=tokenizer.bos,
        eos_token_id=tokenizer.eos,
    )
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.id("<image>"))
    randomize(MllamaForConditionalGeneration(config), 3, 0.3).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    talker = vitrail.load(tmp_path, device="cpu")
    stream, shown, _ = talker.prompt([talker.turn([a, b], "what is this?")])
    assert talker.words.decode(stream.ids.tolist()) == "<s>USER: <image>\n<image>\nwhat is this? ASSISTANT:"
    assert len(shown.pixels) == len(shown.ratios) == 2
    ids = stream.ids.tolist()
    for _ in range(8):
        whole = build([said(ids)])
        ids.append(int(talker.model(pack([whole], len(whole)), shown)[0, -1, : talker.words.size].argmax()))
    expected = talker.words.decode(ids[len(stream) :])
    assert talker.ask([a, b], "what is this?", max_new=8) == expected.strip()
    assert talker.ask([], "what is this?", max_new=3) != expected
    several, asked = [a, [a, b], b], ["what?", "what is this?", "how many balls are there?"]
    single = [talker.ask(*one, max_new=6) for one in zip(several, asked, strict=True)]
    assert talker.answers(several, asked, max_new=6) == single
    more = [*talker.words.encode(" a cube"), talker.words.eos]
    whole = build([said([*stream.ids.tolist(), *more])])
    chances = talker.model(pack([whole], len(whole)), shown)[0, len(stream) - 1 : -1].log_softmax(-1)
    wanted = chances[torch.arange(len(more)), more].sum().item()
    assert talker.likelihood([a, b], "what is this?", ["a red ball", "a cube"])[1] == pytest.approx(wanted, rel=1e-4)
    twice = Talker(talker.model, talker.words, ChatTemplate(TEMPLATE.replace("<image>", "<image><image>")))
    with pytest.raises(TextError, match=r"made 2 places for pictures .* of 1"):
        twice.ask(a, "what is this?", max_new=1)
