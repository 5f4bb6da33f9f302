"""Text as it comes is the text in the end, and nothing is told that is cut off later."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attnspan.engine.speech import Speech
from tests.engine.models import tokenizer

texts = st.text(alphabet="the cat äß猫🙂and", max_size=30)
stops = st.lists(st.text(alphabet="theca 猫", min_size=1, max_size=4), max_size=3)


def spoken(tokens, stop=(), after=(), by=tokenizer):
    speech, pieces = Speech(by(), stop, after), []
    for token in tokens:
        pieces.append(speech.push(token))
        if speech.stopped:
            return pieces, True
    return [*pieces, speech.end()], False


@given(texts)
def test_joined_the_pieces_are_the_text(text):
    pieces, stopped = spoken(tokenizer().encode(text))
    assert "".join(pieces) == text
    assert not stopped


@given(st.lists(st.integers(1, 299), max_size=12))
def test_tokens_that_are_no_text_come_out_as_the_tokenizer_shows_them(tokens):
    pieces, _ = spoken(tokens)
    assert "".join(pieces) == tokenizer().decode(tokens)


@given(texts, stops)
def test_text_ends_before_the_first_text_to_stop_at(text, stop):
    tokens = tokenizer().encode(text)
    pieces, stopped = spoken(tokens, stop)
    places = [place for place in (text.find(each) for each in stop) if place >= 0]
    assert stopped == bool(places)
    if not stopped:
        assert "".join(pieces) == text
    else:
        # Whoever appears first in what a token completes: of two texts that one token completes, the earlier.
        assert "".join(pieces) in {text[:place] for place in places}


@given(texts, stops)
def test_it_stops_at_the_token_that_completes_the_text(text, stop):
    tokens = tokenizer().encode(text)
    pieces, stopped = spoken(tokens, stop)
    if stopped:
        before = tokenizer().decode(tokens[: len(pieces) - 1])
        assert not any(each in before for each in stop)
        assert any(each in tokenizer().decode(tokens[: len(pieces)]) for each in stop)


TEXT = ["the cat and the dog and the hat sat there on that mat"] * 4


@functools.cache
def words():
    """Pieces that begin words bear a mark for the space before them, as of Llama 2 and Mistral."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    inner.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@functools.cache
def pieces_of_words():
    """Pieces that go on with a word bear a mark, as of BERT."""
    inner = Tokenizer(models.WordPiece(unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=60, show_progress=False, special_tokens=["?"])
    inner.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("by", [tokenizer, words, pieces_of_words])
@given(data=st.data())
def test_a_prompt_and_its_answer_are_the_text_of_both(by, data):
    some = st.lists(st.integers(1, len(by()) - 1), min_size=1, max_size=12)
    prompt, answer = data.draw(some), data.draw(some)
    before, both = by().decode(prompt), by().decode(prompt + answer)
    pieces, _ = spoken(answer, after=prompt, by=by)
    if not before.endswith("\ufffd"):  # a letter that is only completed belongs to neither
        assert before + "".join(pieces) == both


def test_twin_an_answer_that_is_read_by_itself_lacks_the_space_before_it():
    prompt, answer = words().encode("the cat"), words().encode("the cat and")[len(words().encode("the cat")) :]
    assert "".join(spoken(answer, by=words)[0]) == "and"
    assert "".join(spoken(answer, after=prompt, by=words)[0]) == " and"
