"""Every family and setting: batches against single rows, bf16 against fp32, and the guide's table of models.

A family reads a ``model_type``, or CDE's checkpoints, which have no ``model_type``. ``make models`` writes
the table again. A new family needs a writer of tiny checkpoints in ``family_folder``.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from cairn.pipeline.config import Backend, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.model_types import MODEL_TYPES
from cairn.pipeline.poolings import POOLINGS, Attention, Pooling
from safetensors.torch import save_file

from tests.tiny_models import context_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "models.md"
BEGIN, END = "<!-- models: begin, written by `make models` -->\n", "<!-- models: end -->\n"
TITLES = {name: kind.title for name, kind in MODEL_TYPES.items()} | {
    "electra": "EmbeddingGemma, EuroBERT, T5, ELECTRA, ALBERT, DeBERTa, Jina v3 and others",
    "cde v1": "cde-small-v1",
    "cde v2": "cde-small-v2",
}
COLUMN = {
    "electra": "any other that transformers runs",
    "cde v1": "of its backbone",
    "cde v2": "of its backbone",
}
FAMILIES = list(TITLES)
MODES = [(attention, pooling) for attention, poolings in POOLINGS.items() for pooling in poolings]
EVERY_FAMILY = {
    ("chunk", "mean", "plain"),
    ("full", "lmk", "context, sharp"),
}
"""What `make test` tries of every family; of BERT it tries all."""
TEXTS = ["the cat sat on the mat.", "old stone path " * 12, "a", "walking mountains, rivers; " * 5 + "end"]


@pytest.fixture(scope="session")
def family_folder(
    tiny_model_folder: Path,
    make: Callable[..., Path],
    make_nv_embed: Callable[..., Path],
    make_cde: Callable[..., Path],
    make_family: Callable[[str], Path],
    latent_block: Callable[..., Mapping[str, torch.Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Return a writer of tiny checkpoints by family, with a latent attention block where that may be."""

    def folder_of(family: str) -> Path:
        if family in ("bert", "roberta", "xlm-roberta", "camembert"):
            # RoBERTa's positions begin after the padding id, so one of its table is never read.
            changes = {"model_type": family, "max_position_embeddings": 96}
            folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp(family) / "model")
            (folder / "config.json").write_text(
                json.dumps(json.loads((folder / "config.json").read_text()) | changes)
            )
            return folder
        if family == "electra":
            return shutil.copytree(make_family(family), tmp_path_factory.mktemp(family) / "model")
        if family.startswith("cde"):
            return make_cde(int(family[-1]))
        if family == "nvembed":
            return make_nv_embed()
        return make("new", model_type="gte") if family == "gte" else make(family)

    @cache
    def with_latent_block(family: str) -> Path:
        folder = folder_of(family)
        if family.startswith(
            "cde"
        ):  # whose checkpoint may hold no tensor that its config.json does not call for
            return folder
        save_file(dict(latent_block(32, 8, 6)), folder / "cairn_extra.safetensors")
        return folder

    return with_latent_block


def _config(folder: Path, **settings: Any) -> EncoderConfig:
    sizes = {
        "landmark_interval": 12,
        "window_tokens": 36,
        "window_overlap_tokens": 15,
        "batch_tokens": 150,
    }
    return EncoderConfig(**{"model": str(folder), "precision": "fp32", **sizes, **settings})


def _context(backbone: Backbone) -> ContextSet:
    num_documents = min(5, backbone.max_context or 5)
    return context_of(np.random.default_rng(0).normal(size=(num_documents, backbone.context_dim)))


@cache
def _backbone(**what_it_depends_on: Any) -> Backbone:
    return load_backbone(EncoderConfig(**what_it_depends_on))


def _encoder(config: EncoderConfig, *, backwards: bool = False) -> DocumentEncoder:
    backbone = _backbone(
        **{name: getattr(config, name) for name in ("model", "precision", "backend", "causal", "layers")}
    )
    if not config.use_context:
        return DocumentEncoder(config, None, backbone)
    context = _context(backbone)
    if backwards:
        context = replace(context, embeddings_CD=context.embeddings_CD[::-1].copy())
    return DocumentEncoder(config, context, backbone)


def _vectors(folder: Path, *, backwards: bool = False, **settings: Any) -> np.ndarray | None:
    """Return the chunks' vectors, None where the family refuses the setting."""
    try:
        return _encoder(_config(folder, **settings), backwards=backwards).encode(TEXTS).chunk_vectors_MV
    except ConfigError:
        return None


def _combinations() -> list[Any]:
    """Return every combination of family, mode and settings; all but a few are marked slow."""
    settings = {"plain": {}, "context, sharp": {"use_context": True, "temperature": 0.8}}
    product = itertools.product(FAMILIES, MODES, settings)
    return [
        pytest.param(
            *(family, *mode, settings[name]),
            id="-".join([family, *mode, name]),
            marks=[] if family == "bert" or (*mode, name) in EVERY_FAMILY else pytest.mark.slow,
        )
        for family, mode, name in product
    ]


