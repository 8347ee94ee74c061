"""The environments that ship with Relax Gym; importing this package registers them.

| name | observation | turns | chance | ceiling |
|---|---|---|---|---|
| `tone-v0` | audio | 1 | 1/4 | 1 |
| `colour-v0` | image | 1 | 1/4 | 1 |
| `motion-v0` | video | 1 | 1/2 | 1 |
| `motion-shuffled-v0` | video without order: a control | 1 | 1/2 | 1/2 |
| `omni-quiz-v0` | audio, then image, then video | 3 | 1/3 | 1 |
| `higher-lower-v0` | text and a tool | up to 2 | 0.556 | 1 |
| `higher-lower-8-v0` | the same with eight numbers | up to 3 | 0.330 | 7/8 |

*Chance* is the mean reward of an action of the right form drawn at random, *ceiling* the best possible mean reward.
"""

from typing import Any

from relax_sdk.defaults import FROM_SCRATCH
from relax_sdk.registry import register

_LETTER: dict[str, Any] = {
    "sampling": {"max_new_tokens": 1},
    "rollout": {"max_turns": 1},
    "from_scratch": FROM_SCRATCH,
}
"""The answer is one letter, so one token is sampled. An end-of-turn token after it would be trained on too: nothing is to be
learnt about it, but the reward pulls at it all the time, and the letter is learnt several times later."""

register("tone-v0", "relax_envs.tone:ToneEnv", tasks="relax_envs.tone:tasks", defaults={**_LETTER, "steps": 100})
register("colour-v0", "relax_envs.colour:ColourEnv", tasks="relax_envs.colour:tasks", defaults={**_LETTER, "steps": 120})
_WATCH: dict[str, Any] = {**_LETTER, "from_scratch": {**FROM_SCRATCH, "optimizer": {"lr": 7e-4}}, "steps": 150}
"""What moves is learnt less steadily than what is heard or seen: at 1e-3 it is forgotten again for a while."""

register("motion-v0", "relax_envs.motion:MotionEnv", tasks="relax_envs.motion:tasks", defaults=_WATCH)
register(
    "motion-shuffled-v0",
    "relax_envs.motion:MotionShuffledEnv",
    tasks="relax_envs.motion:shuffled_tasks",
    defaults=_WATCH,
)
register(
    "omni-quiz-v0",
    "relax_envs.omni_quiz:OmniQuizEnv",
    tasks="relax_envs.omni_quiz:tasks",
    defaults={
        **_WATCH,
        "rollout": {"groups_per_step": 8, "group_size": 8, "max_turns": 3},
        "algorithm": {"credit": "turn", "gamma": 0.0},
        "from_scratch": {**_WATCH["from_scratch"], "algorithm": {"entropy_coef": 0.0, "kl_coef": 0.06}},
        "steps": 400,
    },
)
_TOOL: dict[str, Any] = {
    "sampling": {"max_new_tokens": 12},
    "algorithm": {"credit": "turn"},
    "from_scratch": {**FROM_SCRATCH, "algorithm": {"entropy_coef": 0.0, "kl_coef": 0.05}, "warmup": {"steps": 120}},
    "training": {"token_budget": 16_384},
}
"""One tool call is eleven tokens, most of them form: it takes a longer warm-up, and a firmer hold."""

register(
    "higher-lower-v0",
    "relax_envs.higher_lower:HigherLowerEnv",
    tasks="relax_envs.higher_lower:small_tasks",
    kwargs={"numbers": 3, "guesses": 2},
    defaults={**_TOOL, "rollout": {"groups_per_step": 16, "group_size": 8, "max_turns": 2}, "steps": 200},
)
register(
    "higher-lower-8-v0",
    "relax_envs.higher_lower:HigherLowerEnv",
    tasks="relax_envs.higher_lower:tasks",
    defaults={**_TOOL, "rollout": {"max_turns": 3}, "steps": 600},
)
