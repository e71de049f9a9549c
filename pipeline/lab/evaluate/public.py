"""A search by Cairn as a model that MTEB scores, and the commands that score public benchmarks with it.

    mteb.evaluate(SearchModel(model="…"), mteb.get_benchmark("BEIR"))

MTEB loads the sets and computes the measures; documents are encoded, and queries ranked, as by ``cairn/…`` of
``cairn evaluate``: with vectors and BM25, and with token vectors where the settings have them. A set is held
in memory whole. MTEB is no dependency: version 2 of it is imported where it is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from cairn.pipeline.config import DEFAULT_MODEL
from cairn.pipeline.lab.evaluate.encodings import build_encoder, encode_set
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.systems import configured_systems
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.types import silent_progress

BENCHMARKS: Final[Mapping[str, str]] = {
    "BEIR": "15 sets of short texts, some of millions of documents",
    "LongEmbed": "6 sets of long documents",
}
"""What MTEB calls them. ConTEB is none of its benchmarks."""


class SearchModel:
    """One of MTEB's search models, with the settings of an ingest; ``cache`` keeps what was encoded."""

    def __init__(self, *, cache: str | None = None, **settings: Any) -> None:
        self._config = encoder_config(settings, for_ingest=True)
        self._context = context_config(self._config.model, {})
        self._system = configured_systems(self._config)[-1]  # what a search without options does
        self._cache = None if cache is None else Path(cache)
        self._corpus: RetrievalSet | None = None

    @property
    def mteb_model_meta(self) -> Any:
        """What MTEB files the results under."""
        from mteb.models import ModelMeta

        name = f"cairn/{Path(self._config.model).name}"
        return ModelMeta.create_empty({"name": name, "revision": self._system.ranking})

    def index(self, corpus: Any, *, task_metadata: Any, **_: Any) -> None:
        """Take the documents of a task."""
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(corpus)
        self._corpus = RetrievalSet(
            name=task_metadata.name,
            doc_ids=tuple(corpus["id"]),
            titles=tuple(title or "" for title in titles),
            texts=tuple(text if text and text.strip() else "." for text in corpus["text"]),
            query_ids=(),
            queries=(),
            judgements=Judgements.none(),
        )

    def search(self, queries: Any, *, top_k: int, **_: Any) -> dict[str, dict[str, float]]:
        """Return the scores of the best documents of each query."""
        assert self._corpus is not None, "MTEB indexes first"
        query_ids = cast("Sequence[str]", list(queries["id"]))
        judged = replace(self._corpus, query_ids=tuple(query_ids), queries=tuple(queries["text"]))
        encoder, seconds = build_encoder(judged, self._system.encoding, self._context)
        encoded = encode_set(judged, self._system.encoding, encoder, silent_progress, seconds, self._cache)
        searched = SearchedSet(judged, encoded, encoder.token_codebook)
        answers = searched.rank(self._system, np.zeros(len(query_ids), np.bool_), top_k)
        return {
            query_id: {
                judged.doc_ids[place]: score
                for place, score in zip(
                    answer.documents.positions.tolist(), answer.documents.scores.tolist(), strict=True
                )
            }
            for query_id, answer in zip(query_ids, answers, strict=True)
        }


def public_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return how to score a search with these settings on each public benchmark, a command each."""
    given = ", ".join(f"{name}={value!r}" for name, value in {"model": DEFAULT_MODEL, **settings}.items())
    lines = ["# once; the sets are downloaded by the first run", "pip install 'mteb>=2.26,<3'"]
    for name, what in BENCHMARKS.items():
        code = (
            f"import mteb; from cairn.pipeline.lab.evaluate.public import SearchModel; "
            f"print(mteb.evaluate(SearchModel({given}), mteb.get_benchmark({name!r})).to_dataframe())"
        )
        lines += ["", f"# {name}: {what}", f"env -u HF_HUB_OFFLINE python -c {shlex.quote(code)}"]
    return [
        *lines,
        "",
        "# one set alone: mteb.get_tasks(tasks=['SciFact']) in the place of mteb.get_benchmark(…)",
        "# ConTEB is not among MTEB's benchmarks; its sets are at https://huggingface.co/illuin-conteb. Join",
        "# the chunks of each document, give the characters of those that answer as start and end in qrels:",
        "cairn evaluate FOLDER",
    ]
