import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError, TextError
from vitrail.generate import GREEDY, SamplingConfig, generate_texts, stream_tokens
from vitrail.generate.text_generation import EagerStepper
from vitrail.hub import from_hf
from vitrail.hub.tokenizer_builders import PieceType, Vocabulary, build_sentencepiece_bpe
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.tokenizer import Tokenizer

WORDS = Tokenizer.train(["the red cube and the blue ball, où est le cube 😀 ?\n"] * 9, 300, bos="<s>")


def tiny(vocab: int = WORDS.vocab_size, context: int = 96, seed: int = 0) -> Decoder:
    block = BlockConfig(
        width=32, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=48), norm="rms"
    )
    config = DecoderConfig(
        vocab_size=vocab, layers=2, block=block, rotary=RotaryConfig(head_dim=8), context_length=context
    )
    return randomize(Decoder(config), seed, spread=0.5).eval()


MODEL = tiny()


class NoCache:
    """Recompute the whole row for every token, one row at a time."""

    def __init__(self, model, rows, capacity):
        self.model, self.rows = model, [[] for _ in range(rows)]

    def prefill(self, ids, counts):
        self.rows = [row[:n] for row, n in zip(ids.tolist(), counts.tolist(), strict=True)]
        return torch.stack([self.model(torch.tensor([row]))[0, -1] for row in self.rows])

    def step(self, ids):
        for row, id in zip(self.rows, ids.tolist(), strict=True):
            row.append(id)
        return torch.stack([self.model(torch.tensor([row]))[0, -1] for row in self.rows])


def scripted(*rows: list[int]):
    """Stepper that makes the model generate exactly these ids."""

    class Scripted:
        def __init__(self, model, count, capacity):
            self.at, self.vocab = 0, model.config.vocab_size

        def _logits(self):
            ids = torch.tensor([row[min(self.at, len(row) - 1)] for row in rows])
            self.at += 1
            return torch.nn.functional.one_hot(ids, self.vocab).float()

        def prefill(self, ids, counts):
            return self._logits()

        def step(self, ids):
            return self._logits()

    return Scripted


# ---- against transformers ---------------------------------------------------------------------------------------

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def both(name: str, folder, seed: int = 0):
    import transformers

    config = getattr(transformers, f"{name}Config")(**COMMON, **FAMILIES[name])
    theirs = randomize(getattr(transformers, f"{name}ForCausalLM")(config), seed).eval()
    theirs.save_pretrained(folder)
    return theirs, from_hf(folder)


def close_calls(scores) -> int:
    """Steps before the first at which two tokens are nearly as likely."""
    for i, step in enumerate(scores):
        first, second = step[0].topk(2).values.tolist()
        if first - second <= 1e-3:
            return i
    return len(scores)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_continuations_are_those_of_transformers(name, tmp_path):
    theirs, ours = both(name, tmp_path)
    prompts = [[5], [3, 9, 27, 81, 50, 2, 4], [11, 12], list(range(1, 21))]
    batch = generate_texts(ours, prompts, max_new_tokens=32, sampling=GREEDY)
    compared = 0
    for prompt, written in zip(prompts, batch, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        sure = close_calls(out.logits)
        assert written.ids[:sure] == out.sequences[0, len(prompt) :][:sure].tolist()
        assert written.finish_reason == "length"
        compared += sure
    assert compared > 100


def test_guidance_is_that_of_transformers(tmp_path):
    theirs, ours = both("Llama", tmp_path)
    prompt, negative = [3, 9, 27, 81], [7, 5]
    out = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=24,
        do_sample=False,
        guidance_scale=2.5,
        negative_prompt_ids=torch.tensor([negative]),
        output_scores=True,
        return_dict_in_generate=True,
    )
    sure = close_calls(out.scores)
    assert sure > 8
    (written,) = generate_texts(
        ours, [prompt], max_new_tokens=24, sampling=GREEDY, guidance_scale=2.5, negative_prompts=[negative]
    )
    assert written.ids[:sure] == out.sequences[0, len(prompt) :][:sure].tolist()
    assert written.ids != generate_texts(ours, [prompt], max_new_tokens=24, sampling=GREEDY)[0].ids


def test_repetition_penalty_is_that_of_transformers(tmp_path):
    theirs, ours = both("Llama", tmp_path)
    out = theirs.generate(torch.tensor([[3, 9]]), max_new_tokens=32, do_sample=False, repetition_penalty=1.8)
    (written,) = generate_texts(ours, [[3, 9]], max_new_tokens=32, sampling=GREEDY.replace(repetition_penalty=1.8))
    assert written.ids == out[0, 2:].tolist()


# ---- the loop ---------------------------------------------------------------------------------------------------

