from __future__ import annotations

import dataclasses
import shutil
from copy import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode import documents
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import TextEncoder, load_encoder, require_texts
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.landmarks import split_into_chunks
from cairn.pipeline.model.latent_attention import latent_attention_of
from cairn.pipeline.poolings import POOLINGS
from cairn.pipeline.token_vectors.codebook import TokenCodebook

from tests.model.naive_layout import naive_rows
from tests.tiny_models import context_of

TEXTS = [
    "the cat sat on the mat.",
    "old stone path " * 30,
    "😀 \u200b",
    "\u200b",
    "walking mountains, rivers; " * 12 + "end",
    "a",
    "x" * 90 + " cat",
]
PREFIX = "old stone:"
QUICK = [(False, "", 1, 1.0), (False, PREFIX, 200, 0.7), (True, "", 200, 0.7)]
SLOW = [
    (False, "", 200, 0.7),
    (False, PREFIX, 1, 1.0),
    (True, "", 1, 1.0),
    (True, PREFIX, 1, 0.7),
    (True, PREFIX, 200, 1.0),
]
VARIANTS = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
MODES = [(attention, pooling) for attention in ("chunk", "full") for pooling in POOLINGS[attention]]


def _naive_chunk_vectors(backbone, config, text, context=None):
    """One text, one row at a time, in the naive layout."""
    tokens = tokenize(backbone.tokenizer, [text])
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, config.landmark_interval)
    rows = naive_rows(
        [tokens.ids[start:end].tolist() for start, end in pairwise(chunks.token_offsets)],
        attention=config.attention,
        pooling=config.pooling,
        cls_id=backbone.cls_id,
        landmark_id=backbone.landmark_id,
        prefix=backbone.tokenizer.encode(config.document_prefix, add_special_tokens=False).ids,
        window=config.window_tokens,
        overlap=config.window_overlap_tokens,
    )
    found, lead = {}, context
    for number, (row, spans) in enumerate(rows):
        state = backbone.hidden_states(np.array([row]), np.array([len(row)]), lead, config.temperature)
        state = latent_attention_of(backbone)(state) if config.pooling == "latent" else state
        found |= {chunk: state[0, start:end].mean(0).numpy() for chunk, (start, end) in spans.items()}
        if number == 0 and config.document_context:
            lead = np.stack([found[chunk] for chunk in spans])[: config.document_context]
    vectors_MD = np.stack([found[chunk] for chunk in range(len(found))])
    return vectors_MD / np.linalg.norm(vectors_MD, axis=1, keepdims=True)


def random_context(seed=0):
    return context_of(np.random.default_rng(seed).normal(size=(5, 32)))


@pytest.fixture(scope="module")
def encoder_of(config, backbone):
    """Return a maker of encoders with some settings changed."""

    def make(context=None, backbone=backbone, codebook=None, **changes):
        return DocumentEncoder(dataclasses.replace(config, **changes), context, backbone, codebook)

    return make


def require_naive(encoder, context=None):
    """Hold the vectors of all texts together to those of one text, one row at a time."""
    encoded = encoder.encode(TEXTS)
    for index, text in enumerate(TEXTS):
        own = encoded.chunk_vectors_MV[slice(*encoded.chunk_offsets[index : index + 2])]
        naive = _naive_chunk_vectors(encoder.backbone, encoder.config, text, context)
        np.testing.assert_allclose(own, naive, atol=1e-5)


@pytest.mark.parametrize(("use_context", "prefix", "batch_tokens", "temperature"), VARIANTS)
@pytest.mark.parametrize(("attention", "pooling"), MODES)
def test_encode_batch_equals_naive_loop_over_texts(
    encoder_of, attention, pooling, use_context, prefix, batch_tokens, temperature
):
    context = random_context() if use_context else None
    encoder = encoder_of(
        context,
        attention=attention,
        pooling=pooling,
        use_context=use_context,
        document_prefix=prefix,
        batch_tokens=batch_tokens,
        temperature=temperature,
    )
    require_naive(encoder, None if context is None else context.embeddings_CD)


