"""The tokenizer against transformers, and its promises over any text."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Rust

from vitrail.errors import TextError
from vitrail.processing.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

CORPUS = [
    "A small red cube stands left of the blue ball; 3 green cones lie behind it.\n",
    "Zwei große Würfel, ein Kegel – et une façade de vitraux. 窓の光 😀\n",
    "The assistant said: the cube is red, the ball is blue, the cones are green.\n",
] * 4
CHAT = ("<|im_start|>", "<|im_end|>", "<image>")
TRICKY = [
    "",
    " ",
    "  \n\t ",
    "é é",
    "👩‍👩‍👧‍👦🇫🇷",
    "漢字かな",
    "a\x00b\x1b[0m",
    "�",
    "\u202eabc",
    "1234567",
    "<|im_end|>",
    "x" * 3000,
]


def byte_level() -> Tokenizer:
    return Tokenizer.train(CORPUS, 350, special_tokens=CHAT, bos="<s>", eos="</s>")


def byte_fallback(decoder_strips: bool = True) -> Tokenizer:
    """SentencePiece vocabulary: words with ▁, and bytes for unknown text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "t", "h", "e", "▁t", "he", "▁the"]
    rust = Rust(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(rust, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"})


def metaspace() -> Tokenizer:
    """A prefix before the first word only: what stands after a special token differs from what starts a text."""
    rust = Rust(models.BPE(byte_fallback=False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    rust.decoder = decoders.Metaspace(prepend_scheme="first")
    rust.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    )
    return Tokenizer(rust, {"eos": "</s>"})


def word_piece() -> Tokenizer:
    rust = Rust(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    rust.train_from_iterator(CORPUS, trainer)
    ends = [(t, rust.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    rust.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return Tokenizer(rust, {"unk": "[UNK]"})


KINDS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, word_piece)}
BPE = KINDS["byte_level"]
kinds = pytest.mark.parametrize("words", KINDS.values(), ids=KINDS)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.text())
def test_any_text_round_trips(text):
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.decode(BPE.encode(text, literal=True)) == text


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_round_trips(text):
    ids = BPE.encode(text, add_special_tokens=True)
    assert ids[0] == BPE.bos_token_id
    assert BPE.decode(ids, skip_special_tokens=True) == ("" if text in BPE.special_tokens else text)
    assert BPE.encode_batch([text, text]) == [BPE.encode(text)] * 2


def test_training_is_deterministic_and_special_tokens_come_first(tmp_path):
    for name, texts in (("a", CORPUS), ("b", iter(CORPUS)), ("c", CORPUS[::-1])):
        Tokenizer.train(texts, 350, special_tokens=CHAT, bos="<s>", eos="</s>").save(tmp_path / name)
    first, *others = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "abc"]
    assert all(other == first for other in others)
    assert BPE.vocab_size == 350
    assert [BPE.token_to_id(token) for token in (*CHAT, "<s>", "</s>")] == [0, 1, 2, 3, 4]
    assert (BPE.bos_token_id, BPE.eos_token_id, BPE.pad_token_id, BPE.stop_ids) == (3, 4, None, (4,))


def test_training_on_nothing_still_knows_every_byte():
    words = Tokenizer.train([], 300)
    assert words.vocab_size == 257  # the bytes and <|endoftext|>: fewer than asked for, and it says so
    assert words.decode(words.encode("où 😀")) == "où 😀"


def test_training_refuses_a_small_vocabulary_and_odd_special_tokens():
    with pytest.raises(TextError, match="need 258"):
        Tokenizer.train(CORPUS, 257, special_tokens=("<a>", "<|endoftext|>"))
    with pytest.raises(TextError, match="non-empty strings"):
        Tokenizer.train(CORPUS, 300, special_tokens=("",))
    with pytest.raises(TextError, match="surrogate"):
        Tokenizer.train(["a\ud800"], 300)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@kinds
def test_saved_tokenizer_is_the_same_in_transformers(words, tmp_path):
    words.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (
        again.named_special_tokens == words.named_special_tokens
        and again.vocab_size == words.vocab_size == max(theirs.get_vocab().values()) + 1
    )
    for text in [*CORPUS[:3], *TRICKY, "the cube </s> the<s> ball"]:
        for specials in (False, True):
            ids = words.encode(text, add_special_tokens=specials)
            assert ids == again.encode(text, add_special_tokens=specials)
            assert ids == theirs.encode(text, add_special_tokens=specials)
            for skip in (False, True):
                assert words.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=20)
@given(st.lists(st.text(), min_size=1))
def test_a_trained_vocabulary_survives_the_disk(tmp_path_factory, texts):
    words = Tokenizer.train(texts, 270)
    folder = tmp_path_factory.mktemp("words")
    words.save(folder)
    again = Tokenizer.load(folder / "tokenizer.json")
    assert [again.encode(text) for text in texts] == [words.encode(text) for text in texts]
    assert again.named_special_tokens == words.named_special_tokens


def test_files_beside_the_tokenizer_are_read(tmp_path):
    BPE.save(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "pad_token": None}
    config["chat_template"] = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "</s>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 1], "temperature": 0.7}')
    words = Tokenizer.load(tmp_path)
    assert words.named_special_tokens == {"bos": "<s>", "eos": "<|im_end|>", "pad": "<pad>"}
    assert words.pad_token_id == BPE.vocab_size  # named but not in the vocabulary: added, as transformers does
    assert words.stop_ids == (1, 4)
    assert words.chat_template == "yes"
    (tmp_path / "processor_config.json").write_text('{"chat_template": {"default": "processor"}}')
    assert Tokenizer.load(tmp_path).chat_template == "processor"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.load(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    words = Tokenizer.load(tmp_path)
    assert words.chat_template == "jinja"

    words.save(tmp_path)
    assert Tokenizer.load(tmp_path).stop_ids == (1, 4)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.7


@pytest.mark.parametrize(
    "config",
    [{"eos_token_id": [1, 3]}, {"eos_token_id": [1, 3], "text_config": {}}, {"text_config": {"eos_token_id": [1, 3]}}],
)
def test_end_ids_of_a_folder_without_generation_config(config, tmp_path):
    BPE.save(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).stop_ids == (4, 1, 3)
    (tmp_path / "generation_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).stop_ids == (4,)


def test_a_stored_length_limit_does_not_cut(tmp_path):
    rust = Rust.from_str(BPE._rust.to_str())
    rust.enable_truncation(3)
    rust.enable_padding(length=5)
    rust.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(CORPUS[0]) == BPE.encode(CORPUS[0])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"hello", "is not JSON"),
        (b'{"a": 1} x', "is not JSON"),
        (b"\xff\xfe\x00", "binary"),
        (b"[1, 2]", "JSON but not a tokenizer"),
        (b'{"model_type": "llama"}', "JSON but not a tokenizer"),
        (b'{"model": {"type": "Nope"}}', "JSON but not a tokenizer"),
        ("half", "is truncated"),
    ],
)
def test_bad_files_are_named_with_a_remedy(tmp_path, data, problem):
    if data == "half":
        data = BPE._rust.to_str(pretty=True).encode()[:-2000]
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TextError, match=problem) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize("cut", [1, 10, 500, 2500])
def test_a_cut_file_is_called_cut(tmp_path, cut):
    (tmp_path / "tokenizer.json").write_bytes(BPE._rust.to_str(pretty=True).encode()[:cut])
    with pytest.raises(TextError, match="truncated"):
        Tokenizer.load(tmp_path)


