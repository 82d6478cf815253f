"""Pieces differently from have the ids of the sentence, or the tokenizer is refused."""

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.language import (
    QA_DRAFTERS,
    PieceTable,
    TokenTable,
    generate_questions,
    max_question_tokens,
    train_tokenizer,
)
from vitrail.errors import TextError
from vitrail.processing.tokenizer import Tokenizer

WORD = st.text(st.sampled_from("abcxyzABé日0189.,?!'\"()[]-:’"), min_size=1, max_size=6)
TEXT = st.lists(WORD, min_size=1, max_size=3).map(" ".join)


@given(st.lists(TEXT, min_size=1, max_size=12), st.data())
@settings(max_examples=60)
def test_ids_of_pieces_are_the_ids_of_the_sentence(texts, data):
    """For whatever words, numbers and marks, as long as pieces begin with a space."""
    tokenizer = Tokenizer.train(texts * 3, 300 + len(texts))
    pieces = PieceTable()
    firsts, follows = [pieces.add(t) for t in texts], [0, *(pieces.add(f" {t}") for t in texts)]
    tokens = pieces.tokenize(tokenizer)
    row = st.tuples(st.sampled_from(firsts), *[st.sampled_from(follows)] * 5)
    rows = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    expected = [tokenizer.encode(text) for text in pieces.to_texts(rows)]
    ids, lengths = tokens.to_ids(rows, max(map(len, expected)) + 2, pad=-1)
    assert lengths.tolist() == [len(e) for e in expected]
    assert [[i for i in row if i >= 0] for row in ids.tolist()] == expected


@pytest.fixture(scope="module")
def tokenizer(words):
    return train_tokenizer(words, 1500)


def test_ids_of_every_kind_are_the_tokenizers(words, scenes, tokenizer):
    tokens, batch = words.pieces.tokenize(tokenizer), scenes(3, many=200)
    for kind in QA_DRAFTERS:
        output = generate_questions(words, batch, 0, kind)
        room = max_question_tokens(words, tokens, [kind])
        for rows, length in zip((output.question, output.answer), room, strict=True):
            ids, lengths = tokens.to_ids(rows, length, check=False)
            assert int(lengths.max()) <= length  # the bound holds
            for row, n, text in zip(ids.tolist(), lengths.tolist(), words.pieces.to_texts(rows), strict=True):
                assert row[:n] == tokenizer.encode(text)
                assert not any(row[n:])


def test_pieces_are_whole_tokens_where_the_vocabulary_is_large(words):
    tokenizer = train_tokenizer(words, 6000, special_tokens=("<|endoftext|>", "<image>"))
    assert tokenizer.token_to_id("<image>") == 1
    assert len(tokenizer.encode(" elephant")) == 1
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in words.pieces.texts[1:])


def test_a_tokenizer_that_merges_over_spaces_is_refused(words):
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=3000, special_tokens=["<|endoftext|>"])
    rust.train_from_iterator(["Is there a dog in the picture?"] * 50, trainer)
    pieces = PieceTable()
    pieces.add_all(["Is there", " a dog", " in the picture?"])
    with pytest.raises(TextError, match="differently from"):
        pieces.tokenize(Tokenizer(rust))


def test_a_tokenizer_that_puts_a_space_before_every_text_is_refused():
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    rust.train_from_iterator(["there is a dog"] * 9, tokenizers.trainers.BpeTrainer(special_tokens=["?"]))
    pieces = PieceTable()
    pieces.add_all(["there is", " a dog"])
    with pytest.raises(TextError):
        pieces.tokenize(Tokenizer(rust))


def test_sentencepiece_prefix_space_precedes_only_the_first_piece():
    """As in Llama's tokenizer: words begin with a mark, and so does every text that is encoded alone."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", fuse_unk=True))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    rust.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["?"], vocab_size=90)
    rust.train_from_iterator(["there is a dog, and a cat", "there are 3 dogs"] * 9, trainer)
    tokenizer, pieces = Tokenizer(rust), PieceTable()
    first, behind = pieces.add_all(["there is", "there are"]), pieces.add_all([" a dog,", " and a cat", " 3 dogs"])
    tokens = pieces.tokenize(tokenizer)
    rows = torch.tensor([[first[0], behind[0], behind[1]], [first[1], behind[2], 0], [first[0], behind[0], behind[0]]])
    ids, lengths = tokens.to_ids(rows, 40, pad=-1)
    for row, n, text in zip(ids.tolist(), lengths.tolist(), pieces.to_texts(rows), strict=True):
        assert row[:n] == tokenizer.encode(text) and tokenizer.decode(row[:n]) == text


def test_texts_longer_than_the_row_are_reported():
    tokens = TokenTable([[], [1, 2], [3]])
    rows = torch.tensor([[1, 0, 2], [2, 0, 0]])
    ids, lengths = tokens.to_ids(rows, 4, pad=9)
    assert ids.tolist() == [[1, 2, 3, 9], [3, 9, 9, 9]]
    with pytest.raises(TextError, match="3 tokens, more than 2"):
        tokens.to_ids(rows, 2)
    ids, lengths = tokens.to_ids(rows, 2, check=False)
    assert lengths.tolist() == [3, 1]  # the cut one can be told
