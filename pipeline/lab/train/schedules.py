"""What the loop of steps reads of a run's settings, whatever is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

Schedule = Literal["linear", "cosine"]


@runtime_checkable
class RunSettings(Protocol):
    """Settings of any run.

    ``own_lrs`` are peak rates of parameters, by name, that have one of their own and no decay.
    """

    @property
    def steps(self) -> int: ...  # noqa: D102 - the settings say what each of them is
    @property
    def checkpoint_every(self) -> int: ...  # noqa: D102
    @property
    def peak_lr(self) -> float: ...  # noqa: D102
    @property
    def own_lrs(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def warmup_share(self) -> float: ...  # noqa: D102
    @property
    def weight_decay(self) -> float: ...  # noqa: D102