def test_bad_neighbours_and_folders_are_named(tmp_path):
    BPE.save(tmp_path)
    for text, problem in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(TextError, match=rf"tokenizer_config\.json.*{problem}"):
            Tokenizer.load(tmp_path)
    with pytest.raises(TextError, match="cannot be saved"):
        BPE.save(tmp_path / "tokenizer.json")


# ── ids and tokens ────────────────────────────────────────────────────────────────────────────────────────────────


def test_added_special_tokens_get_the_next_ids():
    words = byte_level()
    first = words.vocab_size
    assert words.add_special_tokens(["<|vision_start|>", "<image>", "<|vision_end|>"]) == [first, 2, first + 1]
    assert words.vocab_size == first + 2
    assert words.encode("a<|vision_start|>b")[1] == first
    assert words.add_special_tokens(["<|vision_start|>"]) == [first]
    assert words.add_special_tokens([]) == []


def test_a_plain_token_can_be_made_special():
    words = byte_level()
    known = words.token_to_id("the")
    assert words.add_special_tokens(["the"]) == [known] and words.special_tokens["the"] == known
    assert words.vocab_size == BPE.vocab_size


def test_unknown_tokens_and_ids_are_refused():
    with pytest.raises(TextError, match=r"no token '<video>'") as caught:
        BPE.token_to_id("<video>")
    assert "add_special_tokens" in caught.value.remedy
    for bad in (-1, BPE.vocab_size, 10**12):
        with pytest.raises(TextError, match=f"id {bad} is not in the vocabulary"):
            BPE.decode([0, bad])
        with pytest.raises(TextError, match="not in the vocabulary"):
            list(BPE.decode_stream([bad]))
    with pytest.raises(TextError, match="character 2 of a text is an unpaired surrogate"):
        BPE.encode("ab\udc00")
    with pytest.raises(TextError, match="surrogate"):
        BPE.encode_batch(["ab", "\ud800"])
    with pytest.raises(TextError, match="list of non-empty strings"):
        BPE.add_special_tokens("<image>")


