"""A first ingest says what its model and BM25 make of the languages of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pa_dataset
import pytest
from cairn.pipeline.collection import Collection
from cairn.pipeline.config import DEFAULT_MODEL, EncoderConfig, IndexConfig, IngestConfig, Language
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.compatibility import require_same_settings, stored_manifest
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.line.language_fit import column_warnings, language_warnings

GERMAN = "Die Kündigungsfrist des Arbeitsverhältnisses beträgt nach der Probezeit vier Wochen zum Monatsende."
CHINESE = "我们看到的房子不在这条街上，这条街在城市的另一边。"
ENGLISH = "The house that we saw was not the one you had in mind."


def warnings_of(texts: Sequence[str], language: Language = "auto") -> tuple[str, ...]:
    rows = pa_dataset.dataset(pa.table({"text": pa.array(texts, pa.large_string())}))
    config = IngestConfig(encoder=EncoderConfig(model=DEFAULT_MODEL), index=IndexConfig(language=language))
    return language_warnings(config, rows)


def test_english_texts_and_a_language_that_was_named_ask_for_nothing() -> None:
    assert warnings_of([ENGLISH] * 3) == ()
    assert "got de, whose words" in warnings_of(["?! " * 60, GERMAN])[0], "signs are in no language"
    assert [len(warnings_of([GERMAN], language)) for language in ("auto", "de", "none")] == [2, 1, 1]
    in_markup = "{{< figure src=`/a.png` >}} **The** [[house]] (that we saw) #was == `not` | the :: one ||"
    assert "got de, whose" in warnings_of([in_markup, in_markup, GERMAN])[0]


def test_languages_that_a_model_does_not_know_are_named_with_what_helps() -> None:
    model, words = warnings_of([CHINESE, GERMAN, ENGLISH])
    assert "zh, of whose tokens" in model
    assert "de, whose words it cuts into" in model
    assert "en" not in model.split("got ")[1].split("; ")[0].split(", ")
    assert model.endswith("choose a multilingual model with --model, in a new collection")
    assert "zh (pairs of characters), de (stems), en (stems)" in words
    assert "--language" in words


def test_columns_of_texts_that_hold_numbers_are_told_with_what_helps() -> None:
    columns = {
        "price": ["1,5", "1.200,75", "1\N{NO-BREAK SPACE}000,00"],
        "size": ["3", "4", "n/a"],
        "zip": ["01234", "90210", "10115"],
        "name": ["a", "b", None],
        "pieces": ["1.000", "12.500", None],
        "version": ["3.9", "3.10", "3.11"],
        "range": ["[1,5)", "(2,7]", "[3,9)"],
    }
    rows = pa_dataset.dataset(pa.table({"doc_id": ["1", "2", "3"], "text": ["1,5"] * 3, **columns}))
    commas, mixed = column_warnings(rows)
    told = "column 'size' holds numbers and texts, as in a.jsonl"
    assert list(column_warnings(rows, [told])) == [commas]
    assert "numbers with commas" in commas
    assert "('price', such as '1,5')" in commas
    assert "('pieces', such as '1.000')" in commas
    assert "version" not in commas
    assert "range" not in commas
    assert "'size', with 'n/a' among them" in mixed
    assert "zip" not in mixed
    assert "--metadata-columns" in commas
    assert "--metadata-columns" in mixed


def test_a_collection_records_its_languages_and_keeps_how_words_are_counted(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    encoder = {"model": str(tiny_model_folder), "use_context": False}
    collection = Collection.create("c", root=tmp_path, settings={"encoder": encoder})
    texts = {"zh": "使用GitHub备份脚本时出现错误代码E1042", "de": GERMAN, "en": ENGLISH}
    collection.add([{"id": doc_id, "text": text} for doc_id, text in texts.items()])
    for query, doc_id in (("E1042", "zh"), ("备份", "zh"), ("代", "zh"), ("Kündigungsfristen", "de")):
        found = collection.search(query).hits
        assert [hit.doc_id for hit in found if "bm25" in hit.scores] == [doc_id]
    manifest = stored_manifest(CollectionLayout.at(tmp_path, "c"))
    assert manifest is not None
    assert manifest.languages == {"de": 1, "en": 1, "zh": 1}
    for chosen, told in (
        ({"index": {"language": "de"}}, r"index\.language is 'auto', got 'de'"),
        ({"encoder": {"describe": "http://host/v1"}}, r"encoder\.describe is not set, got 'http://host/v1'"),
    ):
        with pytest.raises(FingerprintMismatchError, match=told):
            require_same_settings(manifest, resolve_ingest_config(chosen, manifest.settings))