PROMPTS = st.lists(
    st.lists(st.integers(0, MODEL.config.vocab_size - 1), min_size=1, max_size=12), min_size=1, max_size=4
)


@settings(max_examples=25)
@given(
    prompts=PROMPTS, seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.7]), guidance=st.sampled_from([1, 3])
)
def test_a_batch_is_its_rows_and_the_cache_changes_nothing(prompts, seed, temperature, guidance):
    sampling = SamplingConfig(temperature=temperature, top_k=20, seed=seed)
    options = {
        "max_new_tokens": 8,
        "guidance_scale": guidance,
        "negative_prompts": None if guidance == 1 else [[1, 2, 3]],
    }
    batch = generate_texts(MODEL, prompts, sampling=sampling, **options)
    assert batch == generate_texts(MODEL, prompts, sampling=sampling, stepper_factory=NoCache, **options)
    for i, prompt in enumerate(prompts):
        assert batch[i : i + 1] == generate_texts(MODEL, [prompt], sampling=sampling.replace(seed=seed + i), **options)


def test_a_guidance_of_one_is_the_prompt_alone():
    options = {"max_new_tokens": 16, "sampling": GREEDY}
    assert generate_texts(MODEL, [[4, 5]], guidance_scale=1, negative_prompts=[[9]], **options) == generate_texts(
        MODEL, [[4, 5]], **options
    )


def test_samples_differ_by_row_and_repeat_by_seed():
    one = generate_texts(MODEL, [[4, 5]] * 4, max_new_tokens=12, sampling=SamplingConfig(seed=7))
    assert len({tuple(written.ids) for written in one}) == 4
    assert one == generate_texts(MODEL, [[4, 5]] * 4, max_new_tokens=12, sampling=SamplingConfig(seed=7))
    assert one != generate_texts(MODEL, [[4, 5]] * 4, max_new_tokens=12)


def test_rows_stop_by_themselves():
    ids = [[5, 6, 2, 9], [2, 9, 9, 9], [5, 5, 5, 5, 5, 5, 5]]
    written = generate_texts(
        MODEL, [[1]] * 3, max_new_tokens=5, sampling=GREEDY, stop_ids=[2], stepper_factory=scripted(*ids)
    )
    assert [row.ids for row in written] == [[5, 6, 2], [2], [5, 5, 5, 5, 5]]
    assert [row.finish_reason for row in written] == ["stop", "stop", "length"]


def test_the_tokenizer_brings_its_stop_ids():
    eos = WORDS.eos_token_id
    script = [[*WORDS.encode("red"), eos, 9, 9]]
    (row,) = generate_texts(
        MODEL, ["the"], max_new_tokens=30, sampling=GREEDY, tokenizer=WORDS, stepper_factory=scripted(*script)
    )
    assert (row.text, row.finish_reason, row.ids[-1]) == ("red", "stop", eos)
    (row,) = generate_texts(
        MODEL,
        ["the"],
        max_new_tokens=30,
        sampling=GREEDY,
        tokenizer=WORDS,
        stop_ids=[],
        stepper_factory=scripted(*script),
    )
    assert row.finish_reason == "length"


def test_no_gradient_is_kept():
    model = copy.deepcopy(MODEL).requires_grad_(True)
    kept = []

    class Watch(EagerStepper):
        def step(self, ids):
            kept.append(super().step(ids))
            return kept[-1]

    list(stream_tokens(model, [[1, 2]], max_new_tokens=3, stepper_factory=Watch))
    assert kept and not any(x.requires_grad for x in kept)
    assert torch.is_grad_enabled()


def test_ids_without_text_are_never_chosen():
    model = tiny(vocab=WORDS.vocab_size + 40)
    rows = generate_texts(
        model, ["the"] * 8, max_new_tokens=40, sampling=SamplingConfig(temperature=5.0, seed=0), tokenizer=WORDS
    )
    assert max(id for row in rows for id in row.ids) < WORDS.vocab_size


# ---- text -------------------------------------------------------------------------------------------------------

TEXTS = st.text("abc é😀\n", max_size=24)
STOPS = st.lists(st.text("abc é\n", min_size=1, max_size=4), max_size=3)


def until(text: str, stops: list[str]) -> tuple[str, bool]:
    """What stop strings leave of a text, character by character."""
    for end in range(1, len(text) + 1):
        hits = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: min(hits)], True
    return text, False


def pieces_with_bytes() -> Tokenizer:
    """SentencePiece vocabulary in which text without a piece, such as a line end, is bytes."""
    grown = [" a", "ab", " ab", "bc", "b ", " ", "a", "b", "c"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *grown]
    kinds = [
        PieceType.UNKNOWN,
        PieceType.CONTROL,
        PieceType.CONTROL,
        *[PieceType.BYTE] * 256,
        *[PieceType.NORMAL] * len(grown),
    ]
    scores = [0.0] * 259 + [-float(n) for n in range(len(grown))]
    return build_sentencepiece_bpe(
        Vocabulary(pieces, kinds, {"bos": 1, "eos": 2}, add_bos=True), scores, space_symbol=" "
    )