@pytest.mark.parametrize(("family", "attention", "pooling", "changes"), _combinations())
def test_encode_together_equals_one_by_one(family_folder, family, attention, pooling, changes):
    config = _config(family_folder(family), attention=attention, pooling=pooling, **changes)
    try:
        encoder = _encoder(config)
    except ConfigError:
        pytest.skip("the family refuses it, as the table says")
    together = encoder.encode(TEXTS)
    assert len(together.chunk_vectors_MV) > 2 * len(TEXTS)
    for index, text in enumerate(TEXTS):
        own = slice(*together.chunk_offsets[index : index + 2])
        np.testing.assert_allclose(
            together.chunk_vectors_MV[own], encoder.encode([text]).chunk_vectors_MV, atol=1e-5
        )


@pytest.mark.parametrize(("attention", "pooling"), [("chunk", "mean"), ("full", "lmk")])
@pytest.mark.parametrize("family", FAMILIES)
def test_encode_in_bf16_agrees_in_direction(family_folder, family, attention, pooling):
    exact, rounded = (
        _vectors(family_folder(family), attention=attention, pooling=pooling, precision=precision)
        for precision in ("fp32", "bf16")
    )
    assert (exact * rounded).sum(axis=1).min() >= 0.999


def _listed(values: list[str], all_values: tuple[str, ...]) -> str:
    return "all" if tuple(values) == all_values else ", ".join(f"`{value}`" for value in values) or "none"


def _features(folder: Path) -> dict[str, str]:
    """Say what a family does, by trying it."""
    plain = _vectors(folder)
    assert plain is not None

    def moves(**settings: Any) -> str:
        other = _vectors(folder, **settings)
        if other is None:
            return "no"
        assert np.isfinite(other).all()
        return (
            "yes" if other.shape != plain.shape or float(np.abs(other - plain).max()) > 1e-3 else "no effect"
        )

    def runs_on(backend: str) -> bool:
        other = _vectors(folder, backend=backend)
        assert other is None or np.allclose(other, plain, atol=1e-4)
        return other is not None

    found = {mode: _vectors(folder, attention=mode[0], pooling=mode[1]) for mode in MODES}
    taken = {each for mode, vectors in found.items() if vectors is not None for each in mode}
    poolings, attentions = (
        [each for each in get_args(kind) if each in taken] for kind in (Pooling, Attention)
    )
    context = moves(use_context=True)
    if context == "yes":
        ahead, back = (_vectors(folder, use_context=True, backwards=backwards) for backwards in (False, True))
        backbone = load_backbone(_config(folder))
        whose = (
            "its first stage"
            if backbone.first_stage.weights_fingerprint != backbone.weights_fingerprint
            else "itself"
        )
        context = f"{whose}, {'any order' if np.allclose(ahead, back, atol=1e-5) else 'in order'}"
    return {
        "`--pooling`": _listed(poolings, get_args(Pooling)),
        "`--attention`": _listed(attentions, get_args(Attention)),
        "`--use-context`": context,
        "`--temperature`": moves(temperature=0.5),
        "`--layers`": moves(layers=1),
        "`--dims`": moves(dims=8),
        "`--causal`": moves(causal=True),
        "`--backend`": _listed([backend for backend in get_args(Backend) if runs_on(backend)], ()),
    }


def _reader(family: str) -> str | None:
    return MODEL_TYPES[family].reader if family in MODEL_TYPES else None


NOTE = """\
The column `--use-context` says what embeds the context's documents, and whether their order moves vectors.
`latent` needs a checkpoint that holds the block; `cls` and `multi_cls` need a tokenizer with [CLS] or BOS."""


def _table(family_folder: Callable[[str], Path]) -> str:
    rows: list[tuple[list[str], dict[str, str]]] = []
    for family in FAMILIES:
        features = _features(family_folder(family))
        if rows and rows[-1][1] == features and _reader(rows[-1][0][-1]) == _reader(family):
            rows[-1][0].append(family)
        else:
            rows.append(([family], features))
    columns = list(rows[0][1])
    lines = [
        f"| model | `model_type` | {' | '.join(columns)} |",
        f"| {' | '.join(['---'] * (len(columns) + 2))} |",
        *(
            f"| {', '.join(TITLES[family] for family in families)} "
            f"| {', '.join(COLUMN.get(name, f'`{name}`') for name in families)} "
            f"| {' | '.join(features.values())} |"
            for families, features in rows
        ),
        "",
        NOTE,
        "Attentions and the poolings they go with:",
        "",
        *(f"- `{attention}`: {_code(poolings)}" for attention, poolings in POOLINGS.items()),
        "",
    ]
    return "\n".join(lines)


def _code(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values)


@pytest.mark.slow
def test_table_of_models_is_what_they_do_when_tried(family_folder, request):
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    table = _table(family_folder)
    if request.config.getoption("--rewrite-models"):
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
    else:
        assert written == table, "run `make models`"