@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("pooling", POOLINGS["full"])
def test_encode_later_windows_read_the_first_ones_landmarks_as_input_vectors(config, backbone, pooling, most):
    plain = dataclasses.replace(config, attention="full", pooling=pooling)
    reading = dataclasses.replace(plain, document_context=most)
    without, encoded = (DocumentEncoder(each, None, backbone).encode(TEXTS) for each in (plain, reading))
    for index, text in enumerate(TEXTS):
        own = slice(*encoded.chunk_offsets[index : index + 2])
        naive = _naive_chunk_vectors(backbone, reading, text)
        np.testing.assert_allclose(encoded.chunk_vectors_MV[own], naive, atol=1e-5)
        moved = np.abs(encoded.chunk_vectors_MV[own] - without.chunk_vectors_MV[own]).max()
        # A window has room for three chunks of twelve tokens.
        assert moved > 1e-3 if own.stop - own.start > 3 else moved < 1e-5, text


@pytest.fixture(scope="module")
def headless(tiny_latent_folder, tmp_path_factory):
    """A model whose tokenizer has no [CLS]."""
    folder = shutil.copytree(tiny_latent_folder, tmp_path_factory.mktemp("headless") / "model")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("[CLS]", "[NONE]"))
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    assert backbone.cls_id is None
    return backbone


@pytest.mark.parametrize("prefix", ["", "old stone:"], ids=["bare", "prefixed"])
@pytest.mark.parametrize(("attention", "pooling"), [mode for mode in MODES if "cls" not in mode[1]])
def test_encode_without_a_cls_token_equals_naive_rows_that_begin_with_text(
    encoder_of, headless, attention, pooling, prefix
):
    require_naive(encoder_of(backbone=headless, attention=attention, pooling=pooling, document_prefix=prefix))


def test_encode_without_a_cls_token_has_room_for_one_more_and_no_pooling_of_it(encoder_of, headless):
    longest = {"landmark_interval": 95, "window_tokens": 97}
    encoded = encoder_of(backbone=headless, **longest).encode(["cat " * 95])
    assert encoded.chunk_offsets.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="choose at most 94"):
        encoder_of(**longest)
    for attention, pooling in (("chunk", "cls"), ("full", "multi_cls")):
        with pytest.raises(ConfigError, match=f"pooling {pooling} must go with a model that has"):
            encoder_of(backbone=headless, attention=attention, pooling=pooling)


def test_encode_queries_with_a_temperature_of_their_own_use_it(encoder_of):
    encoder, as_documents = encoder_of(temperature=0.9, query_temperature=0.5), encoder_of(temperature=0.9)
    sharp, plain = (
        each.encode(TEXTS).document_vectors_NV for each in (encoder_of(temperature=0.5), as_documents)
    )
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), sharp, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(TEXTS).document_vectors_NV, plain, atol=1e-6)
    np.testing.assert_allclose(as_documents.encode_queries(TEXTS), plain, atol=1e-6)
    assert not np.allclose(sharp, plain, atol=1e-3)


def test_encode_vectors_of_a_text_in_bf16_do_not_depend_on_the_texts_beside_it(config):
    encoder = DocumentEncoder(dataclasses.replace(config, precision="bf16", attention="chunk"))
    texts = [" ".join(["stone path mat"] * number) for number in range(1, 40)]
    together = np.split(encoder.encode(texts).chunk_vectors_MV, encoder.encode(texts).chunk_offsets[1:-1])
    # Another kernel for a small batch would differ in the third digit.
    for text, vectors in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text]).chunk_vectors_MV, vectors, atol=1e-5)


@pytest.mark.parametrize("truncate_dim", [1, 7, 32])
def test_encode_truncated_vectors_are_the_heads_of_whole_ones_normalised_again(encoder_of, truncate_dim):
    encoded = encoder_of(dims=truncate_dim).encode(TEXTS)
    whole = encoder_of().encode(TEXTS)
    for index in range(len(TEXTS)):
        own = slice(*whole.chunk_offsets[index : index + 2])
        heads = [
            vector[:truncate_dim] / np.linalg.norm(vector[:truncate_dim])
            for vector in whole.chunk_vectors_MV[own]
        ]
        np.testing.assert_allclose(encoded.chunk_vectors_MV[own], heads, atol=1e-6)
        np.testing.assert_allclose(
            encoded.document_vectors_NV[index], sum(heads) / np.linalg.norm(sum(heads)), atol=1e-6
        )


