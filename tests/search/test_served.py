"""Which generation answers: published, damaged, foreign, and while several threads search."""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.pipeline.errors import (
    DamageError,
    FingerprintMismatchError,
)
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS_FAISS
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.search import searcher as searcher_module
from cairn.pipeline.search.searcher import RETRY_SECONDS, Searcher
from cairn.pipeline.types import QueryEncoder

from tests.damages import flip


def damage(layout: CollectionLayout, number: int) -> None:
    path = layout.generation_folder(number) / CHUNKS_FAISS
    flip(path, path.stat().st_size // 2)


def version_of(result) -> set[str]:
    return {hit.doc_id.split("-")[1] for hit in result.hits}


def while_encoding(encoder, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Let something happen before the encoder's first answer."""
    encode = encoder.encode_queries

    def encode_once(texts):
        monkeypatch.setattr(encoder, "encode_queries", encode)
        act()
        return encode(texts)

    monkeypatch.setattr(encoder, "encode_queries", encode_once)


def test_what_happens_before_the_vectors_come_tears_no_answer_and_ends_nothing(
    layout, publish, encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(layout, 12)
    searcher = Searcher(layout, encoder)
    while_encoding(encoder, monkeypatch, lambda: publish(layout, 9, version=1, replaces=first))
    before, after = searcher.search("slate"), searcher.search("slate")
    assert (before.generation, version_of(before)) == (1, {"0"})
    assert (after.generation, version_of(after)) == (2, {"1"})
    shutil.rmtree(layout.generation_folder(1))
    path = layout.generation_folder(2) / CHUNKS_FAISS
    while_encoding(encoder, monkeypatch, lambda: os.truncate(path, 10))
    with pytest.raises(DamageError, match=r"must have .* bytes, got 10"):
        searcher.search("slate")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The seconds that the searcher sees, which tests move on."""
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(searcher_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_damaged_new_generation_leaves_the_old_one_serving_with_a_warning_until_the_retry_is_due(
    layout, publish, encoder, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    first = publish(layout, 12)
    searcher = Searcher(layout, encoder)
    publish(layout, 9, version=1, replaces=first)
    damage(layout, 2)
    for _ in range(2):  # after the first retry another one is due
        result = searcher.search("slate")
        assert (result.generation, version_of(result)) == (1, {"0"})
        assert "generation 1 is still served" in searcher.warnings[0]
        assert "SHA-256" in searcher.warnings[0]
        clock.now += RETRY_SECONDS
    searcher.search("slate")
    damage(layout, 2)  # flips the same bit back
    clock.now += RETRY_SECONDS - 1
    with monkeypatch.context() as patched:
        patched.setattr(searcher_module, "open_generation", lambda *_, **__: pytest.fail("opened again"))
        assert searcher.search("slate").generation == 1
    clock.now += 1
    assert searcher.search("slate").generation == 2
    assert searcher.warnings == ()


def test_older_generation_that_was_opened_in_the_place_of_a_damaged_one_is_left_when_the_retry_is_due(
    layout, publish, encoder, clock: SimpleNamespace
) -> None:
    first = publish(layout, 12)
    publish(layout, 9, version=1, replaces=first)
    damage(layout, 2)
    searcher = Searcher(layout, encoder)
    assert searcher.search("slate").generation == 1
    damage(layout, 2)
    clock.now += RETRY_SECONDS - 1
    assert searcher.search("slate").generation == 1
    clock.now += 1
    assert searcher.search("slate").generation == 2


@pytest.mark.parametrize("name", ["chunks.faiss", "documents.faiss", "chunks.arrow", "passages.arrow"])
def test_file_that_is_cut_while_it_is_open_is_an_error_and_is_not_looked_at_until_the_retry_is_due(
    layout, publish, encoder, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, name: str
) -> None:
    publish(layout, 12)
    searcher = Searcher(layout, encoder)
    searcher.search("slate")
    path = layout.generation_folder(1) / name
    content = path.read_bytes()
    os.truncate(path, 10)

    def require_damage() -> None:
        with pytest.raises(DamageError, match=f"{name} of generation 1 must have .* bytes, got 10"):
            searcher.search("slate")

    for _ in range(2):  # the second is the retry
        require_damage()
        clock.now += RETRY_SECONDS - 1
        with monkeypatch.context() as patched:
            patched.setattr(
                searcher_module, "open_latest_intact_generation", lambda *_, **__: pytest.fail("opened again")
            )
            require_damage()
        clock.now += 1
    path.write_bytes(content)
    assert searcher.search("slate").generation == 1
    assert searcher.is_answering


def test_older_generation_that_is_whole_again_answers_when_the_retry_is_due_and_then_the_newest(
    layout, publish, encoder, clock: SimpleNamespace
) -> None:
    first = publish(layout, 12)
    publish(layout, 9, version=1, replaces=first)
    searcher = Searcher(layout, encoder)
    for number in (1, 2):
        damage(layout, number)
    with pytest.raises(DamageError, match="generation 2"):
        searcher.search("slate")
    for number in (1, 2):
        damage(layout, number)
        clock.now += RETRY_SECONDS
        assert searcher.search("slate").generation == number
    assert searcher.warnings == ()


def test_unchanged_or_touched_collection_is_not_opened_again(
    layout, publish, encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(layout, 5)
    searcher = Searcher(layout, encoder)
    monkeypatch.setattr(searcher_module, "open_generation", lambda *_, **__: pytest.fail("opened again"))
    searcher.search("slate")
    os.utime(layout.generation_folder(1) / CHUNKS_FAISS)
    assert searcher.search("slate").generation == 1
    assert searcher.warnings == ()


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("documents.faiss", flip),
        ("chunks.faiss", flip),
        ("documents.arrow", flip),
        ("chunks.arrow", flip),
        ("passages.arrow", flip),
        ("documents.arrow", lambda path: os.truncate(path, 10)),
    ],
    ids=["documents", "chunks", "columns of documents", "columns of chunks", "passages", "cut"],
)
def test_file_that_is_damaged_while_it_is_served_makes_the_generation_before_answer_the_same_call(
    layout, publish, encoder, name: str, harm: Callable[[Path], None]
) -> None:
    first = publish(layout, 12)
    publish(layout, 9, version=1, replaces=first)
    searcher = Searcher(layout, encoder)
    assert searcher.search("slate").generation == 2
    harm(layout.generation_folder(2) / name)
    assert searcher.search("slate").generation == 1
    assert f"{name} of generation 2" in searcher.warnings[0]
    repaired = repair_collection(layout).generation
    assert searcher.search("slate").generation == repaired
    assert searcher.warnings == ()


def test_file_that_is_cut_and_then_removed_with_all_there_is_stays_an_error(layout, publish, encoder) -> None:
    publish(layout, 12)
    searcher = Searcher(layout, encoder)
    os.truncate(layout.generation_folder(1) / "passages.arrow", 10)
    layout.current_path.unlink()
    for _ in range(2):
        with pytest.raises(DamageError, match=r"must have .* bytes, got 10"):
            searcher.search("slate")
        shutil.rmtree(layout.folder, ignore_errors=True)


def test_new_generation_of_another_encoder_is_refused_at_every_call(layout, publish, encoder) -> None:
    first = publish(layout, 12)
    searcher = Searcher(layout, encoder)
    publish(layout, 9, version=1, replaces=first, fingerprint="f" * 64)
    for _ in range(2):
        with pytest.raises(FingerprintMismatchError):
            searcher.search("slate")


def test_new_generation_of_another_encoder_is_answered_where_its_encoder_can_be_loaded(
    layout, publish, make_encoder
) -> None:
    loaded = []

    def load(generation: Generation) -> QueryEncoder:
        loaded.append(generation.number)
        return make_encoder(generation.manifest.fingerprints["encoder"])

    first = publish(layout, 12)
    searcher = Searcher(layout, load)
    assert searcher.search("slate").generation == 1
    second = publish(layout, 9, version=1, replaces=first, fingerprint="f" * 64)
    assert searcher.search("slate").generation == 2
    publish(layout, 9, version=2, replaces=second, fingerprint="f" * 64)
    assert searcher.search("slate").generation == 3
    assert loaded == [1, 2]


def test_searches_during_publication_answer_from_one_generation_each(layout, publish, make_encoder) -> None:
    latest = publish(layout, 30)
    searcher = Searcher(layout, make_encoder())
    results, is_done = [], threading.Event()

    def search_on() -> None:
        while not is_done.is_set():
            results.append(searcher.search("granite slate"))

    with ThreadPoolExecutor(3) as pool:
        searching = [pool.submit(search_on) for _ in range(3)]
        for version in (1, 2, 3, 4):
            latest = publish(layout, 30, version=version, replaces=latest)
        is_done.set()
        for each in searching:
            each.result()
    results.append(searcher.search("granite slate"))
    assert all(version_of(result) == {str(result.generation - 1)} for result in results)
    assert results[-1].generation == 5
    assert len({result.generation for result in results}) >= 2


def test_many_threads_get_the_same_answer(stones, searcher: Searcher) -> None:
    expected = searcher.search("granite slate")
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(searcher.search, ["granite slate"] * 40)] == [expected] * 40


@pytest.mark.parametrize("publications", [1, 2])
def test_thread_waits_for_the_new_generation_only_where_the_old_one_went_away(
    layout, publish, encoder, monkeypatch: pytest.MonkeyPatch, publications: int
) -> None:
    previous = publish(layout, 12)
    searcher = Searcher(layout, encoder)
    for version in range(1, publications + 1):
        previous = publish(layout, 12, version=version, replaces=previous)
    is_opening, may_open = threading.Event(), threading.Event()
    open_generation = searcher_module.open_generation

    def slowly(asked: CollectionLayout, **named: Any) -> Generation:
        is_opening.set()
        assert may_open.wait(600)
        return open_generation(asked, **named)

    monkeypatch.setattr(searcher_module, "open_generation", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(searcher.search, "slate")
        assert is_opening.wait(600)
        second = pool.submit(searcher.search, "slate")
        if publications == 1:
            assert second.result(600).generation == 1
        may_open.set()
        assert first.result(600).generation == publications + 1
        assert second.result(600).generation == (1 if publications == 1 else 3)
