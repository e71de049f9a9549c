from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.config import POOLINGS, EncoderConfig
from pipeline.context.store import ContextSet
from pipeline.corpus.tokenization import tokenize
from pipeline.encode.documents import DocumentEncoder, encode_shard
from pipeline.errors import ConfigError, ModelError
from pipeline.manifest import fingerprint
from pipeline.model.backbone import load_backbone
from pipeline.model.landmarks import split_into_chunks
from pipeline.types import chunks_schema, documents_schema

TEXTS = [
    "the cat sat on the mat.",
    "old stone path " * 30,
    "😀 \u200b",
    "\u200b",
    "walking mountains, rivers; " * 12 + "end",
    "a",
    "x" * 90 + " cat",
]
MODES = [(attention, pooling) for attention, poolings in POOLINGS.items() for pooling in poolings]


@pytest.fixture(scope="module")
def config(tiny_model_folder):
    return EncoderConfig(
        model=str(tiny_model_folder),
        precision="fp32",
        landmark_interval=12,
        max_window_tokens=40,
        window_overlap_tokens=15,
        batch_tokens=100,
    )


@pytest.fixture(scope="module")
def backbone(config):
    return load_backbone(config)


def _context(num_documents=5, seed=0):
    embeddings = np.random.default_rng(seed).normal(size=(num_documents, 32)).astype(np.float32)
    return ContextSet(
        doc_ids=tuple(f"c{index}" for index in range(num_documents)),
        content_sha256s=("0" * 64,) * num_documents,
        cluster_ids_C=np.zeros(num_documents, np.int32),
        embeddings_CD=embeddings,
        first_stage_fingerprint="first",
    )


def _naive_chunk_vectors(backbone, config, text, context=None):
    """One text, one row at a time, chunks and windows walked with plain loops."""
    tokens = tokenize(backbone.tokenizer, [text])
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, config.landmark_interval)
    pieces = [tokens.ids[start:end].tolist() for start, end in zip(chunks.token_offsets[:-1], chunks.token_offsets[1:], strict=True)]
    cls, landmark = backbone.cls_id, backbone.landmark_id
    opening = [] if cls is None else [cls]
    prefix = backbone.tokenizer.encode(config.document_prefix, add_special_tokens=False).ids
    mark = {"multi_cls": [cls], "mean_at_k": []}.get(config.pooling, [landmark])
    tail = [landmark] if config.pooling == "mean_at_k" else []

    def hidden(row):
        return backbone.hidden_states(np.array([row]), np.array([len(row)]), context)[0].numpy()

    def pooled_row(state, piece):
        """The rule of each pooling for a row that is one chunk."""
        mean = state[len(opening) + len(prefix) :].mean(0) if prefix else state.mean(0)
        of_last = state[-2] if piece else state[-1]
        return {"mean": mean, "lmk": state[-1], "last": state[-1], "cls": state[0], "mean_at_k": of_last}[config.pooling]

    def pooled_span(state, start, stop):
        """The same for a chunk whose own tokens stand at ``start:stop`` of a window."""
        if config.pooling == "mean_at_k":
            return state[stop - 1] if stop > start else state[-1]
        return state[start : stop + 1].mean(0) if config.pooling == "mean" else state[stop]

    if config.attention == "chunk":
        vectors = [pooled_row(hidden([*opening, *prefix, *piece, landmark]), piece) for piece in pieces]
    else:
        best: dict[int, tuple[int, np.ndarray]] = {}
        first = 0
        budget = config.max_window_tokens - len(prefix) - len(tail)
        while True:
            end, size = first, len(opening)
            while end < len(pieces) and size + len(pieces[end]) + len(mark) <= budget:
                size, end = size + len(pieces[end]) + len(mark), end + 1
            row, places = [*opening, *prefix], {}
            for index in range(first, end):
                places[index] = (len(row), len(row) + len(pieces[index]))
                row += [*pieces[index], *mark]
            state = hidden([*row, *tail])
            for index, (start, stop) in places.items():
                room = min(stop + len(mark) - len(opening) - len(prefix), len(row) - stop - len(mark))
                if index not in best or room > best[index][0]:
                    best[index] = (room, pooled_span(state, start, stop))
            if end == len(pieces):
                break
            following, first = first + 1, end
            while first > following:
                shared = sum(len(piece) + len(mark) for piece in pieces[first - 1 : end])
                if shared > config.window_overlap_tokens or len(opening) + shared + len(pieces[end]) + len(mark) > budget:
                    break
                first -= 1
        vectors = [best[index][1] for index in range(len(pieces))]
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