def test_encode_truncated_leaves_the_context_whole(encoder_of):
    whole, truncated = (
        encoder_of(random_context(), use_context=True, dims=dims).encode(TEXTS[:1]).document_vectors_NV[0, :8]
        for dims in (None, 8)
    )
    np.testing.assert_allclose(truncated, whole / np.linalg.norm(whole), atol=1e-6)


@pytest.mark.parametrize(
    ("landmarks", "interval", "pieces"),
    [
        (
            "sentence",
            18,
            [
                "the cat sat. old path! ",
                "a river, a mountain, a stone on a path and a way. ",
                "Walk on the path",
            ],
        ),
        ("structure", 13, ["the cat sat on the old mat.\n\n", "# path\n\nOld stone. The river.\n"]),
    ],
)
def test_encode_landmarks_end_chunks_at_sentences_or_before_headings(encoder_of, landmarks, interval, pieces):
    text = "".join(pieces)
    encoded = encoder_of(landmarks=landmarks, landmark_interval=interval).encode(["", text])
    spans = zip(encoded.start_char[1:], encoded.end_char[1:], strict=True)
    assert [text[start:end] for start, end in spans] == pieces
    assert encoded.end_char[0] == 0


def test_encode_codes_of_tokens_stand_with_the_chunk_that_shows_them(encoder_of, backbone):
    text = "The old cat sat on the river. " * 12
    states_TD = np.random.default_rng(0).normal(size=(300, backbone.model_dim)).astype(np.float32)
    codebook = TokenCodebook.fit(states_TD, np.ones(backbone.tokenizer.get_vocab_size(), np.float32), 1)
    encoded = encoder_of(codebook=codebook).encode([text])
    start_T = tokenize(backbone.tokenizer, [text]).start_char
    owner_T = np.searchsorted(encoded.start_char, start_T, side="right") - 1
    sizes_M = np.bincount(owner_T)
    assert len(set(sizes_M.tolist())) > 1
    assert np.diff(encoded.chunk_tokens.offsets).tolist() == sizes_M.tolist()
    steps_M = np.split(encoded.chunk_tokens.rows[:, -1].astype(int), np.cumsum(sizes_M)[:-1])
    found_T = [start + np.cumsum(steps) for start, steps in zip(encoded.start_char, steps_M, strict=True)]
    assert np.concatenate(found_T).tolist() == start_T.tolist()


@pytest.mark.parametrize("attention", ["chunk", "full"])
def test_encode_progress_counts_every_token_once(encoder_of, attention):
    heard = []
    encoded = encoder_of(attention=attention).encode(TEXTS, heard.append)
    assert len(heard) > 1
    assert sum(heard) == encoded.num_tokens.sum()
    assert encoded.num_tokens[[0, 3]].tolist() == [7, 0], "a text's own tokens"


def broken(backbone, nan_id=-1, max_rows=None):
    """Return a backbone that fails on rows holding one token, or on more rows than the device can hold."""

    def hidden_states(ids_BT, *given):
        if max_rows is not None and len(ids_BT) > max_rows:
            raise torch.OutOfMemoryError
        hidden = backbone.hidden_states(ids_BT, *given).clone()
        hidden[torch.from_numpy((ids_BT == nan_id).any(1))] = float("nan")
        return hidden

    copied = copy(backbone)
    copied.hidden_states = hidden_states
    # Only a device of its own runs out of memory in a way that a smaller batch mends; the tensors stay where
    # they are.
    copied.device = torch.device("cuda") if max_rows else backbone.device
    return copied


def test_encode_nan_from_the_model_names_the_document_or_the_query(encoder_of, backbone):
    encoder = encoder_of(backbone=broken(backbone, nan_id=backbone.tokenizer.token_to_id("walk")))
    with pytest.raises(
        ModelError, match="chunk 0 of document 4 of those encoded together; check the model's weights"
    ):
        encoder.encode(TEXTS)
    with pytest.raises(ModelError, match="chunk 0 of query 1 of those encoded together"):
        encoder.encode_queries(["old path", "walk"])


