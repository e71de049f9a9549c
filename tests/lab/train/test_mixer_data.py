"""Claims of mixer data."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train import mixer_data as mixer_vectors
from cairn.pipeline.lab.train.mixer_data import (
    HELDOUT_CANDIDATES,
    HELDOUT_DOCUMENTS,
    MAX_LANDMARKS,
    NO_TITLE,
    BaseVectors,
    BatchMaker,
    MixerBatch,
    MixerData,
    draw_pairs,
    unit,
)
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.model.context_encoder import ContextEncoder

TEXTS = ["the old stone", "a river " * 30, "the cat sat on the mat", "a mountain path"]


@pytest.fixture
def settings(tiny_model_folder: Path) -> EncoderConfig:
    return EncoderConfig(model=str(tiny_model_folder), precision="fp32", landmark_interval=16)


class Heard:
    """Listens for texts that are embedded."""

    def __init__(self) -> None:
        self.embedded: list[int] = []
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        self.embedded.append(total or 0)
        self.stages.append(stage)


def test_base_vectors_of_documents_are_an_encoders_and_their_means_its_documents(
    settings: EncoderConfig, tmp_path: Path
):
    found = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    encoded = DocumentEncoder(settings).encode(TEXTS)
    assert found.offsets_N1.tolist() == encoded.chunk_offsets.tolist()
    assert found.offsets_N1[2] - found.offsets_N1[1] > 2
    np.testing.assert_allclose(found.vectors_MD, encoded.chunk_vectors_MV, atol=1e-3)
    np.testing.assert_allclose(found.means(), encoded.document_vectors_NV, atol=1e-3)


def test_base_vectors_of_queries_and_titles_stand_behind_their_own_prefixes(settings: EncoderConfig):
    prefixed = replace(settings, document_prefix="path", query_prefix="walk")
    vectors, heard = BaseVectors(prefixed, None), Heard()
    np.testing.assert_allclose(
        vectors.embed("query", TEXTS, heard).means(),
        DocumentEncoder(prefixed).encode_queries(TEXTS),
        atol=1e-3,
    )
    plain = DocumentEncoder(settings).encode(TEXTS).document_vectors_NV
    np.testing.assert_allclose(vectors.embed("title", TEXTS, heard).means(), plain, atol=1e-3)
    assert heard.stages == ["queries", "titles"]


def test_base_vectors_of_context_documents_are_a_first_stage_s(settings: EncoderConfig, tmp_path: Path):
    for tokens in (12, 48):
        context = ContextConfig(max_document_tokens=tokens)
        vectors, heard = BaseVectors(settings, tmp_path, context), Heard()
        first_stage = ContextEncoder.of(vectors.encoder.backbone, settings, context)
        found = vectors.embed("context", TEXTS, heard)
        np.testing.assert_allclose(found.means(), unit(first_stage.embed(TEXTS)), atol=1e-3)
        assert (heard.stages, heard.embedded) == (["context documents"], [4])
    shorter = BaseVectors(settings, tmp_path, ContextConfig(max_document_tokens=12)).embed("context", TEXTS)
    assert np.abs(shorter.means()[1] - found.means()[1]).max() > 0.01


def test_base_vectors_embeds_only_what_is_not_kept_and_gives_the_order_asked_for(
    settings: EncoderConfig, tmp_path: Path
):
    first, second = Heard(), Heard()
    before = BaseVectors(settings, tmp_path).embed("document", TEXTS[:3], first)
    after = BaseVectors(settings, tmp_path).embed("document", [TEXTS[3], TEXTS[2], TEXTS[0]], second)
    assert (first.embedded, second.embedded) == ([3], [1])
    np.testing.assert_array_equal(after.means()[1:], before.means()[[2, 0]])


def test_base_vectors_of_a_killed_run_are_kept_block_by_block(
    settings: EncoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mixer_vectors, "BLOCK_TEXTS", 2)

    def kill(stage: str, done: int, total: int | None, unit: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BaseVectors(settings, tmp_path).embed("document", TEXTS, kill)
    heard = Heard()
    found = BaseVectors(settings, tmp_path).embed("document", TEXTS, heard)
    assert heard.embedded == [2]
    np.testing.assert_array_equal(
        found.vectors_MD, BaseVectors(settings, None).embed("document", TEXTS).vectors_MD
    )


@pytest.mark.parametrize(
    "changed", [{"landmark_interval": 24}, {"query_prefix": "walk"}, {"precision": "auto"}]
)
def test_base_vectors_of_other_settings_are_others(
    settings: EncoderConfig, tmp_path: Path, changed: dict[str, Any]
):
    BaseVectors(settings, tmp_path).embed("query", TEXTS)
    heard = Heard()
    BaseVectors(replace(settings, **changed), tmp_path).embed("query", TEXTS, heard)
    assert heard.embedded == [4]


def test_base_vectors_in_a_damaged_file_are_embedded_again(
    settings: EncoderConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    before = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING):
        after = BaseVectors(settings, tmp_path).embed("document", TEXTS)
    assert "is damaged; its texts are embedded again" in caplog.text
    np.testing.assert_array_equal(after.vectors_MD, before.vectors_MD)


TINY: dict[str, Any] = {"min_pairs": 2}


def pairs_of(*rows: tuple[str, str, str, str]) -> TrainingPairs:
    queries, documents, titles, sources = zip(*rows, strict=True)
    return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources)


def pages(num_pages: int, size: int, source: str = "s") -> list[tuple[str, str, str, str]]:
    return [
        (f"q {page} {number}", f"d {page} {number}", f"t {page}", source)
        for page in range(num_pages)
        for number in range(size)
    ]


def test_draw_pairs_keeps_pages_whole_and_at_most_so_many_of_a_source():
    pairs = pairs_of(*pages(6, 3, "a"), *pages(2, 3, "b"))
    drawn = draw_pairs(pairs, MixerConfig(max_pairs=10, **TINY))
    sizes = Counter(zip(drawn.sources, drawn.titles, strict=True))
    assert set(sizes.values()) == {3}
    assert Counter(drawn.sources) == {"a": 9, "b": 6}
    assert drawn.skipped == {"pair beyond max_pairs of its source": 9}
    rows = list(zip(pairs.sources, pairs.queries, strict=True))
    places = [rows.index(row) for row in zip(drawn.sources, drawn.queries, strict=True)]
    assert places == sorted(places)


def test_draw_pairs_of_a_page_that_is_too_large_are_its_beginning():
    drawn = draw_pairs(pairs_of(*pages(1, 9)), MixerConfig(max_pairs=4, **TINY))
    assert drawn.documents == ("d 0 0", "d 0 1", "d 0 2", "d 0 3")


def test_draw_pairs_leaves_small_sources_out_and_refuses_when_none_is_left():
    same_document = [(f"q {number}", "d", "", "one document") for number in range(5)]
    pairs = pairs_of(*pages(2, 3, "large"), ("q", "d", "", "small"), *same_document)
    drawn = draw_pairs(pairs, MixerConfig(min_pairs=4))
    assert (set(drawn.sources), drawn.skipped) == ({"large"}, {"pair of a source too small": 6})
    with pytest.raises(
        SourceError,
        match="needs a source of at least min_pairs 48 pairs with two documents, got none: the largest, "
        "'large'",
    ):
        draw_pairs(pairs, MixerConfig())


def test_embed_sources_lays_documents_out_by_page(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=5, num_sections=4, sources=("a", "b"))
    data = world.data(MixerConfig(hold_out=0.0, **TINY))
    first, second = data.sources
    assert (first.name, second.name) == ("a", "b")
    assert first.pages == tuple(tuple(range(4 * page, 4 * page + 4)) for page in range(5))
    assert first.page_n.tolist() == np.repeat(np.arange(5), 4).tolist()
    assert second.row_n.tolist() == list(range(20, 40))
    assert second.title_n.tolist() == np.repeat(np.arange(5, 10), 4).tolist()
    assert first.queries == tuple((number,) for number in range(20))
    assert first.num_training_pairs == 20
    np.testing.assert_array_equal(second.mean_nD, data.documents.means()[20:])
    np.testing.assert_allclose(np.linalg.norm(data.query_QD, axis=1), 1, atol=1e-5)


def test_embed_sources_holds_whole_pages_out(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=8, num_sections=4)
    (source,) = world.data(MixerConfig(hold_out=0.3, **TINY)).sources
    held_out = source.is_heldout_n.reshape(8, 4)
    assert held_out.sum() == 8
    assert (held_out.all(1) == held_out.any(1)).all()
    assert source.num_training_pairs == 24


def test_embed_sources_document_without_a_title_is_a_page_by_itself(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=2, num_sections=3)
    world.file.write_text(world.file.read_text().replace('"page 1"', '" "'))
    (source,) = world.data(MixerConfig(hold_out=0.0, **TINY)).sources
    assert source.pages == ((0, 1, 2), (3,), (4,), (5,))
    assert source.title_n.tolist() == [0, 0, 0, NO_TITLE, NO_TITLE, NO_TITLE]


CONFIG = MixerConfig(batch_queries=24, context_documents=40, hold_out=0.2, min_pairs=4)


@pytest.fixture
def data(make_paged_world: Callable[..., Any]) -> MixerData:
    return make_paged_world().data(CONFIG)


def sequences_of(batch: MixerBatch) -> list[list[int]]:
    """Return the documents of each sequence, a document once a landmark."""
    return [[document for document in row if document >= 0] for row in batch.document_SL.tolist()]


def test_training_batch_is_made_of_one_source_and_no_document_twice(data: MixerData):
    maker = BatchMaker(data, CONFIG)
    (source,) = data.sources
    held_out = set(np.flatnonzero(source.is_heldout_n).tolist())
    assert len(held_out) == 16
    for step in range(40):
        batch = maker.training_batch(step)
        sequences = sequences_of(batch)
        documents = [document for sequence in sequences for document in sequence]
        assert len(documents) == len(set(documents))
        assert not held_out & set(documents)
        assert all(
            answer in sequences[place]
            for answer, place in zip(batch.answer_Q.tolist(), batch.sequence_Q.tolist(), strict=True)
        )
        assert 24 <= len(batch.query_QD) < 24 + 6
        assert torch.equal(batch.document_SL >= 0, batch.stretches.is_landmark_SL)


def test_training_batch_gives_landmarks_and_queries_their_vectors(data: MixerData):
    batch = BatchMaker(data, CONFIG).training_batch(3)
    (source,) = data.sources
    expected = unit(data.documents.vectors_MD[source.row_n[batch.document_SL[0, 0]]])
    np.testing.assert_allclose(batch.stretches.x_SLD[0, 0], expected, atol=1e-6)
    np.testing.assert_allclose(batch.query_QD[0], data.query_QD[source.queries[batch.answer_Q[0]][0]])
    np.testing.assert_allclose(batch.answer_QD, source.mean_nD[batch.answer_Q])
    lengths = batch.stretches.is_landmark_SL.sum(1)
    assert torch.equal(batch.stretches.num_landmarks_S, lengths.float())
    sums_SD = (batch.stretches.x_SLD * batch.stretches.is_landmark_SL[..., None]).sum(1)
    torch.testing.assert_close(batch.stretches.mean_SD, torch.nn.functional.normalize(sums_SD, dim=-1))


def test_training_batch_sequences_are_neighbours_of_a_page_or_documents_by_themselves(data: MixerData):
    grouped, alone = (BatchMaker(data, replace(CONFIG, grouped_share=share)) for share in (1.0, 0.0))
    (source,) = data.sources
    lengths: Counter[int] = Counter()
    for step in range(30):
        for sequence in sequences_of(grouped.training_batch(step)):
            first = source.pages[source.page_n[sequence[0]]].index(sequence[0])
            assert tuple(sequence) == source.pages[source.page_n[sequence[0]]][first : first + len(sequence)]
            lengths[len(sequence)] += 1
        assert {len(sequence) for sequence in sequences_of(alone.training_batch(step))} == {1}
    assert set(lengths) == set(range(1, 9))


def test_training_batch_titles_and_contexts_are_absent_in_their_shares(data: MixerData):
    config = replace(CONFIG, title_absence=0.3, context_absence=0.25, grouped_share=0.0)
    batches = [BatchMaker(data, config).training_batch(step) for step in range(100)]
    norms = torch.cat([batch.stretches.title_SD.norm(dim=1) for batch in batches])
    assert set(norms.round(decimals=3).tolist()) == {0.0, 1.0}
    assert 0.25 < float((norms == 0).float().mean()) < 0.35
    sizes = [0 if batch.context_CD is None else len(batch.context_CD) for batch in batches]
    assert 0.15 < sizes.count(0) / 100 < 0.35
    assert set(sizes) == {0, 40}


def test_batches_have_as_many_context_vectors_of_their_source_as_are_served(
    make_paged_world: Callable[..., Any],
):
    config = replace(CONFIG, context_absence=0.0, hold_out=0.2)
    data = make_paged_world(num_pages=20, sources=("a", "b")).data(config)
    maker = BatchMaker(data, config)
    assert [len(source.context_P) for source in data.sources] == [80, 80]
    drawn: dict[str, set[int]] = {"a": set(), "b": set()}
    batches = [maker.training_batch(step) for step in range(20)]
    for batch in [*batches, *(batch for batch, _ in maker.heldout_batches())]:
        cosine_CN = batch.context_CD.numpy() @ unit(data.contexts.vectors_MD).T
        assert cosine_CN.max(1).min() > 1 - 1e-5
        numbers = set(cosine_CN.argmax(1).tolist())
        assert len(numbers) == 40
        drawn[batch.source] |= numbers
    assert {name: len(numbers) for name, numbers in drawn.items()} == {"a": 80, "b": 80}
    assert not drawn["a"] & drawn["b"]


def test_context_of_a_small_source_is_all_of_it_but_what_is_held_out(make_paged_world: Callable[..., Any]):
    config = replace(CONFIG, context_documents=512, context_absence=0.0, hold_out=0.2)
    data = make_paged_world().data(config)
    (source,) = data.sources
    batch = BatchMaker(data, config).training_batch(0)
    shown_ND = source.mean_nD[~source.is_heldout_n]
    cosine_CN = batch.context_CD.numpy() @ shown_ND.T
    assert cosine_CN.shape == (80, 80)
    assert sorted(cosine_CN.argmax(1).tolist()) == list(range(80))


def test_training_batch_of_neighbours_asks_about_documents_that_are_alike(data: MixerData):
    config = replace(CONFIG, batch_queries=4, grouped_share=0.0)
    cosines: list[float] = []
    for step in range(60):
        answers_QD = BatchMaker(data, config).training_batch(step).answer_QD.numpy()
        cosines.append(float(np.median((answers_QD @ answers_QD.T)[~np.eye(len(answers_QD), dtype=bool)])))
    # Sections of one kind have a cosine of about .7, others of about 0.
    assert 0.2 < np.mean(np.array(cosines) > 0.4) < 0.8


def test_training_batches_draw_sources_by_the_root_of_their_pairs(make_paged_world: Callable[..., Any]):
    world = make_paged_world(num_pages=17, num_sections=2, sources=("a", "b"))
    lines = world.file.read_text().splitlines(keepends=True)
    world.file.write_text("".join(lines[:32] + lines[34:36]))
    maker = BatchMaker(world.data(replace(CONFIG, hold_out=0.0, min_pairs=2)), CONFIG)
    drawn = Counter(maker.training_batch(step).source for step in range(200))
    assert 0.72 < drawn["a"] / 200 < 0.88  # 4 to 1


def test_training_batch_of_a_long_document_reads_its_beginning(data: MixerData):
    long = replace(
        data.documents,
        offsets_N1=np.array([0, 500, *range(501, 500 + len(data.documents.offsets_N1) - 1)], np.int64),
    )
    generator = np.random.default_rng(0)
    long = replace(long, vectors_MD=generator.normal(size=(long.offsets_N1[-1], 32)).astype(np.float16))
    maker = BatchMaker(replace(data, documents=long), replace(CONFIG, grouped_share=1.0))
    lengths = [int(maker.training_batch(step).stretches.num_landmarks_S.max()) for step in range(20)]
    assert max(lengths) == MAX_LANDMARKS


def test_heldout_batches_ask_about_held_out_documents_among_training_ones(data: MixerData):
    (source,) = data.sources
    held_out = set(np.flatnonzero(source.is_heldout_n).tolist())
    alone, grouped = (batch for batch, share in BatchMaker(data, CONFIG).heldout_batches())
    for batch in (alone, grouped):
        assert set(batch.answer_Q.tolist()) == held_out
        assert len(held_out) <= HELDOUT_DOCUMENTS
        documents = {document for sequence in sequences_of(batch) for document in sequence}
        assert held_out < documents
        assert len(documents) <= HELDOUT_CANDIDATES
        assert len(batch.context_CD) == 40
    assert alone.document_SL.shape[1] == 1
    assert grouped.document_SL.shape[1] > 1


def test_heldout_batches_stand_for_a_source_as_often_as_it_is_trained_on(
    make_paged_world: Callable[..., Any],
):
    world = make_paged_world(num_pages=40, num_sections=2, sources=("a", "b"))
    lines = world.file.read_text().splitlines(keepends=True)
    world.file.write_text("".join(lines[:80] + lines[80:100]))
    shares = [
        (batch.source, share) for batch, share in BatchMaker(world.data(CONFIG), CONFIG).heldout_batches()
    ]
    assert [source for source, _ in shares] == ["a", "a", "b", "b"]
    assert [share for _, share in shares] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_sample_vectors_are_unit_vectors_of_chunks_and_queries(data: MixerData):
    sample = BatchMaker(data, CONFIG).sample_vectors(50)
    assert sample.shape == (100, 32)
    np.testing.assert_allclose(np.linalg.norm(sample, axis=1), 1, atol=1e-5)
    is_query = (sample @ data.query_QD.T > 1 - 1e-5).any(1)
    assert is_query.tolist() == [False] * 50 + [True] * 50
