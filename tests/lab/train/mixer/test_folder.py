from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import DiskFullError
from cairn.pipeline.lab.train import mixer as mixer_folder
from cairn.pipeline.lab.train.mixer import save_mixer
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import Base, encoder_config
from cairn.pipeline.model.landmark_mixer import LandmarkMixer, read_landmark_mixer


@pytest.fixture
def base(tiny_model_folder: Path) -> Base:
    return Base(
        model=str(tiny_model_folder), weights_sha256=read_checkpoint(tiny_model_folder).weights_sha256
    )


def test_save_mixer_is_read_back_as_it_was(base: Base, tmp_path: Path):
    mixer = LandmarkMixer(32, 3, 5)
    settings = EncoderConfig(
        model=base.model, use_context=True, query_prefix="find", backend="torch", precision="fp32"
    )
    save_mixer(tmp_path / "deep" / "mixer", mixer, base, settings)
    read = read_landmark_mixer(read_checkpoint(tmp_path / "deep" / "mixer").tensors, 32, torch.device("cpu"))
    assert read is not None
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in mixer.state_dict().items())
    brought = encoder_config({"model": str(tmp_path / "deep" / "mixer")})
    assert (brought.use_context, brought.query_prefix, brought.precision) == (True, "find", "auto")


def test_save_mixer_on_a_full_disk_leaves_nothing(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mixer_folder.durable, "write_bytes", full)
    with pytest.raises(DiskFullError, match="no space left while saving the mixer"):
        save_mixer(tmp_path / "mixer", LandmarkMixer(32), base, EncoderConfig())
    assert list(tmp_path.iterdir()) == []


def test_a_saved_mixer_is_readable_by_others_where_its_settings_are(base: Base, tmp_path: Path):
    save_mixer(tmp_path / "mixer", LandmarkMixer(32, 3, 5), base, EncoderConfig(model=base.model))
    assert len({path.stat().st_mode for path in (tmp_path / "mixer").iterdir()}) == 1