def test_encode_out_of_memory_gives_the_same_vectors_in_smaller_batches(encoder_of, backbone):
    expected = encoder_of().encode(TEXTS)
    small = encoder_of(backbone=broken(backbone, max_rows=2)).encode(TEXTS)
    np.testing.assert_allclose(small.chunk_vectors_MV, expected.chunk_vectors_MV, atol=1e-5)


@pytest.fixture(scope="module")
def queries(config):
    return TextEncoder(config)


def test_encode_queries_equal_documents_of_the_same_texts_behind_the_same_prefix_in_their_order(config):
    texts = ["old path?", "old stone path " * 20, "cat"]
    for prefix in ("", "walk on: "):
        queries = TextEncoder(dataclasses.replace(config, query_prefix=prefix, document_prefix="mat: "))
        documents = DocumentEncoder(dataclasses.replace(config, document_prefix=prefix))
        alone = np.concatenate([documents.encode([text]).document_vectors_NV for text in texts])
        np.testing.assert_allclose(queries.encode_queries(texts), alone, atol=1e-5)


@pytest.mark.parametrize("text", ["", " \n\t", "cat \ud800"])
def test_encode_query_of_no_text_is_refused(queries, text):
    with pytest.raises(ConfigError, match=r"must hold text, got an empty one at position 1|valid Unicode"):
        queries.encode_queries(["cat", text])


