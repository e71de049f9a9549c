from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.train.mixer_data import (
    HELDOUT_CANDIDATES,
    HELDOUT_DOCUMENTS,
    MAX_LANDMARKS,
    BatchMaker,
    MixerBatch,
    MixerData,
    unit,
)
from cairn.pipeline.lab.train.settings import MixerConfig

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


def test_training_batch_is_a_matter_of_seed_and_step_alone(data: MixerData):
    one, same, other = (BatchMaker(data, replace(CONFIG, seed=seed)).training_batch(7) for seed in (0, 0, 1))
    assert torch.equal(one.query_QD, same.query_QD)
    assert torch.equal(one.document_SL, same.document_SL)
    assert one.document_SL.tolist() != other.document_SL.tolist()
    assert BatchMaker(data, CONFIG).training_batch(8).document_SL.tolist() != one.document_SL.tolist()


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


def test_heldout_batches_of_nothing_held_out_are_none(make_paged_world: Callable[..., Any]):
    config = replace(CONFIG, hold_out=0.0)
    assert list(BatchMaker(make_paged_world().data(config), config).heldout_batches()) == []


def test_sample_vectors_are_unit_vectors_of_chunks_and_queries(data: MixerData):
    sample = BatchMaker(data, CONFIG).sample_vectors(50)
    assert sample.shape == (100, 32)
    np.testing.assert_allclose(np.linalg.norm(sample, axis=1), 1, atol=1e-5)
    is_query = (sample @ data.query_QD.T > 1 - 1e-5).any(1)
    assert is_query.tolist() == [False] * 50 + [True] * 50
