"""TempScale's choice: with which temperature τ each row is encoded.

A backbone divides every attention logit of a call by one τ, softmax(QKᵀ / (τ √d)), in all layers. Which τ is
a setting: one for all rows, another for queries, or one that falls with a row's length, as longer rows
collapse more. Rows of one τ go through the model together.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", eq. 6; §5.1 takes τ =
0.8 out of 0.1 to 1.0. Appendix E.6 finds a lower τ better for longer texts and another one for queries than
for documents; appendix F finds that scaling by length can also set texts of different length apart. So one τ
is the default, and no schedule is built in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64


def row_temperatures(
    lengths_R: Int64[np.ndarray, " R"], temperature: float, by_length: Sequence[tuple[int, float]]
) -> Float64[np.ndarray, " R"]:
    """Return τ of each row: that of the last step its tokens reach, ``temperature`` below the first.

    Steps ascend by length.
    """
    step_R = np.searchsorted(np.array([length for length, _ in by_length], np.int64), lengths_R, side="right")
    return np.array([temperature, *(step for _, step in by_length)], np.float64)[step_R]
