from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.token_vectors.max_sim import token_idf


def test_token_idf_counts_texts_not_occurrences():
    found = token_idf(np.array([1, 1, 2, 1], np.int32), np.array([0, 3, 4, 4]), 4)

    # Three texts: id 1 stands in two of them, id 2 in one, ids 0 and 3 in none.
    assert found == pytest.approx(np.log1p([3.5 / 0.5, 1.5 / 2.5, 2.5 / 1.5, 3.5 / 0.5]))
