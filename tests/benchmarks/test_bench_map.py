"""What a map of 5,000 documents takes of a processor: at most 5 s, with neighbours as near as the peer's.

``CAIRN_BENCH_ROOT`` names the root of a collection ``full``. The peer is openTSNE with its own settings on
3,000 evenly spread documents, the others between their nearest neighbours: Cairn's map until November 2026.
Run it with ``OMP_NUM_THREADS=1``.

    N documents    K neighbours
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.stored_files import SIZES
from cairn.pipeline.serve.maps.corpus_map import draw_map, place
from cairn.pipeline.serve.maps.map_files import MapFiles

pytestmark = pytest.mark.bench

GOAL_SECONDS = 5.0
PEER_DOCUMENTS, NEIGHBOURS = 3_000, 10


@pytest.mark.skipif("CAIRN_BENCH_ROOT" not in os.environ, reason="needs a collection")
def test_map_of_five_thousand_documents(tmp_path: Path) -> None:
    layout = CollectionLayout(Path(os.environ["CAIRN_BENCH_ROOT"]), "full")
    generation = open_generation(layout, checks=SIZES)
    visible = np.arange(len(generation.cluster_ids))
    vectors = generation.documents.reconstruct(visible)
    began = time.process_time()
    import openTSNE

    imported = time.process_time() - began
    began = time.process_time()
    drawn = draw_map(generation, visible, MapFiles(tmp_path))
    took = time.process_time() - began
    began = time.process_time()
    sample = np.linspace(0, len(visible) - 1, PEER_DOCUMENTS).astype(np.int64)
    tsne: Any = cast(Any, openTSNE.TSNE)(neighbors="exact", n_jobs=1, random_state=0)
    places = np.asarray(tsne.fit(vectors[sample].astype(np.float64)), np.float32)
    peers = place(vectors, vectors[sample], places)
    peer = time.process_time() - began
    peers[sample] = places
    own, others = (kept_neighbours(vectors, found) for found in (drawn.places_N2, peers))
    print(f"\n{len(visible):,} documents: {took:.2f} s, {imported:.2f} s of imports aside")
    print(f"peer: {peer:.2f} s, {took / peer:.2f} x; neighbours kept: {own:.3f}, the peer {others:.3f}")
    assert took <= GOAL_SECONDS
    assert own >= others


def kept_neighbours(vectors_NV: np.ndarray, places_N2: np.ndarray) -> float:
    """Return the share of each document's nearest ten that are among the nearest ten on the map."""
    near_NK = nearest(vectors_NV @ vectors_NV.T)
    norm_N = (places_N2**2).sum(axis=1)
    on_map_NK = nearest(2 * places_N2 @ places_N2.T - norm_N[:, None] - norm_N[None])
    return float(np.mean([np.isin(near, seen).mean() for near, seen in zip(near_NK, on_map_NK, strict=True)]))


def nearest(scores_NN: np.ndarray) -> np.ndarray:
    """Return the columns with the highest scores of each row, itself left out."""
    np.fill_diagonal(scores_NN, -np.inf)
    return np.argpartition(-scores_NN, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
