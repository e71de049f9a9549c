from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.errors import IntegrityError, ModelError
from cairn.pipeline.model import static_embeddings
from cairn.pipeline.model.static_embeddings import (
    MAX_TOKENS,
    PROJECTION,
    SMOOTHING,
    WEIGHTS,
    StaticEmbedder,
    fit_static,
)
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WORDS = [f"w{index}" for index in range(200)]


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of whole words that pads with a token that is also a word.

    Some published tokenizers do so.
    """
    vocabulary = {word: token for token, word in enumerate(["[PAD]", "[UNK]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("[PAD]", "[UNK]", "[SEP]")])
    tokenizer.enable_padding(length=64, pad_id=3, pad_token="w0")
    tokenizer.enable_truncation(32)
    return tokenizer


def table(dim: int = 24) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((len(WORDS) + 3, dim)).astype(np.float32) + 0.5


def texts(num_texts: int = 400) -> list[str]:
    rng = np.random.default_rng(1)
    frequencies = 1 / np.arange(1, len(WORDS) + 1)
    return [
        " ".join(rng.choice(WORDS, size=rng.integers(3, 30), p=frequencies / frequencies.sum()))
        for _ in range(num_texts)
    ]


def fitted(sample: list[str] | None = None) -> tuple[StaticEmbedder, dict[str, np.ndarray]]:
    fit = fit_static(table(), word_tokenizer(), texts() if sample is None else sample)
    return StaticEmbedder(table(), word_tokenizer(), fit), fit


def naive_vectors(rows: list[str], fit: dict[str, np.ndarray]) -> np.ndarray:
    vectors = []
    for text in rows:
        tokens = [WORDS.index(word) + 3 for word in text.split() if word in WORDS]
        weighted = [float(fit[WEIGHTS][token]) * table()[token].astype(float) for token in tokens]
        summed = sum(weighted, np.zeros(24)) @ fit[PROJECTION]
        vectors.append(summed / (np.linalg.norm(summed) or 1.0))
    return np.array(vectors)


def test_embed_equals_naive_weighted_mean() -> None:
    embedder, fit = fitted()
    rows = [*texts()[:20], " ".join(WORDS[:100])]  # the tokenizer itself would pad and cut
    np.testing.assert_allclose(embedder.embed(rows), naive_vectors(rows, fit), atol=1e-5)


def test_fit_weights_equal_the_smooth_inverse_document_frequency() -> None:
    fit = fit_static(table(), word_tokenizer(), ["w0 w0 w1", "w0"])
    seen_twice, seen_once, unseen = fit[WEIGHTS][[3, 4, 5]]
    assert (seen_twice, seen_once, unseen) == pytest.approx(
        (SMOOTHING / (SMOOTHING + 1), SMOOTHING / (SMOOTHING + 0.5), 1.0)
    )


def test_fit_removes_the_first_singular_direction_and_scales_the_others_by_a_fourth_root() -> None:
    _, fit = fitted()
    raw = {**fit, PROJECTION: np.eye(24, dtype=np.float32)}
    _, singular, directions = np.linalg.svd(naive_vectors(texts(), raw), full_matrices=False)
    np.testing.assert_allclose(directions[0] @ fit[PROJECTION], 0.0, atol=1e-4)
    expected = (singular[1:] / singular[0]) ** -0.25
    np.testing.assert_allclose(
        np.linalg.norm(fit[PROJECTION], axis=0), expected[: fit[PROJECTION].shape[1]], rtol=1e-3
    )
    tiny = fit_static(table(), word_tokenizer(), texts(8))
    np.testing.assert_array_equal(tiny[PROJECTION], np.eye(24, dtype=np.float32))


@pytest.mark.parametrize("sample", [[], [""], ["w1"], ["w1"] * 100, ["[UNK] ?"] * 100])
def test_fit_of_a_degenerate_sample_still_embeds_finite_vectors(sample: list[str]) -> None:
    vectors = fitted(sample)[0].embed(["w1 w2", "w3"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_fit_reads_evenly_spaced_texts_of_a_large_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_embeddings, "MAX_FIT_TEXTS", 100)
    spaced = fit_static(table(), word_tokenizer(), texts())
    np.testing.assert_array_equal(
        spaced[WEIGHTS], fit_static(table(), word_tokenizer(), texts()[::4])[WEIGHTS]
    )


def test_embed_of_a_text_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, _ = fitted()
    together = embedder.embed(texts())
    monkeypatch.setattr(static_embeddings, "BLOCK_TEXTS", 3)
    np.testing.assert_array_equal(
        np.vstack([embedder.embed(texts()[start : start + 7]) for start in range(0, 400, 7)]), together
    )


def test_embed_reads_the_first_known_words_and_leaves_the_callers_tokenizer_as_it_was() -> None:
    tokenizer = word_tokenizer()
    before = tokenizer.to_str()
    embedder = StaticEmbedder(table(), tokenizer, fit_static(table(), tokenizer, texts()))
    assert not embedder.embed(["", "   ", "unheard-of"]).any()
    opening = "w1 w2 " * (MAX_TOKENS // 2)
    for one, other in ((opening + "w3 " * 50, opening), ("w1 [SEP] w2", "w1 w2")):
        np.testing.assert_array_equal(embedder.embed([one]), embedder.embed([other]))
    assert tokenizer.to_str() == before


def test_fingerprint_changes_with_table_and_fit() -> None:
    (embedder, fit), (other, _) = fitted(), fitted(texts()[:300])
    moved = table()
    moved[7, 7] += 1
    of_moved = StaticEmbedder(moved, word_tokenizer(), fit)
    assert len({each.fingerprint for each in (embedder, of_moved, other)}) == 3


def test_fit_or_table_of_something_else_is_refused() -> None:
    fit = fit_static(table(24), word_tokenizer(), texts())
    with pytest.raises(IntegrityError, match="static surrogate"):
        StaticEmbedder(table(), word_tokenizer(), {"weights": np.zeros(3)})
    with pytest.raises(ModelError, match="cluster again"):
        StaticEmbedder(table(32), word_tokenizer(), fit)
    with pytest.raises(ModelError, match="different models"):
        fit_static(table()[:50], word_tokenizer(), texts())
    with pytest.raises(ModelError, match="finite"):
        fit_static(np.full_like(table(), np.nan), word_tokenizer(), texts())