def test_pieces_are_legible():
    shown = [BPE.to_readable(i) for i in BPE.encode("the cube\n\t÷\x1b<image>")]
    assert "".join(shown) == "the·cube⏎⇥⟨C3⟩⟨B7⟩⟨1B⟩<image>"
    fallback = KINDS["byte_fallback"]
    assert [fallback.to_readable(i) for i in fallback.encode("the é")] == ["·the", "·", "⟨C3⟩", "⟨A9⟩"]


# ── literal special tokens ────────────────────────────────────────────────────────────────────────────────────────


@kinds
def test_special_tokens_of_strangers_stay_text(words):
    for special in words.special_tokens:
        text = f"the cube {special} is{special}red {special}"
        ids = words.encode(text, literal=True)
        assert not set(ids) & (set(words.special_tokens.values()) - {words.unk_token_id})
        if words is BPE:
            assert words.decode(ids) == text
        assert set(words.encode(text)) & set(words.special_tokens.values())


@kinds
@given(data=st.data())
@settings(max_examples=30)
def test_only_the_spans_given_are_literal(words, data):
    """With nothing to hide the twin tokenizer gives what the plain one gives; with a span, the rest is as before."""
    parts = st.sampled_from([*words.special_tokens, "the", " cube", " ", "\n", "red"])
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    twin = words._get_twin()
    found = twin.rust.encode(words._replace_special_tokens(text, bytearray(len(text))), add_special_tokens=False)
    assert ([twin.origin.get(i, i) for i in found.ids], found.offsets) == words.encode_spans(text)

    token = list(words.special_tokens)[-1]
    control = set(words.special_tokens.values()) - {
        words.unk_token_id
    }  # unk also stands for what the model cannot write
    ids = words.encode(text + token + token, literal=[(len(text), len(text) + 1)])
    kept = [i for i in words.encode(text) if i in control]
    assert [i for i in ids if i in control] == [*kept, words.special_tokens[token]]


def test_a_special_token_matched_in_any_case_stays_text():
    rust = Rust.from_str(KINDS["word_piece"]._rust.to_str())
    rust.add_special_tokens([AddedToken("<end>", normalized=True, special=True)])
    words = Tokenizer(rust)
    assert words.token_to_id("<end>") in words.encode("a <END> b")
    assert words.token_to_id("<end>") not in words.encode("a <END> b", literal=True)


