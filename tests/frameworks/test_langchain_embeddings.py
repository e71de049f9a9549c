"""LangChain's standard suite of embeddings, over a local encoder and a collection behind the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.langchain import CairnEmbeddings
from cairn.pipeline.client import CairnClient
from cairn.pipeline.encode.text_encoder import load_encoder
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests


@pytest.mark.anyio
class TestCairnEmbeddings(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True, params=["local", "remote"])
    def give(
        self, request: pytest.FixtureRequest, tiny_model_folder: Path, stones_client: CairnClient
    ) -> None:
        is_local = request.param == "local"
        self.encoder = (
            load_encoder(str(tiny_model_folder), landmark_interval=16)
            if is_local
            else stones_client.collection("stones")
        )

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return CairnEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"encoder": self.encoder}


def test_vectors_are_unit_length_and_none_are_asked_for_nothing(stones_client: CairnClient) -> None:
    embeddings = CairnEmbeddings(stones_client.collection("stones"))
    assert np.linalg.norm(embeddings.embed_query("granite")) == pytest.approx(1.0, abs=1e-5)
    assert embeddings.embed_documents([]) == []
