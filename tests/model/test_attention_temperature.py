from __future__ import annotations

import numpy as np
from cairn.pipeline.model.document_encoder import row_temperatures
from hypothesis import given
from hypothesis import strategies as st


@given(
    lengths=st.lists(st.integers(1, 600), max_size=20),
    steps=st.dictionaries(st.integers(1, 600), st.floats(0.1, 2.0), max_size=4),
)
def test_row_temperatures_equal_the_last_step_each_row_reaches(lengths, steps):
    by_length = sorted(steps.items())
    expected = []
    for length in lengths:
        temperature = 0.8
        for reached, step in by_length:
            if length >= reached:
                temperature = step
        expected.append(temperature)
    assert row_temperatures(np.array(lengths, np.int64), 0.8, by_length).tolist() == expected
