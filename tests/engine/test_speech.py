"""Text as it comes is the text in the end, and nothing is told that is cut off later."""

from hypothesis import given
from hypothesis import strategies as st

from attnspan.engine.speech import Speech
from tests.engine.models import tokenizer

texts = st.text(alphabet="the cat äß猫🙂and", max_size=30)
stops = st.lists(st.text(alphabet="theca 猫", min_size=1, max_size=4), max_size=3)


def spoken(tokens, stop=()):
    speech, pieces = Speech(tokenizer(), stop), []
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
