from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.encode import tokenization
from cairn.pipeline.encode.documents import first_tokens
from cairn.pipeline.encode.tokenization import Prefix, segments, tokenize, tokenize_after
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXTS = ["The cat sat.", "", "don't walk_er", "   ", "stone 你好 path 😀", "café walking"]
ALPHABET = "ab  \n\tcat.,_-'你好éЖ😀\u0301\u200b\x1c[]"


def test_tokenize_batch_gives_each_texts_own_ids_and_python_character_offsets(tokenizer):
    texts = [*TEXTS, "😀 é cat", "cat [SEP] mat"]
    tokens = tokenize(tokenizer, texts)
    for index, text in enumerate(texts):
        own, alone = (
            slice(*tokens.text_offsets[index : index + 2]),
            tokenizer.encode(text, add_special_tokens=False),
        )
        assert tokens.ids[own].tolist() == alone.ids
        spans = zip(tokens.start_char[own].tolist(), tokens.end_char[own].tolist(), strict=True)
        assert list(spans) == alone.offsets


def test_breaks_rank_white_space_over_punctuation_over_subwords(tokenizer):
    # the | cat ##s | ' ##... : "cats" is cat + ##s, the quote touches it, "a" follows white space.
    assert tokenize(tokenizer, ["the cats' a"]).breaks.tolist() == [2, 2, 0, 1, 2]


@given(text=st.text(alphabet=ALPHABET, max_size=60), size=st.integers(8, 20))
def test_tokenize_in_segments_equals_whole_text(tokenizer, text, size):
    # A run of letters longer than a segment is the documented exception.
    text = "".join(character if index % 5 else " " for index, character in enumerate(text))
    whole = tokenize(tokenizer, [text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "SEGMENT_CHARACTERS", size)
        patch.setattr(tokenization, "BATCH_CHARACTERS", 3 * size)
        cut = tokenize(tokenizer, [text])
    for name in ("ids", "start_char", "end_char", "breaks", "text_offsets"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name), err_msg=name)


def test_breaks_of_segments_cut_at_punctuation_are_those_of_the_whole(tokenizer, monkeypatch):
    whole = tokenize(tokenizer, ["cat.mat-cat.mat"]).breaks.tolist()
    monkeypatch.setattr(tokenization, "SEGMENT_CHARACTERS", 8)
    assert tokenize(tokenizer, ["cat.mat-cat.mat"]).breaks.tolist() == whole


@given(text=st.text(max_size=80))
def test_segments_any_text_cover_it_once_within_the_limit(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "SEGMENT_CHARACTERS", 7)
        spans = list(segments(text))
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(0 < end - start <= 7 for start, end in spans)


@pytest.mark.parametrize("most", [1, 3])
def test_first_tokens_of_texts_are_each_texts_own(tokenizer, most):
    texts = [*TEXTS, "old stone path " * 50, f"{90 * chr(0x416)} " * 5]
    for text, head in zip(texts, first_tokens(tokenizer, texts, most), strict=True):
        own, all_ids = (tokenizer.encode(each, add_special_tokens=False).ids for each in (head, text))
        assert text.startswith(head)
        assert own == all_ids[:most]


PREFIXED = ["the cat", " spaced", "", "old  stone\n path"]


def _byte_level() -> Tokenizer:
    """A byte-level BPE that writes a word with the space before it, as ModernBERT's does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "ca", "cat", "\u0120cat"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("c", "a"), ("ca", "t"), ("\u0120", "cat")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte level"])
@pytest.mark.parametrize("prefix", ["query: ", "old:", "find the way\n"])
@pytest.mark.parametrize("text", ["cat cat", "stone", "old  stone\n path"])
def test_prefix_and_text_have_the_tokens_of_both_written_in_one(tokenizer, kind, prefix, text):
    tokenizer = tokenizer if kind == "wordpiece" else _byte_level()
    parsed = Prefix.of(prefix, tokenizer)
    tokens = tokenize_after(parsed, tokenizer, [text])
    assert [*parsed.ids, *tokens.ids] == tokenizer.encode(prefix + text, add_special_tokens=False).ids


@pytest.mark.parametrize("prefix", ["query: ", "old:", ""])
def test_tokens_after_a_prefix_have_the_offsets_of_the_text_alone(tokenizer, prefix):
    after, alone = (
        tokenize_after(Prefix.of(prefix, tokenizer), tokenizer, PREFIXED),
        tokenize(tokenizer, PREFIXED),
    )
    for name in ("ids", "start_char", "end_char", "breaks", "text_offsets"):
        np.testing.assert_array_equal(getattr(after, name), getattr(alone, name))


def test_offsets_of_a_word_written_with_the_prefixs_space_start_at_the_text():
    tokenizer = _byte_level()
    tokens = tokenize_after(Prefix.of("cat ", tokenizer), tokenizer, ["cat cat"])
    assert (tokens.start_char[0], tokens.end_char.tolist()) == (0, [3, 7])
