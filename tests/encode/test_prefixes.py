from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.encode.tokenization import Prefix, tokenize, tokenize_after
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXTS = ["the cat", " spaced", "", "old  stone\n path"]


def _byte_level() -> Tokenizer:
    """A byte-level BPE that writes a word with the space before it, as ModernBERT's does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "ca", "cat", "\u0120cat"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("c", "a"), ("ca", "t"), ("\u0120", "cat")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def wordpiece(tiny_model_folder):
    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte level"])
@pytest.mark.parametrize("prefix", ["query: ", "old:", "find the way\n"])
@pytest.mark.parametrize("text", ["cat cat", "stone", "old  stone\n path"])
def test_prefix_and_text_have_the_tokens_of_both_written_in_one(wordpiece, kind, prefix, text):
    tokenizer = wordpiece if kind == "wordpiece" else _byte_level()
    parsed = Prefix.of(prefix, tokenizer)
    tokens = tokenize_after(parsed, tokenizer, [text])
    assert [*parsed.ids, *tokens.ids] == tokenizer.encode(prefix + text, add_special_tokens=False).ids


@pytest.mark.parametrize("prefix", ["query: ", "old:", ""])
def test_tokens_after_a_prefix_have_the_offsets_of_the_text_alone(wordpiece, prefix):
    after, alone = tokenize_after(Prefix.of(prefix, wordpiece), wordpiece, TEXTS), tokenize(wordpiece, TEXTS)
    for name in ("ids", "start_char", "end_char", "breaks", "text_offsets"):
        np.testing.assert_array_equal(getattr(after, name), getattr(alone, name))


def test_offsets_of_a_word_written_with_the_prefixs_space_start_at_the_text():
    tokenizer = _byte_level()
    tokens = tokenize_after(Prefix.of("cat ", tokenizer), tokenizer, ["cat cat"])
    assert (tokens.start_char[0], tokens.end_char.tolist()) == (0, [3, 7])
