"""A video that was decoded leaves the libraries of the process as they were."""

import subprocess
import sys

DRAWN = """
import io
import gymnasium, numpy as np
from relax_sdk.decord_import import import_decord
from relax_sdk import Video
film = Video.from_array(np.zeros((8, 64, 64, 3), np.uint8), fps=2.0)
reader = import_decord().VideoReader(io.BytesIO(film.bytes()), num_threads=1)
lake = gymnasium.make("FrozenLake-v1", render_mode="rgb_array")
lake.reset(seed=0)
print(len(reader), lake.render().shape)
"""


def test_gymnasium_draws_after_a_video_was_decoded() -> None:
    done = subprocess.run([sys.executable, "-c", DRAWN], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["8", "(256,", "256,", "3)"], done.stderr
