"""The description is the API: valid, with examples that work, and every response as it is described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "openapi.json"


@pytest.fixture
def described(client):
    return client.get("/openapi.json").json()


def test_description_is_the_one_on_file(described, request):
    described["info"].pop("version")
    if request.config.getoption("--rewrite-openapi"):
        GOLDEN.write_text(json.dumps(described, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    on_file = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert described == on_file, "run pytest tests/serve/test_openapi.py --rewrite-openapi, read the change"


def test_examples_of_requests_work(client, described):
    schemas = described["components"]["schemas"]
    searches, embeddings, openai = (
        schemas[name]["examples"] for name in ("SearchRequest", "EmbeddingsRequest", "VectorStoreSearch")
    )
    assert min(map(len, (searches, embeddings, openai))) >= 1
    # The examples speak of Python's documentation; here the columns are others.
    as_here = json.loads(json.dumps([searches, openai]).replace('"kind"', '"tenant"'))
    for example in as_here[0]:
        assert client.post("/v1/collections/stones/search", json=example).status_code == 200
    for example in as_here[1]:
        assert client.post("/v1/vector_stores/stones/search", json=example).status_code == 200
    for example in embeddings:
        assert client.post("/v1/embeddings", json={**example, "model": "stones"}).status_code == 200