PIECES = pieces_with_bytes()


def ids_as_bytes(text: str) -> list[int]:
    """The worst a model can do: one token a byte."""
    return [id for char in text for id in WORDS.encode(char, literal=True)]


ROOMY = tiny(context=400)


@settings(max_examples=300)
@given(prompt=TEXTS.filter(bool), text=TEXTS, stops=STOPS, way=st.sampled_from(["whole", "bytes", "pieces"]))
def test_stop_strings_are_exact_and_never_shown(prompt, text, stops, way):
    words = PIECES if way == "pieces" else WORDS
    if way == "pieces":  # as they stand after a prompt: without the space that begins a text
        ids = words.encode("\n" + text)[2:]
    else:
        ids = ids_as_bytes(text) if way == "bytes" else words.encode(text)
    options = {
        "tokenizer": words,
        "stop_strings": stops,
        "sampling": GREEDY,
        "stepper_factory": scripted([*ids, words.eos_token_id]),
    }
    expected, stopped = until(text, stops)
    pieces = list(stream_tokens(ROOMY, [prompt], **options))
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert expected.startswith(shown)
    assert shown == expected
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["string" if stopped else "stop"]
    (written,) = generate_texts(ROOMY, [prompt], **options)
    assert written == ([piece.id for piece in pieces], shown, pieces[-1].finish_reason)
    if stopped:  # as soon as it is spelled: without its last token the text holds no stop string
        before = words.decode([*words.encode("a"), *written.ids[:-1]])[1:]
        assert not until(before, stops)[1]


def test_text_comes_as_soon_as_it_is_sure():
    ids = ids_as_bytes("a漢b. END")
    pieces = [
        piece.text
        for piece in stream_tokens(
            MODEL,
            [[1]],
            max_new_tokens=len(ids),
            sampling=GREEDY,
            tokenizer=WORDS,
            stop_strings=["END"],
            stepper_factory=scripted(ids),
        )
    ]
    assert pieces == ["a", "", "", "漢", "b", ".", " ", "", "", ""]


def test_what_was_held_back_comes_at_the_end():
    ids = ids_as_bytes("a EN")
    (row,) = generate_texts(
        MODEL,
        [[1]],
        max_new_tokens=4,
        sampling=GREEDY,
        tokenizer=WORDS,
        stop_strings=["END"],
        stepper_factory=scripted(ids),
    )
    assert (row.text, row.finish_reason) == ("a EN", "length")


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": []}, ConfigError, "prompts are not a list"),
        ({"prompts": "the"}, ConfigError, "prompts are not a list"),
        ({"prompts": ["the"]}, ConfigError, "is text"),
        ({"prompts": [[1], []]}, TextError, "prompt 1 is empty"),
        ({"prompts": [[1, 5000]]}, TextError, "contains id 5000"),
        ({"prompts": [[-1]]}, TextError, "contains id -1"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
        ({"max_new_tokens": 96}, ConfigError, "exceed the context length 96"),
        ({"prompts": [[1] * 96]}, ConfigError, "exceed the context length 96"),
        ({"guidance_scale": 2.0}, ConfigError, "guidance_scale is 2.0"),
        ({"guidance_scale": 2.0, "negative_prompts": [[1], [2]]}, ConfigError, "2 negative prompts"),
        (
            {"guidance_scale": 2.0, "negative_prompts": [[1] * 95], "max_new_tokens": 5},
            ConfigError,
            "exceed the context length 96",
        ),
        ({"guidance_scale": 2.0, "negative_prompts": [[]]}, TextError, "negative prompt 0 is empty"),
        ({"stop_strings": ["x"]}, ConfigError, "stop_strings need a tokenizer"),
        ({"stop_strings": [""], "tokenizer": WORDS}, ConfigError, "non-empty strings"),
        ({"stop_strings": "END", "tokenizer": WORDS}, ConfigError, "non-empty strings"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_any_work(options, error, message):
    def never(*_):
        raise AssertionError

    with pytest.raises(error, match=message):
        stream_tokens(MODEL, **{"prompts": [[1]], "stepper_factory": never} | options)


def test_the_context_is_filled_and_not_passed():
    rows = generate_texts(MODEL, [[1] * 90, [1] * 3, [1] * 95], sampling=GREEDY)
    assert [len(row.ids) for row in rows] == [6, 93, 1]
    with pytest.raises(ConfigError) as caught:
        generate_texts(MODEL, [[1] * 3, [1] * 90], max_new_tokens=7)
    assert caught.value.remedy == "give max_new_tokens of at most 6"
