import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.build_index import build_index

TEXTS = [
    f"{' '.join(words)}."
    for words in (("stone", "path", "hill"), ("river", "marks"), ("snow", "wind", "trail", "map"), ("lake",))
]


def write_corpus(path: Path, count: int) -> str:
    pq.write_table(
        pa.table({"id": [f"doc-{number}" for number in range(count)], "text": TEXTS[:count]}), path
    )
    return str(path)


def test_collection_built_on_openvino_goes_on_with_torch_and_is_searched_without_it(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=2, max_document_tokens=32),
    )
    compiled = replace(config, encoder=replace(config.encoder, backend="openvino", precision="int8"))
    build_index([write_corpus(tmp_path / "corpus.parquet", 3)], tmp_path, "c", compiled)
    source = write_corpus(tmp_path / "corpus.parquet", 4)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ConfigError, match="must have the package openvino"):
        build_index([source], tmp_path, "c", compiled)
    assert build_index([source], tmp_path, "c", config).encoded == 1
    assert open_collection("c", root=tmp_path).search(TEXTS[1], hybrid=False).hits[0].doc_id == "doc-1"
