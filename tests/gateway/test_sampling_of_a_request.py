"""What a request says about sampling, understood once for all requests that say the same."""

from __future__ import annotations

import pytest
from relax_server.gateway.errors import ApiError
from relax_server.gateway.openai_chat import read_sampling

from relax_sdk.config import SamplingParams

BASE = SamplingParams(max_new_tokens=8, top_p=0.9)
LIMITS = ("max_tokens",)


def test_the_same_words_mean_the_same_again_and_others_something_else():
    first, again = (read_sampling({"temperature": 0.5, "max_tokens": 4}, BASE, False, LIMITS) for _ in range(2))
    assert first == again == SamplingParams(max_new_tokens=4, temperature=0.5, top_p=0.9)
    assert read_sampling({"temperature": 0.5}, BASE, False, LIMITS) == SamplingParams(8, 0.5, 0.9)
    told = read_sampling({"temperature": 0.5, "stop": "x", "seed": 3}, BASE, False, LIMITS)
    assert (told.stop, told.sampling_seed, told.temperature) == (("x",), 3, 0.5)


@pytest.mark.parametrize("wrong", [True, [1], {"a": 1}, "1", float("nan"), -1])
def test_a_wrong_value_is_refused_after_an_equal_one_that_is_right(wrong):
    assert read_sampling({"temperature": 1}, BASE, False, LIMITS).temperature == 1.0
    for _ in range(2):
        with pytest.raises(ApiError, match="temperature"):
            read_sampling({"temperature": wrong}, BASE, False, LIMITS)


@pytest.mark.parametrize("wrong", [[["x"]], [1], "", ["a"] * 17])
def test_wrong_stop_texts_are_refused(wrong):
    with pytest.raises(ApiError, match="stop"):
        read_sampling({"stop": wrong}, BASE, False, LIMITS)
