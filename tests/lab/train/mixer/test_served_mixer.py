"""What a mixer makes in training is what the encoder makes of the same documents in an ingest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train.mixer import save_mixer
from cairn.pipeline.lab.train.mixer_data import BaseVectors, BatchMaker, embed_sources, unit
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import Base, context_config
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from cairn.pipeline.types import silent_progress

from tests.tiny_models import TINY_WORDS

NUM_DOCUMENTS = 60


def pairs_of(num_words: int) -> TrainingPairs:
    words = [word for word in TINY_WORDS if not word.startswith("#")]
    texts = [
        " ".join(np.random.default_rng(number).choice(words, num_words)) for number in range(NUM_DOCUMENTS)
    ]
    return TrainingPairs(
        queries=tuple(f"the {text[:12]}" for text in texts),
        documents=tuple(texts),
        titles=tuple(f"{words[number % 9]} {words[number // 9]}" for number in range(NUM_DOCUMENTS)),
        sources=("s",) * NUM_DOCUMENTS,
    )


@pytest.mark.parametrize(("num_words", "context_documents"), [(12, 40), (70, 40), (70, 0)])
def test_mixer_vectors_in_training_are_those_of_an_ingest(
    tiny_model_folder: Path, tmp_path: Path, num_words: int, context_documents: int
):
    settings = EncoderConfig(model=str(tiny_model_folder), precision="fp32", landmark_interval=16)
    pairs = pairs_of(num_words)
    config = MixerConfig(
        context_documents=context_documents,
        max_context_tokens=48,
        context_absence=0.0,
        title_absence=0.0,
        grouped_share=0.0,
        hold_out=0.0,
    )
    vectors = BaseVectors(settings, None, config.context)
    data = embed_sources(pairs, vectors, config, silent_progress)
    torch.manual_seed(0)
    mixer = LandmarkMixer(data.width, num_heads=2, head_dim=8).requires_grad_(False)
    for name, parameter in mixer.named_parameters():
        if "gate" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    batch = BatchMaker(data, config).training_batch(0)
    trained = mixer.mix(batch.stretches, batch.context_CD)[batch.stretches.is_landmark_SL].numpy()

    checkpoint = read_checkpoint(tiny_model_folder)
    base = Base(model=str(tiny_model_folder), weights_sha256=checkpoint.weights_sha256)
    brought = replace(settings, use_context=context_documents > 0)
    save_mixer(tmp_path / "mixer", mixer, base, brought, context=config.context)
    context = None
    if batch.context_CD is not None:
        served_config = context_config(str(tmp_path / "mixer"), {})
        first_stage = ContextEncoder.of(vectors.encoder.backbone, settings, served_config)
        served_nD = unit(first_stage.embed(pairs.documents))
        drawn = [pairs.documents[place] for place in (batch.context_CD.numpy() @ served_nD.T).argmax(1)]
        assert len(set(drawn)) == len(drawn) == served_config.context_documents == 40
        ids = tuple(map(str, range(len(drawn))))
        context = ContextSet(
            doc_ids=ids,
            content_sha256s=ids,
            cluster_ids_C=np.zeros(len(ids), np.int32),
            embeddings_CD=first_stage.embed(drawn),
            first_stage_fingerprint=first_stage.fingerprint,
        )
    served = DocumentEncoder(replace(brought, model=str(tmp_path / "mixer")), context)
    documents = [int(own[0]) for own in batch.document_SL]
    encoded = served.encode(
        [pairs.documents[number] for number in documents],
        titles=[pairs.titles[number] for number in documents],
    )
    assert (1 - (encoded.chunk_vectors_MV * trained).sum(1)).max() < 1e-4