@pytest.mark.parametrize("batch_tokens", [1, 200], ids=["one by one", "padded"])
@pytest.mark.parametrize("prefix", ["", "old stone:"], ids=["bare", "prefixed"])
@pytest.mark.parametrize("context", [None, _context()], ids=["alone", "context"])
@pytest.mark.parametrize(("attention", "pooling"), MODES)
def test_encode_batch_equals_naive_loop_over_texts(config, backbone, attention, pooling, context, prefix, batch_tokens):
    config = dataclasses.replace(
        config,
        attention=attention,
        pooling=pooling,
        use_context=context is not None,
        document_prefix=prefix,
        batch_tokens=batch_tokens,
    )
    encoded = DocumentEncoder(config, context, backbone).encode(TEXTS)
    for index, text in enumerate(TEXTS):
        own = encoded.chunk_vectors_MV[slice(*encoded.chunk_offsets[index : index + 2])]
        naive = _naive_chunk_vectors(backbone, config, text, None if context is None else context.embeddings_CD)
        np.testing.assert_allclose(own, naive, atol=1e-5)


@pytest.fixture(scope="module")
def headless(tiny_model_folder, tmp_path_factory):
    """A model whose tokenizer has no [CLS]."""
    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("headless") / "model")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("[CLS]", "[NONE]"))
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    assert backbone.cls_id is None
    return backbone


@pytest.mark.parametrize("prefix", ["", "old stone:"], ids=["bare", "prefixed"])
@pytest.mark.parametrize(("attention", "pooling"), [mode for mode in MODES if "cls" not in mode[1]])
def test_encode_without_a_cls_token_equals_naive_rows_that_begin_with_text(config, headless, attention, pooling, prefix):
    config = dataclasses.replace(config, attention=attention, pooling=pooling, document_prefix=prefix)
    encoded = DocumentEncoder(config, None, headless).encode(TEXTS)
    for index, text in enumerate(TEXTS):
        own = encoded.chunk_vectors_MV[slice(*encoded.chunk_offsets[index : index + 2])]
        np.testing.assert_allclose(own, _naive_chunk_vectors(headless, config, text), atol=1e-5)


@pytest.mark.parametrize(("attention", "pooling"), [("chunk", "cls"), ("full", "multi_cls")])
def test_encode_cls_pooling_without_a_cls_token_is_refused(config, headless, attention, pooling):
    with pytest.raises(ConfigError, match=f"pooling {pooling} must go with a model that has"):
        DocumentEncoder(dataclasses.replace(config, attention=attention, pooling=pooling), None, headless)


def test_encode_without_a_cls_token_has_room_for_one_more(config, headless, backbone):
    longest = dataclasses.replace(config, landmark_interval=95, max_window_tokens=97)
    text = "cat " * 95
    assert DocumentEncoder(longest, None, headless).encode([text]).chunk_offsets.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="choose at most 94"):
        DocumentEncoder(longest, None, backbone)


@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_encode_any_batch_size_gives_the_same_vectors(config, backbone, batch_tokens):
    expected = DocumentEncoder(config, None, backbone).encode(TEXTS)
    other = DocumentEncoder(dataclasses.replace(config, batch_tokens=batch_tokens), None, backbone).encode(TEXTS)
    np.testing.assert_allclose(other.chunk_vectors_MV, expected.chunk_vectors_MV, atol=1e-5)


def test_encode_texts_in_another_order_moves_their_vectors_with_them(config, backbone):
    encoder = DocumentEncoder(config, None, backbone)
    backwards = encoder.encode(TEXTS[::-1]).document_vectors_NV[::-1]
    np.testing.assert_allclose(backwards, encoder.encode(TEXTS).document_vectors_NV, atol=1e-5)


