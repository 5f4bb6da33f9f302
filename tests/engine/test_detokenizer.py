"""Text as it comes is the text in the end, and nothing is told that is cut off later."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attnspan.engine.detokenizer import Detokenizer
from tests.engine.models import tokenizer

texts = st.text(alphabet="the cat äß猫🙂and", max_size=30)
stops = st.lists(st.text(alphabet="theca 猫", min_size=1, max_size=4), max_size=3)


def spoken(tokens, stop=(), after=(), by=tokenizer):
    detokenizer, pieces = Detokenizer(by(), stop, after), []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            return pieces, True
    return [*pieces, detokenizer.end()], False


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


# ---- special tokens --------------------------------------------------------------------------------------------------

END = tokenizer().convert_tokens_to_ids("<end>")


def test_a_text_to_stop_at_may_be_a_special_token():
    tokens = [*tokenizer().encode("the cat"), END, *tokenizer().encode(" and")]
    pieces, stopped = spoken(tokens, ["<end>"])
    assert stopped
    assert "".join(pieces) == "the cat"
    assert len(pieces) == len(tokenizer().encode("the cat")) + 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [("cat<end>", "the "), ("<end> and", "the cat"), ("cat<end> a", "the "), ("cat and", "the ")],
)
def test_a_text_to_stop_at_may_have_special_tokens_in_it_or_between_its_letters(stop, text):
    pieces, stopped = spoken([*tokenizer().encode("the cat"), END, *tokenizer().encode(" and")], [stop])
    assert stopped
    assert "".join(pieces) == text


@pytest.mark.parametrize("stop", ["end", "end>", "t<", "<end>x", "x<end>"])
def test_a_part_of_the_name_of_a_special_token_is_not_in_the_text(stop):
    pieces, stopped = spoken([*tokenizer().encode("the cat"), END, *tokenizer().encode(" and")], [stop])
    assert not stopped
    assert "".join(pieces) == "the cat and"


def test_the_name_of_a_special_token_is_met_in_letters_too():
    pieces, stopped = spoken(spelled("a <end>"), ["<end>"])
    assert stopped
    assert "".join(pieces) == "a "


def spelled(text):
    """A text in tokens of one letter each, none of them special."""
    names = {tokenizer().decode([token]): token for token in range(1, 257)}
    return [names[letter] for letter in text]


@given(texts, stops, st.data())
def test_special_tokens_anywhere_leave_the_text_and_its_end_as_they_are(text, stop, data):
    tokens = tokenizer().encode(text)
    places = data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))
    mixed = tokens[:]
    for place in sorted(places, reverse=True):
        mixed.insert(place, END)
    assert "".join(spoken(mixed, stop)[0]) == "".join(spoken(tokens, stop)[0])


def test_runs_of_special_tokens_take_as_long_as_they_are():
    """8,000 took seconds, each decoded with all before it. Tokens are counted, and not time."""
    counted, by = [], tokenizer()

    class Counting:
        def decode(self, token_ids, skip_special_tokens=True):
            counted.append(len(token_ids))
            return by.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting(), after=by.encode("the cat"))
    told = [detokenizer.push(token) for token in [END] * 8000 + by.encode(" and")]
    assert "".join(told) == " and"
    assert sum(counted) < 100


# ---- letters that are not there yet ----------------------------------------------------------------------------------


def test_a_text_to_stop_at_is_found_at_once_though_a_letter_is_half_there():
    inner = tokenizer()
    cat, letter = inner.encode("cat"), inner.encode("猫")
    assert len(letter) > 1

    class Joined:
        """One token that is a word and the first byte of a letter."""

        def decode(self, token_ids, skip_special_tokens=True):
            tokens = [each for token in token_ids for each in ([*cat, letter[0]] if token == -1 else [token])]
            return inner.decode(tokens, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Joined(), ["cat"])
    assert detokenizer.push(-1) == ""
    assert detokenizer.stopped
    detokenizer = Detokenizer(Joined())
    assert [detokenizer.push(-1), *(detokenizer.push(token) for token in letter[1:])] == [
        "cat",
        *[""] * (len(letter) - 2),
        "猫",
    ]


# ---- texts that are cleaned ------------------------------------------------------------------------------------------


@functools.cache
def cleaned_words():
    """As of BERT, with clean_up_tokenization_spaces: punctuation and short forms lose the space before them."""
    short = ["do", "n", "'", "t", "s", "m", "ve", "re", ".", ",", "?", "!", "it", "##s", "n't", "'s"]
    inner = Tokenizer(models.WordPiece({word: place for place, word in enumerate(["[UNK]", *short])}))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True)


words_of_it = st.lists(st.integers(1, 16), max_size=14)


@given(words_of_it)
def test_a_text_that_is_cleaned_comes_out_as_its_tokenizer_shows_it(tokens):
    pieces, _ = spoken(tokens, by=cleaned_words)
    assert "".join(pieces) == cleaned_words().decode(tokens)


@given(words_of_it, st.lists(st.sampled_from(["n't", "do", "it's", " .", ".", "' ", "s it"]), min_size=1, max_size=2))
def test_a_text_that_is_cleaned_stops_at_the_token_that_completes_a_stop(tokens, stop):
    pieces, stopped = spoken(tokens, stop, by=cleaned_words)
    texts = [cleaned_words().decode(tokens[:count]) for count in range(len(tokens) + 1)]
    first = next((count for count, text in enumerate(texts) if any(each in text for each in stop)), None)
    assert stopped == (first is not None)
    if stopped:
        assert len(pieces) == first
        text = texts[first]
        assert "".join(pieces) == text[: min(place for place in map(text.find, stop) if place >= 0)]


def test_twin_a_text_that_is_told_token_by_token_would_say_what_is_not_there():
    tokens = [1, 2, 3, 4]
    assert cleaned_words().decode(tokens) == "don't"
    assert cleaned_words().decode(tokens[:2]) == "do n"
