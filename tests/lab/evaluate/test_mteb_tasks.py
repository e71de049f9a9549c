"""Tasks of MTEB that have no corpus, and reranking: tiny ones that hold their own data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.encodings import build_encoder
from cairn.pipeline.lab.evaluate.mteb_search import MtebModel
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet
from cairn.pipeline.lab.evaluate.systems import System, baseline_systems, our_systems

# Importing mteb takes seconds, so that one worker does it.
pytestmark = [pytest.mark.xdist_group("mteb"), pytest.mark.filterwarnings("ignore")]

TOPICS = {
    "walk": "a walk on the old path",
    "cat": "the cat sat on the mat",
    "river": "a river by the mountain",
}
TEXTS = [f"{text} {end}" for text in TOPICS.values() for end in ("", "stone", "way", "mark", "the old way")]
LABELS = [number for number in range(len(TOPICS)) for _ in range(5)]
CONTEXT = ContextConfig(context_documents=3)


def systems(config: EncoderConfig) -> dict[str, System]:
    return {system.name: system for system in (*baseline_systems(config, 96), *our_systems(config))}


def task(
    kind: str,
    texts: Sequence[str] = TEXTS,
    labels: Sequence[int] = LABELS,
    train: Sequence[Mapping[str, Any]] | None = None,
    retrieval: Mapping[str, Any] | None = None,
) -> Any:
    """Return a task of a kind that holds its own data.

    ``train`` are rows to learn classes from, else all; ``retrieval`` are the parts of such a task.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from mteb.abstasks.classification import AbsTaskClassification
        from mteb.abstasks.clustering import AbsTaskClustering
        from mteb.abstasks.pair_classification import AbsTaskPairClassification
        from mteb.abstasks.retrieval import AbsTaskRetrieval
        from mteb.abstasks.sts import AbsTaskSTS
        from mteb.abstasks.task_metadata import TaskMetadata

    ids = [str(number) for number in range(len(texts))]
    other = [*texts[1:], *texts[:1]]
    alike = [int(one == two) for one, two in zip(labels, [*labels[1:], *labels[:1]], strict=True)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    data: dict[str, tuple[type, str, Mapping[str, Any]]] = {
        "STS": (
            AbsTaskSTS,
            "cosine_spearman",
            {
                "test": Dataset.from_dict(
                    {"sentence1": texts, "sentence2": other, "score": np.arange(len(texts)) % 5}
                )
            },
        ),
        "PairClassification": (
            AbsTaskPairClassification,
            "max_ap",
            {"test": Dataset.from_dict({"sentence1": texts, "sentence2": other, "labels": alike})},
        ),
        "Classification": (
            AbsTaskClassification,
            "accuracy",
            {"train": Dataset.from_list(list(train or rows)), "test": Dataset.from_list(rows)},
        ),
        "Clustering": (
            AbsTaskClustering,
            "v_measure",
            {"test": Dataset.from_dict({"sentences": texts, "labels": labels})},
        ),
        "Retrieval": (AbsTaskRetrieval, "ndcg_at_10", {"test": retrieval}),
        "Reranking": (
            AbsTaskRetrieval,
            "ndcg_at_10",
            {
                "test": {
                    "queries": Dataset.from_list([{"id": "q", "text": "where sat the cat"}]),
                    "corpus": Dataset.from_list(
                        [{"id": i, "text": text, "title": ""} for i, text in zip(ids, texts, strict=True)]
                    ),
                    "relevant_docs": {"q": {"7": 1, "9": 1}},
                    "top_ranked": {"q": ["1", "7", "9", "12"]},
                }
            },
        ),
    }
    base, score, splits = data[kind]

    class Tiny(base):
        metadata = TaskMetadata(
            name=f"Tiny{kind}",
            description="Lines about a walk.",
            reference=None,
            dataset={"path": "local", "revision": "1"},
            type=kind,
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score=score,
            date=("2026-01-01", "2026-01-02"),
            domains=["Written"],
            task_subtypes=[],
            license="cc0-1.0",
            annotations_creators="derived",
            dialect=[],
            sample_creation="found",
            bibtex_citation="",
        )
        samples_per_label = 2
        n_experiments = 3
        max_document_to_embed = len(texts)
        max_fraction_of_documents_to_embed = None

        def load_data(self, **_: Any) -> None:
            self.dataset = {"default": splits} if kind in ("Reranking", "Retrieval") else splits
            self.data_loaded = True

    return Tiny()


class Plain(MtebModel):
    """The same with vectors made here: of all texts, behind the context of those that come first."""

    encoder: DocumentEncoder | None = None

    def encode(self, inputs: Iterable[Mapping[str, Any]], **_: Any) -> np.ndarray:
        texts = [text for batch in inputs for text in batch["text"]]
        if self.encoder is None:
            held = RetrievalSet(
                name="x",
                doc_ids=tuple(map(str, range(len(texts)))),
                titles=("",) * len(texts),
                texts=tuple(texts),
                query_ids=(),
                queries=(),
                judgements=Judgements.none(),
            )
            self.encoder, _ = build_encoder(held, self.system.encoding, CONTEXT)
        return self.encoder.encode(texts).document_vectors_NV


def scores_of(model: MtebModel, kind: str, **data: Any) -> dict[str, Any]:
    import mteb

    result = mteb.evaluate(model, task(kind, **data), cache=None, co2_tracker=False)
    return result.task_results[0].scores["test"][0]


@pytest.mark.parametrize("name", ["mean/none/document", "landmarks/corpus/chunk"])
@pytest.mark.parametrize("kind", ["STS", "PairClassification", "Classification", "Clustering"])
def test_tasks_without_a_corpus_are_scored_by_the_encoder_s_vectors(tiny_config, kind: str, name: str):
    system = systems(tiny_config)[name]
    found, expected = (scores_of(make(system, CONTEXT), kind) for make in (MtebModel, Plain))
    assert found["main_score"] == pytest.approx(expected["main_score"], abs=1e-6)
    assert np.isfinite(found["main_score"])


def test_reranking_orders_the_documents_it_is_given(tiny_config):
    system = systems(tiny_config)["mean/none/document"]
    model = MtebModel(system)
    scores = scores_of(model, "Reranking")
    encoder = DocumentEncoder(system.encoding.encoder)
    query_V = encoder.encode_queries(["where sat the cat"])[0]
    given = [1, 7, 9, 12]
    order = np.argsort(-(encoder.encode([TEXTS[n] for n in given]).document_vectors_NV @ query_V))
    gains = np.array([given[place] in (7, 9) for place in order]) / np.log2(np.arange(4) + 2)
    assert scores["ndcg_at_10"] == pytest.approx(gains.sum() / (1 + 1 / np.log2(3)), abs=1e-4)


def test_instruction_of_a_task_stands_before_its_texts(tiny_config):
    system = systems(replace(tiny_config, query_prefix="old "))["mean/none/document"]
    alike = SimpleNamespace(name="a", prompt="the way")
    both = SimpleNamespace(name="b", prompt={"query": "the way", "document": "no"})
    model, batch = MtebModel(system, has_instructions=True), [{"text": ["stone path"]}]
    instructed = DocumentEncoder(replace(system.encoding.encoder, query_prefix="Instruct: the way\nQuery: "))
    plain = DocumentEncoder(system.encoding.encoder)
    expected = instructed.encode_queries(["stone path"])

    assert np.array_equal(model.encode(batch, task_metadata=alike), expected)
    assert np.array_equal(model.encode(batch, task_metadata=both, prompt_type="query"), expected)
    assert np.array_equal(
        model.encode(batch, task_metadata=both, prompt_type="document"),
        plain.encode(["stone path"]).document_vectors_NV,
    )
    assert np.array_equal(
        MtebModel(system).encode(batch, task_metadata=alike), plain.encode(["stone path"]).document_vectors_NV
    )
    revisions = [MtebModel(system, has_instructions=has).mteb_model_meta.revision for has in (False, True)]
    assert revisions[0] != revisions[1]


def test_texts_of_one_split_are_embedded_behind_one_context(tiny_config):
    system = systems(tiny_config)["landmarks/corpus/chunk"]
    model = MtebModel(system, CONTEXT)
    place = {"task_metadata": SimpleNamespace(name="t", prompt=None), "hf_split": "test", "hf_subset": "x"}
    first = model.encode([{"text": TEXTS}], **place)
    again = model.encode([{"text": TEXTS[:4]}], **place)
    other = model.encode([{"text": TEXTS[:4]}], **{**place, "hf_split": "dev"})
    np.testing.assert_allclose(again, first[:4], atol=1e-5)
    assert np.abs(other - again).max() > 1e-4
