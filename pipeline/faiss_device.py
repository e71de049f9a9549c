"""Where FAISS computes: on this machine's first card where faiss-gpu finds one, else on its processors.

    train_kmeans        clusters of a corpus, inverted lists, subspaces of token codes
    CardCopy.search     lists of vectors that are encoded, nearest vectors of a query

What fails on the card is done again on the processors, and the log says so once; an index that failed there
is asked here from then on. FAISS reports memory that is used up. A card that is lost altogether ends the
process, since FAISS aborts it, and the next ingest goes on where it stopped.

A process has one choice, as it has one number of threads. Written against ``index_cpu_to_gpu`` of FAISS 1.15,
with its limits: a card selects 2,048 candidates at most, and passes over what it is told of allowed
positions, so that filters and deleted rows are for the processors. RaBitQ is not there at all. Not used:
cuVS, whose inverted files find other vectors, and more cards than one.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# SWIG's module has no types, and that of faiss-cpu has nothing of a card.

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from cairn.pipeline.config import IndexDevice
from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.options import About, Option, check_value
from jaxtyping import Float32, Int64

log = logging.getLogger(__name__)

VARIABLE: Final = "CAIRN_INDEX_DEVICE"
MAX_SELECTED: Final = 2_048
"""Candidates and lists that FAISS selects on a card, at most."""
TEMPORARY_BYTES: Final = 256 << 20
"""Of a card for what FAISS computes in between; its own default of 1.5 GB would be the encoder's."""
MIN_CARD_PRODUCTS: Final = 2 * 10**10
"""Multiplications from which K-means is worth a card, whose set-up took half a second on an H100: a core does
30 to 120 thousand million a second."""
FAILURES: Final = (RuntimeError, MemoryError)
"""What FAISS raises where a card fails or has no memory left."""


class _Card:
    """The first card; FAISS lets one thread at a time use what one of these has copied, or free it.

    ``retired`` are copies of no index any more, freed by the next that holds ``lock``.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.retired: list[Any] = []
        self._resources = faiss.StandardGpuResources()
        self._resources.setTempMemory(TEMPORARY_BYTES)
        self._options = faiss.GpuClonerOptions()
        self._options.use_cuvs = False

    def copy(self, index: Any) -> Any:
        return faiss.index_cpu_to_gpu(self._resources, 0, index, self._options)


class _Choice:
    """What this process has chosen, its card once it was asked for, and whether a failure was said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: IndexDevice | None = None
        self._card: _Card | None = None
        self._is_failure_said = False

    def choose(self, device: IndexDevice) -> None:
        check_value(_OPTION, device, None)
        if device == "gpu":
            _require_card()
        with self._lock:
            self._chosen, self._card, self._is_failure_said = device, None, False

    def is_card(self) -> bool:
        if self._chosen is None:
            self.choose(os.environ.get(VARIABLE) or "auto")  # pyright: ignore[reportArgumentType]
        return self._chosen != "cpu" and has_card()

    def card(self) -> _Card:
        with self._lock:
            self._card = self._card or _Card()
            return self._card

    def say_failed(self, error: Exception) -> None:
        with self._lock:
            if not self._is_failure_said:
                log.warning("index_device.card_failed, the processors go on: %s", str(error).splitlines()[0])
            self._is_failure_said = True


_OPTION: Final = Option(
    name="index_device", kind=IndexDevice, is_optional=False, default="auto", about=About()
)
_choice: Final = _Choice()


def use_index_device(device: IndexDevice) -> None:
    """Choose where FAISS computes in this process: ``auto``, ``cpu`` or ``gpu``.

    ``auto`` takes the card where there is one. Raises :class:`ConfigError` for ``gpu`` where there is none.
    Without a choice, ``CAIRN_INDEX_DEVICE`` holds, else ``auto``.
    """
    _choice.choose(device)


def has_card() -> bool:
    """Tell whether FAISS finds a card."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def _require_card() -> None:
    if not hasattr(faiss, "StandardGpuResources"):
        raise ConfigError(
            "index_device gpu must have the package faiss-gpu, got faiss-cpu; uninstall faiss-cpu and run "
            f"{install_command('gpu')}, or choose auto or cpu"
        )
    if not faiss.get_num_gpus():
        raise ConfigError("index_device gpu must find a CUDA card, got none; choose auto or cpu")


def train_kmeans(
    points_NV: Float32[np.ndarray, "N V"],
    num_clusters: int,
    parameters: Mapping[str, Any],
    initial_centroids_KV: Float32[np.ndarray, "K V"] | None = None,
) -> Any:
    """Return a trained ``faiss.Kmeans``; ``parameters`` are fields of FAISS's ``ClusteringParameters``.

    Small sets stay on the processors, whatever was chosen.
    """
    kmeans = faiss.Kmeans(points_NV.shape[1], num_clusters, **parameters)
    products = points_NV.size * num_clusters * parameters["niter"] * parameters.get("nredo", 1)
    if _choice.is_card() and products >= MIN_CARD_PRODUCTS:
        try:
            # Copied by a card of its own: searches go on meanwhile.
            kmeans.index = _Card().copy(kmeans.index)
            kmeans.train(points_NV, init_centroids=initial_centroids_KV)
        except FAILURES as error:
            _choice.say_failed(error)
            kmeans.set_index()
        else:
            kmeans.set_index()  # lets go of the card's memory
            return kmeans
    kmeans.train(points_NV, init_centroids=initial_centroids_KV)
    return kmeans


class CardCopy:
    """An index and its copy on the card, made when first asked for; safe to share between threads.

    ``searches_before`` are answered by the processors: one search alone would wait longer for the copy than
    for its answer.
    """

    def __init__(self, index: Any, *, searches_before: int = 0) -> None:
        self._index = index
        self._copy: Any = None
        self._let_go: Callable[[], object] = lambda: None
        self._is_left = False
        self._searches_before = searches_before

    def search(
        self, queries_QV: Float32[np.ndarray, "Q V"], top_k: int, parameters: Any = None
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]] | None:
        """Return the card's answer, None where the processors are to give it."""
        if self._is_left or top_k > MAX_SELECTED or not _choice.is_card():
            return None
        if self._searches_before:
            self._searches_before -= 1
            return None
        try:
            card = _choice.card()
            with card.lock:
                card.retired.clear()
                copy = self._copy
                if copy is None:
                    copy = self._copy = card.copy(self._index)
                    self._let_go = weakref.finalize(self, card.retired.append, copy)
                return copy.search(queries_QV, top_k, params=parameters)
        except FAILURES as error:
            self._is_left, self._copy = True, None
            self._let_go()
            _choice.say_failed(error)
            return None