def test_encode_document_vector_is_the_normalised_mean_of_its_chunks(config, backbone):
    encoded = DocumentEncoder(config, None, backbone).encode(TEXTS)
    for index, vector in enumerate(encoded.document_vectors_NV):
        mean = encoded.chunk_vectors_MV[slice(*encoded.chunk_offsets[index : index + 2])].mean(0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


def test_encode_vectors_are_normalised_float32(config, backbone):
    encoded = DocumentEncoder(config, None, backbone).encode(TEXTS)
    for vectors in (encoded.document_vectors_NV, encoded.chunk_vectors_MV):
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_encode_spans_cover_every_text(config, backbone):
    encoded = DocumentEncoder(config, None, backbone).encode(TEXTS)
    for index, text in enumerate(TEXTS):
        own = slice(*encoded.chunk_offsets[index : index + 2])
        assert "".join(text[start:end] for start, end in zip(encoded.start_char[own], encoded.end_char[own], strict=True)) == text


def test_encode_counts_a_texts_own_tokens(config, backbone):
    encoded = DocumentEncoder(config, None, backbone).encode(["the cat sat", "\u200b"])
    assert encoded.num_tokens.tolist() == [3, 0]


@pytest.mark.parametrize("truncate_dim", [1, 7, 32])
def test_encode_truncated_vectors_are_the_heads_of_whole_ones_normalised_again(config, backbone, truncate_dim):
    encoded = DocumentEncoder(dataclasses.replace(config, truncate_dim=truncate_dim), None, backbone).encode(TEXTS)
    whole = DocumentEncoder(config, None, backbone).encode(TEXTS)
    for index in range(len(TEXTS)):
        own = slice(*whole.chunk_offsets[index : index + 2])
        heads = [vector[:truncate_dim] / np.linalg.norm(vector[:truncate_dim]) for vector in whole.chunk_vectors_MV[own]]
        np.testing.assert_allclose(encoded.chunk_vectors_MV[own], heads, atol=1e-6)
        np.testing.assert_allclose(encoded.document_vectors_NV[index], sum(heads) / np.linalg.norm(sum(heads)), atol=1e-6)


def test_encode_truncated_leaves_the_context_whole(config, backbone):
    contextual = dataclasses.replace(config, use_context=True)
    whole = DocumentEncoder(contextual, _context(), backbone).encode(TEXTS[:1]).document_vectors_NV[0, :8]
    truncated = DocumentEncoder(dataclasses.replace(contextual, truncate_dim=8), _context(), backbone).encode(TEXTS[:1])
    np.testing.assert_allclose(truncated.document_vectors_NV[0], whole / np.linalg.norm(whole), atol=1e-6)


def test_encode_first_layers_equals_a_model_of_those_layers(config, backbone):
    shallow = load_backbone(dataclasses.replace(config, num_layers=1))
    ids, lengths = np.array([[2, 10, 11, 3]]), np.array([4])
    assert not np.allclose(shallow.hidden_states(ids, lengths), backbone.hidden_states(ids, lengths), atol=1e-3)
    encoder = DocumentEncoder(dataclasses.replace(config, num_layers=1))
    naive = _naive_chunk_vectors(shallow, config, TEXTS[4])
    np.testing.assert_allclose(encoder.encode([TEXTS[4]]).chunk_vectors_MV, naive, atol=1e-5)


def test_encode_sentence_landmarks_end_chunks_at_sentences(config, backbone):
    text = "the cat sat. old path! a river, a mountain, a stone on a path and a way. Walk on the path"
    encoded = DocumentEncoder(dataclasses.replace(config, landmarks="sentence", landmark_interval=18), None, backbone).encode([text])
    pieces = [text[start:end] for start, end in zip(encoded.start_char, encoded.end_char, strict=True)]
    assert pieces == ["the cat sat. old path! ", "a river, a mountain, a stone on a path and a way. ", "Walk on the path"]


@pytest.mark.parametrize("prefix", ["old stone: ", "old stone:"])
@pytest.mark.parametrize(("attention", "pooling"), MODES)
def test_encode_prefix_leaves_spans_and_token_counts_alone(config, backbone, attention, pooling, prefix):
    config = dataclasses.replace(config, attention=attention, pooling=pooling)
    bare = DocumentEncoder(config, None, backbone).encode(TEXTS)
    prefixed = DocumentEncoder(dataclasses.replace(config, document_prefix=prefix), None, backbone).encode(TEXTS)
    assert (prefixed.start_char.tolist(), prefixed.end_char.tolist()) == (bare.start_char.tolist(), bare.end_char.tolist())
    assert prefixed.num_tokens.tolist() == bare.num_tokens.tolist()


@pytest.mark.parametrize(("attention", "pooling"), MODES)
def test_encode_prefix_is_in_every_row_and_in_no_pooled_span(config, backbone, attention, pooling):
    seen = []

    class Recording(_Broken):
        def hidden_states(self, ids_BT, lengths_B, context_CD=None, temperature=1.0):
            seen.extend(row[:length] for row, length in zip(ids_BT.tolist(), lengths_B.tolist(), strict=True))
            hidden = self._backbone.hidden_states(ids_BT, lengths_B, context_CD, temperature).clone()
            hidden[:, 1:4] = 1e6
            return hidden

    config = dataclasses.replace(config, attention=attention, pooling=pooling, document_prefix="old stone:")
    prefix = backbone.tokenizer.encode("old stone:", add_special_tokens=False).ids
    recorded = DocumentEncoder(config, None, Recording(backbone)).encode(TEXTS)
    assert len(prefix) == 3
    assert all(row[:4] == [backbone.cls_id, *prefix] and len(row) <= config.max_window_tokens for row in seen)
    np.testing.assert_allclose(recorded.chunk_vectors_MV, DocumentEncoder(config, None, backbone).encode(TEXTS).chunk_vectors_MV, atol=1e-5)


@pytest.mark.parametrize("attention", ["chunk", "full"])
def test_encode_progress_counts_every_token_once(config, backbone, attention):
    heard = []
    encoded = DocumentEncoder(dataclasses.replace(config, attention=attention), None, backbone).encode(TEXTS, heard.append)
    assert len(heard) > 1
    assert sum(heard) == encoded.num_tokens.sum()


def test_encode_no_texts_gives_no_rows(config, backbone):
    encoded = DocumentEncoder(config, None, backbone).encode([])
    assert (encoded.document_vectors_NV.shape, encoded.chunk_vectors_MV.shape) == ((0, 32), (0, 32))


def test_encode_twice_gives_the_same_bytes(config, backbone):
    encoder = DocumentEncoder(config, None, backbone)
    assert encoder.encode(TEXTS).chunk_vectors_MV.tobytes() == encoder.encode(TEXTS).chunk_vectors_MV.tobytes()


class _Broken:
    """A backbone that fails on rows holding one token, or when more rows come than the device can hold."""

    def __init__(self, backbone, nan_id=None, max_rows=None):
        self._backbone, self._nan_id, self._max_rows = backbone, nan_id, max_rows
        # Only a device of its own runs out of memory in a way that a smaller batch mends; the tensors stay where they are.
        self.device = torch.device("cuda") if max_rows else backbone.device

    def __getattr__(self, name):
        return getattr(self._backbone, name)

    def hidden_states(self, ids_BT, lengths_B, context_CD=None, temperature=1.0):
        if self._max_rows is not None and len(ids_BT) > self._max_rows:
            raise torch.OutOfMemoryError
        hidden = self._backbone.hidden_states(ids_BT, lengths_B, context_CD, temperature).clone()
        if self._nan_id is not None:
            hidden[torch.from_numpy((ids_BT == self._nan_id).any(1))] = float("nan")
        return hidden


def test_encode_nan_from_the_model_names_the_document(config, backbone):
    broken = _Broken(backbone, nan_id=backbone.tokenizer.token_to_id("walk"))
    with pytest.raises(ModelError, match="chunk 0 of document 4 of the shard"):
        DocumentEncoder(config, None, broken).encode(TEXTS)


def test_encode_out_of_memory_gives_the_same_vectors_in_smaller_batches(config, backbone):
    expected = DocumentEncoder(config, None, backbone).encode(TEXTS)
    small = DocumentEncoder(config, None, _Broken(backbone, max_rows=2)).encode(TEXTS)
    np.testing.assert_allclose(small.chunk_vectors_MV, expected.chunk_vectors_MV, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "lmk"},
        {"attention": "full"},
        {"landmark_interval": 13},
        {"max_window_tokens": 41},
        {"window_overlap_tokens": 14},
        {"landmarks": "sentence"},
        {"truncate_dim": 16},
        {"num_layers": 1},
        {"query_prefix": "query: "},
        {"document_prefix": "passage: "},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_setting_that_moves_vectors_changes_it(config, backbone, change):
    other = DocumentEncoder(dataclasses.replace(config, **change), None, backbone)
    assert other.fingerprint != DocumentEncoder(config, None, backbone).fingerprint


def test_fingerprint_of_settings_older_than_the_younger_ones_stays_as_it_was(config, backbone):
    older = ("pooling", "attention", "landmark_interval", "max_window_tokens", "window_overlap_tokens", "temperature")
    expected = fingerprint(
        kind="encoder", format=1, weights=backbone.weights_fingerprint, context=None, **{name: getattr(config, name) for name in older}
    )
    assert DocumentEncoder(config, None, backbone).fingerprint == expected


def test_fingerprint_temperature_changes_it(config, backbone):
    other = DocumentEncoder(dataclasses.replace(config, temperature=0.9))
    assert other.fingerprint != DocumentEncoder(config, None, backbone).fingerprint


def test_fingerprint_precision_and_batch_size_leave_it_alone(config, backbone):
    other = DocumentEncoder(dataclasses.replace(config, precision="bf16", batch_tokens=7))
    assert other.fingerprint == DocumentEncoder(config, None, backbone).fingerprint


def test_fingerprint_context_changes_it_only_when_used(config, backbone):
    used = dataclasses.replace(config, use_context=True)
    one, two = (DocumentEncoder(used, _context(seed=seed), backbone).fingerprint for seed in (0, 1))
    alone = DocumentEncoder(config, None, backbone).fingerprint
    assert len({one, two, alone}) == 3
    assert DocumentEncoder(config, _context(), backbone).fingerprint == alone


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_context": True}, "use_context must come with a context"),
        ({"landmark_interval": 95, "max_window_tokens": 200}, "choose at most 94"),
        ({"attention": "full", "max_window_tokens": 97}, "max_window_tokens must be at most"),
        ({"truncate_dim": 33}, "must lie between 1 and the model's 32, got 33"),
        (
            {"document_prefix": "a " * 27},
            "document_prefix must leave a chunk of 12 tokens room .* may have 26, got 27",
        ),
        ({"query_prefix": "a " * 27}, "query_prefix must leave a chunk of 12 tokens room"),
    ],
)
def test_encoder_setting_that_does_not_fit_is_refused(config, backbone, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DocumentEncoder(dataclasses.replace(config, **change), None, backbone)


def test_encoder_context_of_another_width_is_refused(config, backbone):
    narrow = dataclasses.replace(_context(), embeddings_CD=np.ones((5, 16), np.float32))
    with pytest.raises(ConfigError, match="rows of 32 numbers, got shape"):
        DocumentEncoder(dataclasses.replace(config, use_context=True), narrow, backbone)


@pytest.fixture
def staged():
    return pa.table(
        {
            "doc_id": pa.chunked_array([["b", "a"], ["c"]], pa.string()),
            "title": pa.array(["B", None, "C"], pa.string()),
            "text": pa.array(["old stone path " * 10, "cat", "the mat"], pa.large_string()),
            "query": pa.array([None, "q", None], pa.string()),
            "content_sha256": pa.array(["1", "2", "3"], pa.string()),
            "source_file": pa.array(["f"] * 3, pa.string()),
            "tags": pa.array([["x"], None, []], pa.list_(pa.string())),
            "year": pa.array([1, None, 3], pa.int16()),
        }
    )


@pytest.fixture
def shard(config, backbone, staged):
    return encode_shard(staged, DocumentEncoder(config, None, backbone), lambda table: np.arange(table.num_rows, dtype=np.int32) + 7)


def test_encode_shard_tables_have_the_stored_schemas(shard, staged):
    documents, chunks = shard
    assert documents.schema.equals(documents_schema([staged.schema.field("tags"), staged.schema.field("year")], 32))
    assert chunks.schema.equals(chunks_schema(32))


def test_encode_shard_columns_pass_through_as_they_came(shard, staged):
    kept = ["doc_id", "title", "text", "content_sha256", "source_file", "tags", "year"]
    assert shard[0].select(kept).to_pylist() == staged.select(kept).to_pylist()


def test_encode_shard_clusters_come_from_assign(shard):
    assert shard[0].column("cluster_id").to_pylist() == [7, 8, 9]


def test_encode_shard_chunks_follow_their_documents(shard):
    documents, chunks = shard
    assert documents.column("num_chunks").to_pylist() == [3, 1, 1]
    assert chunks.column("chunk_id").to_pylist() == ["b#0", "b#1", "b#2", "a#0", "c#0"]
    assert chunks.column("doc_id").to_pylist() == ["b", "b", "b", "a", "c"]
    assert chunks.column("ordinal").to_pylist() == [0, 1, 2, 0, 0]


def test_encode_shard_vectors_are_the_encoders(shard, config, backbone, staged):
    encoded = DocumentEncoder(config, None, backbone).encode(staged.column("text").to_pylist())
    stored = np.array(shard[1].column("vector").to_pylist(), np.float32)
    np.testing.assert_array_equal(stored, encoded.chunk_vectors_MV)
