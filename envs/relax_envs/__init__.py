"""The environments that ship with Relax Gym; importing this package registers them.

| name | observation | turns | chance | ceiling |
|---|---|---|---|---|
| `tone-v0` | audio | 1 | 1/4 | 1 |
| `colour-v0` | image | 1 | 1/4 | 1 |
| `motion-v0` | video | 1 | 1/2 | 1 |
| `motion-shuffled-v0` | video without order: a control | 1 | 1/2 | 1/2 |
| `omni-quiz-v0` | audio, then image, then video | 3 | 1/3 | 1 |
| `higher-lower-v0` | text and a tool | up to 3 | 0.330 | 7/8 |

*Chance* is the mean reward of an action of the right form drawn at random, *ceiling* the best possible mean reward.
"""

from typing import Any

from relax_sdk.registry import register

_LETTER: dict[str, Any] = {"sampling": {"max_new_tokens": 2}, "rollout": {"max_turns": 1}}
"""One letter and the end-of-turn token."""

register("tone-v0", "relax_envs.tone:ToneEnv", tasks="relax_envs.tone:tasks", defaults={**_LETTER, "steps": 250})
register("colour-v0", "relax_envs.colour:ColourEnv", tasks="relax_envs.colour:tasks", defaults={**_LETTER, "steps": 250})
register("motion-v0", "relax_envs.motion:MotionEnv", tasks="relax_envs.motion:tasks", defaults={**_LETTER, "steps": 250})
register(
    "motion-shuffled-v0",
    "relax_envs.motion:MotionShuffledEnv",
    tasks="relax_envs.motion:shuffled_tasks",
    defaults={**_LETTER, "steps": 250},
)
register(
    "omni-quiz-v0",
    "relax_envs.omni_quiz:OmniQuizEnv",
    tasks="relax_envs.omni_quiz:tasks",
    defaults={**_LETTER, "rollout": {"max_turns": 3}, "algorithm": {"credit": "turn"}, "steps": 400},
)
register(
    "higher-lower-v0",
    "relax_envs.higher_lower:HigherLowerEnv",
    tasks="relax_envs.higher_lower:tasks",
    defaults={**_LETTER, "sampling": {"max_new_tokens": 16}, "rollout": {"max_turns": 4}, "steps": 300},
)
