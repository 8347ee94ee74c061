"""One recorded episode played again: what is the same, and where it differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from relax_sdk.env import Env
from relax_sdk.origin import load_origin
from relax_sdk.progress import Waiting
from relax_sdk.registry import EnvSpec
from relax_sdk.run import read_config
from relax_sdk.runtime import Job, Tell, find_runtime


@dataclass(frozen=True)
class Difference:
    """One thing that came out differently."""

    what: Literal["observation", "action", "prompt", "reward", "component", "end", "token"]
    """`observation` and `action`: a message; `prompt`: its tokens; `reward`: of a step; `component`: of the episode's reward;
    `end`: status or number of turns; `token`: sampled again."""
    where: str
    """For example `turn 1, position 4`, or a component's name."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.what}, {self.where}: recorded {self.recorded}, now {self.replayed}"


@dataclass(frozen=True)
class EpisodeReplay:
    """What came of playing an episode again."""

    id: str
    """Id of the trajectory."""
    env: str
    task_index: int
    seed: int
    """The environment's."""
    turns: int
    """What the record says."""
    differences: tuple[Difference, ...]
    """The first of each kind."""
    notes: tuple[str, ...] = ()
    """What could not be compared, and why."""
    tokens: int | None = None
    """Response tokens that were sampled again and are equal; None: no model was asked."""

    @property
    def same(self) -> bool:
        """Whether nothing differs of what was compared."""
        return not self.differences

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.env}, task {self.task_index}, seed {self.seed}, {self.turns} turns"]
        lines += [f"differs: {difference}" for difference in self.differences]
        if self.same:
            sampled = "" if self.tokens is None else f", {self.tokens} sampled tokens"
            lines.append(f"the same: observations, actions, rewards{sampled}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class EpisodeReplayer(Protocol):
    """Plays recorded episodes again; the `local` runtime does."""

    def replay_episode(self, job: Job, episode: str, model: str | None, tell: Tell) -> EpisodeReplay:
        """See the function of this name."""
        ...


def replay_episode(
    folder: str | Path,
    episode: str,
    *,
    model: str | Path | None = None,
    env: str | type[Env] | EnvSpec | None = None,
    progress: bool = True,
) -> EpisodeReplay:
    """Play one episode of a run again, from its record in the run's journal. Nothing is written.

    The environment is made anew, reset with the recorded task and seed, and given the recorded actions; observations, actions,
    step rewards and reward components are compared. Reward functions and judges are called again. With `model`, each recorded
    prompt is sent to an engine, too, with the recorded sampling and its seed, and the tokens are compared.

    Args:
        folder: of the run.
        episode: id of the trajectory, with or without the run's name in front, or a beginning that fits only one.
        model: `"run"`: weights of the run, those that the episode was played with if they are kept; or a Hugging Face folder.
        env: the environment, in place of the one that the run's folder names.
        progress: show a live line.

    Raises:
        ConfigError: not a run folder, no such episode, or one that cannot be played again; the message says why.
        RunError: there are no weights, or media of the record are missing.
        RegistryError: the environment cannot be loaded.
    """
    home = Path(folder).resolve()
    config = read_config(home)
    spec, agent = load_origin(home, config.env, env)
    player = cast(EpisodeReplayer, find_runtime("local"))
    with Waiting(f"replay of {episode}", progress) as waiting:
        return player.replay_episode(
            Job(spec, config, home, agent), episode, None if model is None else str(model), waiting.tell
        )