def test_what_cannot_be_spelled_is_refused():
    rust = Rust(models.WordLevel({"<eos>": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(["<eos>"])
    with pytest.raises(TextError, match="cannot encode '<eos>' as plain text"):
        Tokenizer(rust).encode("a <eos>", literal=True)
    stand_in = BPE._get_twin().anchors["<image>"]
    with pytest.raises(TextError, match="private-use"):
        BPE.encode(f"<image>{stand_in}", literal=True)


def test_many_special_tokens_cost_no_more_each():
    """A stranger must not be able to stall an encoding by repeating one."""
    text = "<|im_end|>" * 20_000
    start = time.process_time()
    spans = [(at, at + 1) for at in BPE.find_special_tokens(text)]
    assert BPE.decode(BPE.encode(text, literal=spans)) == text
    assert time.process_time() - start < 4


def test_spelled_finds_whole_and_cut_special_tokens():
    assert BPE.find_special_tokens("a<image> <<s> <|im_") == [1, 10, 14]
    assert (
        BPE.find_special_tokens("<im") == [0]
        and BPE.find_special_tokens("<x") == []
        and BPE.find_special_tokens("") == []
    )


# ── offsets ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.text())
def test_offsets_cover_the_text_in_order(text):
    ids, spans = BPE.encode_spans(text)
    assert ids == BPE.encode(text)
    at = 0
    for id, (start, end) in zip(ids, spans, strict=True):
        assert start < end and start <= at  # no token is empty, none skips a character
        assert BPE.decode([id]) in text[start:end] or "�" in BPE.decode([id])
        at = max(at, end)
    assert at == len(text)


def test_offsets_keep_spaces_where_a_file_trims_them(tmp_path):
    rust = Rust.from_str(BPE._rust.to_str())
    for post in (
        processors.ByteLevel(trim_offsets=True),
        processors.Sequence([processors.ByteLevel(trim_offsets=True)]),
    ):
        rust.post_processor = post
        rust.save(str(tmp_path / "tokenizer.json"))
        assert all(start < end for start, end in Tokenizer.load(tmp_path).encode_spans("a  \n  b ")[1])


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


@kinds
@given(data=st.data())
@settings(max_examples=60)
def test_streaming_any_ids_adds_up(words, data):
    ids = data.draw(st.lists(st.integers(0, words.vocab_size - 1), max_size=30))
    for skip in (False, True):
        assert "".join(words.decode_stream(ids, skip_special_tokens=skip)) == words.decode(
            ids, skip_special_tokens=skip
        )


@given(st.text(min_size=1))
def test_streaming_never_gives_half_a_character(text):
    ids = BPE.encode(text)
    decoder, given_so_far = BPE.create_decoder(), ""
    for id in ids:
        given_so_far += decoder.push(id)
        assert text.startswith(given_so_far)
    assert given_so_far + decoder.finish() == text
    assert decoder.finish() == ""


def test_streaming_gives_text_as_soon_as_it_can():
    assert list(BPE.decode_stream(BPE.encode("a 😀 b"))) == ["a", " 😀", " b"]
    half = BPE.encode("😀")[:2]
    assert list(BPE.decode_stream(half)) == [
        BPE.decode(half)
    ]  # what never became a character is shown as decode shows it


@pytest.mark.parametrize(
    ("file", "about", "message"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id"),
        ("tokenizer_config.json", {"chat_template": [1]}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
        ("tokenizer_config.json", {"eos_token": [1]}, "eos_token"),
    ],
)
def test_wrong_files_beside_a_tokenizer_are_named(file, about, message, tmp_path):
    Tokenizer.train(["ab"], 260).save(tmp_path)
    (tmp_path / file).write_text(json.dumps(about))
    with pytest.raises(TextError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in caught.value.problem