@pytest.mark.parametrize(("texts", "threads"), [(["a stone"], 1), (["a stone"] * 200, 2)])
def test_short_queries_are_encoded_on_one_thread(config, torch_threads, monkeypatch, texts, threads):
    torch_threads(2)
    seen = []
    embedding = documents.embed_chunks

    def listening(*args, **options):
        seen.append(torch.get_num_threads())
        return embedding(*args, **options)

    monkeypatch.setattr(documents, "embed_chunks", listening)
    DocumentEncoder(config).encode_queries(texts)
    assert seen == [threads]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "lmk"},
        {"attention": "full"},
        {"landmark_interval": 13},
        {"window_tokens": 41},
        {"window_overlap_tokens": 14},
        {"landmarks": "sentence"},
        {"landmarks": "structure"},
        {"dims": 16},
        {"layers": 1},
        {"query_prefix": "query: "},
        {"document_prefix": "passage: "},
        {"temperature": 0.9},
        {"query_temperature": 0.9},
        {"whole_text_tokens": 38},
        {"attention": "full", "document_context": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_setting_that_moves_vectors_changes_it(encoder_of, change):
    other = encoder_of(**change)
    assert other.fingerprint != encoder_of().fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollingEncoder(EncoderConfig):
    roll_metres: int = 3


def test_fingerprint_is_of_weights_the_first_settings_and_what_is_not_the_default(
    encoder_of, config, backbone
):
    names = ("pooling", "attention", "landmark_interval", "window_overlap_tokens", "temperature")
    first = {name: getattr(config, name) for name in names} | {"max_window_tokens": config.window_tokens}
    own = {"kind": "encoder", "format": 1, "weights": backbone.weights_fingerprint, "context": None}
    rolling = (
        DocumentEncoder(RollingEncoder(**dataclasses.asdict(config), roll_metres=metres), None, backbone)
        for metres in (3, 4)
    )
    coarse = dataclasses.replace(config, precision="bf16", batch_tokens=7)
    contexts = [encoder_of(random_context(seed=seed), use_context=True).fingerprint for seed in (0, 1)]
    same, other = (each.fingerprint for each in rolling)
    before = encoder_of().fingerprint
    assert before == fingerprint(**own, **first)
    assert {same, DocumentEncoder(coarse).fingerprint, encoder_of(random_context()).fingerprint} == {before}
    assert len({before, other, *contexts}) == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_context": True}, "use_context must come with a context"),
        ({"landmark_interval": 95, "window_tokens": 200}, "choose at most 94"),
        ({"attention": "full", "window_tokens": 97}, "window_tokens must be at most"),
        ({"dims": 33}, "must lie between 1 and the model's 32, got 33"),
        (
            {"document_prefix": "a " * 27},
            "document_prefix must leave a chunk of 12 tokens room .* may have 26, got 27",
        ),
        ({"query_prefix": "a " * 27}, "query_prefix must leave a chunk of 12 tokens room"),
        ({"document_context": 8}, "document_context must go with attention full"),
        (
            {"attention": "full", "document_context": 8, "use_context": True},
            "document_context must go with a transformer alone",
        ),
        ({"whole_text_tokens": 39}, "whole_text_tokens must lie between 0 and 38"),
        ({"whole_text_tokens": -1}, "whole_text_tokens must be a whole number of at least 0"),
        ({"whole_text_tokens": 95, "window_tokens": 97}, "whole_text_tokens must leave special tokens room"),
    ],
)
def test_encoder_setting_that_does_not_fit_is_refused(encoder_of, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        encoder_of(**change)


def test_encode_latent_of_a_model_without_latents_is_refused(tiny_model_folder):
    with pytest.raises(
        ConfigError, match=r"pooling latent must go with a model that holds latent_attention_model\.latents"
    ):
        DocumentEncoder(EncoderConfig(model=str(tiny_model_folder), pooling="latent"))


def test_a_text_of_few_tokens_is_one_chunk_and_a_longer_one_is_cut(encoder_of):
    texts = [" ".join(["word"] * 4), " ".join(["word"] * 30)]
    encoded, cut = encoder_of(whole_text_tokens=30).encode(texts), encoder_of().encode(texts)
    tokens = encoded.num_tokens.tolist()
    assert 12 < tokens[0] <= 30 < tokens[1]
    assert np.diff(encoded.chunk_offsets)[0] == 1 < np.diff(cut.chunk_offsets)[0]
    assert np.diff(encoded.chunk_offsets)[1] == np.diff(cut.chunk_offsets)[1]
    assert (encoded.start_char[0], encoded.end_char[0]) == (0, len(texts[0]))
    whole = encoder_of(landmark_interval=30).encode(texts[:1])
    np.testing.assert_allclose(encoded.document_vectors_NV[:1], whole.document_vectors_NV, atol=1e-6)


def test_landmark_embeddings_are_the_chunks_of_the_document_encoder(tiny_model_folder):
    encoder = load_encoder(tiny_model_folder, pooling="lmk", landmark_interval=12, precision="fp32")
    encoded = DocumentEncoder(encoder.config).encode(TEXTS)
    found = encoder.landmark_embeddings(TEXTS)
    np.testing.assert_array_equal(
        np.concatenate([each.vectors_LV for each in found]), encoded.chunk_vectors_MV
    )
    assert [len(each.start_char) for each in found] == np.diff(encoded.chunk_offsets).tolist()
    for text, each in zip(TEXTS, found, strict=True):
        assert (
            "".join(text[start:end] for start, end in zip(each.start_char, each.end_char, strict=True))
            == text
        )


def test_load_encoder_refuses_a_setting_there_is_not():
    with pytest.raises(
        ConfigError, match=r"setting must be one of model, pooling, .*, got 'pool'; leave it out"
    ):
        load_encoder(pool="mean")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("hello", r"query texts must come in a list, got 'hello'; write \[text\]"),
        (b"hello", r"query texts must come in a list, got a value of type bytes"),
        (None, r"query texts must come in a list, got None"),
        (3, r"query texts must come in a list, got 3"),
        ("long " * 50, r"query texts must come in a list, got '(long ){15}long'…; write"),
        (["cat", None], r"a query must be text, got None at position 1; leave it out"),
        (["cat", ["dog"]], r"a query must be text, got \['dog'\] at position 1"),
        (
            ["cat", "\udcff"],
            r"a query must be valid Unicode, got a lone surrogate in the one at position 1; remove it",
        ),
    ],
    ids=["string", "bytes", "none", "number", "long string", "none within", "list within", "surrogate"],
)
def test_what_is_no_list_of_texts_is_refused(texts, words):
    with pytest.raises(ConfigError, match=rf"^{words}"):
        require_texts(texts, "query")
