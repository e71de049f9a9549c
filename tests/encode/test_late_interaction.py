"""Late-interaction checkpoints in their three layouts, against Sentence-Transformers' reading of them."""

from __future__ import annotations

import json
import shutil
import string

import numpy as np
import pytest
import torch
from cairn import Collection, load_encoder
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.evaluate import systems
from cairn.pipeline.lab.evaluate.systems import Encoding, System, choose_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.encode.sentence_transformers_folders import write_dense, write_modules

DOCUMENTS = ["the cat sat, on the mat.", "old stone path", "a river; mountain!"]
QUERIES = ["the old river", "cat", "walking mountains and rivers by the old stone path in the river"]
LENGTH = 12


def _write(path, content):
    path.write_text(json.dumps(content))


@pytest.fixture
def make_late(make_folder):
    """Return a writer of a tiny late-interaction checkpoint in a layout."""

    def make(layout):
        folder = make_folder()
        shutil.rmtree(folder / "1_Pooling")
        (folder / "modules.json").unlink()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        marker = {"stanford": "[unused{}]"}.get(layout, "[{}] ")
        names = (0, 1) if layout == "stanford" else ("Q", "D")
        # Published ones normalise their markers, which then match no text.
        tokenizer.add_tokens([AddedToken(marker.format(name), normalized=True) for name in names])
        tokenizer.save(str(folder / "tokenizer.json"))
        tensors = load_file(folder / "model.safetensors")
        table = tensors["embeddings.word_embeddings.weight"]
        tensors["embeddings.word_embeddings.weight"] = torch.cat([table, table[5:7] * 1.5])
        config = json.loads((folder / "config.json").read_text())
        config["vocab_size"] = len(table) + 2
        if layout == "stanford":
            config["architectures"] = ["HF_ColBERT"]
            tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
            tensors["linear.weight"] = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
            _write(folder / "artifact.metadata", {"query_maxlen": LENGTH, "attend_to_mask_tokens": False})
        elif layout == "pylate":
            identity = "torch.nn.modules.linear.Identity"
            write_dense(folder / "1_Dense", 16, 32, bias=False, activation=identity)
            kind = "sentence_transformers.models.Transformer"
            write_modules(folder, ("", kind), ("1_Dense", "pylate.models.Dense.Dense"))
            settings = {
                "model_type": "ColBERT",
                "query_prefix": "[Q] ",
                "document_prefix": "[D] ",
                "query_length": LENGTH,
                "document_length": 40,
                "attend_to_expansion_tokens": True,
                "skiplist_words": list(string.punctuation),
            }
            _write(folder / "config_sentence_transformers.json", settings)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _write(folder / "config.json", config)
        return _saved_modules(folder) if layout == "modules" else folder

    return make


def _saved_modules(folder):
    """Let the library write a model's modules."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer

    torch.manual_seed(3)
    of_tokens = {"module_input_name": "token_embeddings"}
    expansion = {"strategy": "min", "attend": False, "token": "[MASK]", "length": LENGTH}
    modules = [
        Transformer(str(folder), max_seq_length=90, query_expansion=expansion),
        Dense(32, 16, bias=False, activation_function=torch.nn.Identity(), **of_tokens),
        MultiVectorMask([","]),
        Normalize(**of_tokens),
    ]
    prompts = {"query": "which ", "document": ""}
    saved = folder.with_name("saved")
    MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu").save(str(saved))
    return saved


def _published(folder):
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("pylate", "torch"), ("modules", "torch"), ("stanford", "torch"), ("stanford", "openvino")],
)
def test_token_vectors_equal_those_of_sentence_transformers(make_late, layout, backend):
    folder = make_late(layout)
    theirs = _published(folder)
    config = encoder_config({"model": str(folder), "precision": "fp32", "backend": backend})
    encoder = DocumentEncoder(config)
    vectors_QV, queries = encoder.encode_query_tokens(QUERIES)
    for query, vector_V, their_TV in zip(
        queries, vectors_QV, theirs.encode_query(QUERIES, convert_to_numpy=True), strict=True
    ):
        np.testing.assert_allclose(query.states_TD, their_TV, atol=1e-5)
        mean_V = their_TV.mean(axis=0)
        np.testing.assert_allclose(vector_V, mean_V / np.linalg.norm(mean_V), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(QUERIES), vectors_QV, atol=1e-6)
    # [SEP] and what expands a query stand for no characters.
    assert [int((query.start_char >= 0).sum()) for query in queries[:2]] == [3, 1]
    assert all(query.start_char[-1] == -1 for query in queries)
    # Theirs have [CLS], a marker and [SEP] around the tokens that a document keeps.
    num_before = 1 if layout == "modules" else 2
    their_DTV = theirs.encode_document(DOCUMENTS, convert_to_numpy=True)
    for text, their_TV in zip(DOCUMENTS, their_DTV, strict=True):
        np.testing.assert_allclose(encoder.token_states([text]), their_TV[num_before:-1], atol=1e-5)


def test_collection_of_late_interaction_is_searched_by_its_token_vectors(make_late, tmp_path):
    notes = Collection.create("notes", root=tmp_path / "data", model=str(make_late("pylate")))
    notes.add([{"id": str(place), "text": text} for place, text in enumerate(DOCUMENTS)])
    for place, text in enumerate(DOCUMENTS):
        assert notes.search(text).hits[0].doc_id == str(place)
    assert ["late-interaction model" in warning for warning in notes.status()["warnings"]] == [True]


def test_evaluation_leaves_out_rows_by_plain_states(make_late, monkeypatch):
    only = System(
        name="x/convex+maxsim",
        encoding=Encoding(encoder=encoder_config({"model": str(make_late("pylate"))}), context="none"),
        ranking="convex+maxsim",
    )
    monkeypatch.setattr(systems, "baseline_systems", lambda *_: [only])
    config = only.encoding.encoder
    chosen, left_out = choose_systems(config, config, ContextConfig(), ["*"], is_whole_table=False)
    assert only.name not in {system.name for system in chosen}
    assert "its own token vectors" in left_out[only.name]


def test_late_interaction_model_is_neither_saved_nor_given_context_nor_without_its_projection(
    make_late, tmp_path
):
    folder = make_late("stanford")
    with pytest.raises(ConfigError, match="copy its folder instead"):
        load_encoder(folder).save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="use_context must be left out"):
        load_encoder(folder, use_context=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["linear.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"must hold linear\.weight"):
        load_encoder(folder)
