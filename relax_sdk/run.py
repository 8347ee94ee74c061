"""A run: its folder, its history, and its trained model."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk.config import RunConfig, SamplingParams, run_config_from_dict
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError
from relax_sdk.evaluation import Evaluation
from relax_sdk.messages import AssistantMessage, Message, as_messages
from relax_sdk.origin import load_origin
from relax_sdk.progress import Waiting
from relax_sdk.recorded import Sort, Trajectories, TrajectoryFilter, record_reader
from relax_sdk.registry import EnvSpec, require_split
from relax_sdk.runtime import Job, Runtime, ServedModel, Tell, find_runtime, silent
from relax_sdk.tracebacks import short_traceback
from relax_sdk.trajectory import Group

if TYPE_CHECKING:
    import pandas

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
STATUS = "status.json"
CONFIG = "config.json"
WEIGHTS = "hf"
PLOT = "reward.png"
SENSES = "senses.json"


def read_config(folder: Path) -> RunConfig:
    """The settings of the run in a folder.

    Raises:
        ConfigError: not a run folder.
    """
    try:
        return run_config_from_dict(json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} is not a run folder ({error})") from error


class Run:
    """A training run: its folder, metrics and trained model. `fit()` returns one, and `Run.load(folder)` opens an older one."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        job: Job | None = None,
        runtime: str | Runtime = "local",
        env: str | type[Env] | EnvSpec | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.config = config
        self._job = job
        self._env = env
        self._runtime = runtime
        self._session: ServedModel | None = None
        self._opening = threading.Lock()
        """Threads that ask at once share one engine."""

    @classmethod
    def load(cls, folder: str | Path, env: str | type[Env] | EnvSpec | None = None) -> Run:
        """Open a run folder.

        Its environment is loaded when `evaluate()` or `generate()` first needs it, from where the folder says that it came
        from; metrics and curves need none.

        Args:
            folder: of the run.
            env: the environment, in place of what the folder says: a registered name, `"package.module:Class"`,
                `"file.py:Class"`, a class or a spec.

        Raises:
            ConfigError: not a run folder.
        """
        return cls(Path(folder), read_config(Path(folder)), env=env)

    # ------------------------------------------------------------------------------------------------------ history

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per optimizer step, oldest first; a step repeated after a restart is there once, its last time."""
        file = self.folder / METRICS
        if not file.exists():
            return []
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return [rows_by_step for _, rows_by_step in sorted({row["step"]: row for row in rows}.items())]

    @property
    def history(self) -> pandas.DataFrame:
        """The metrics as a pandas frame indexed by step."""
        import pandas

        frame = pandas.DataFrame(self.metrics)
        return frame.set_index("step") if len(frame) else frame

    @property
    def weights(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.folder / WEIGHTS

    def plot(self, path: str | Path | None = None) -> Any:
        """Reward, held-out reward and staleness against steps.

        Args:
            path: also save the figure there.

        Returns:
            The matplotlib figure.
        """
        from relax_sdk.plot import plot_rewards

        return plot_rewards(self.metrics, title=f"{self.config.env} · {self.config.mode}", path=path)

    def try_plot(self, warn: Callable[[str], None]) -> None:
        """Save the figure in the folder, if there is anything to show; a figure that cannot be written fails no run.

        Args:
            warn: told why it could not.
        """
        try:
            if self.metrics:
                self.plot(self.folder / PLOT)
        except OSError as error:
            warn(f"{self.folder / PLOT} could not be written ({error.strerror or error})")

    # ----------------------------------------------------------------------------------------------------- episodes

    def trajectories(
        self,
        *,
        split: str | None = None,
        reward: tuple[float | None, float | None] | float | None = None,
        status: str | Sequence[str] | None = None,
        text: str | None = None,
        task: int | None = None,
        step: int | None = None,
        sort: Sort = "newest",
        limit: int | None = 20,
    ) -> Trajectories:
        """Recorded episodes of the run, tokens included. In a notebook the result is a table, and each of them a chat with
        players.

            run.trajectories(split="eval", sort="worst", limit=5)

        Args:
            split: `train`, `eval` or `warmup`.
            reward: a reward, or the least and the most, each None for no bound.
            status: one or several of `Status`.
            text: words that occur in the episode's texts, in any case.
            task: index of a task.
            step: the optimizer step that trained on them.
            sort: `newest`, `oldest`, `best`, `worst`, `longest`, `shortest` (by answer tokens) or `stalest`.
            limit: None: all.

        Raises:
            ConfigError: a value outside its range, or the run's journal is not on this machine.
        """
        wanted = TrajectoryFilter(split, status, reward, task, step, text, sort, limit)
        return Trajectories(record_reader().read_trajectories(self.folder, self.config, wanted))

    def group(self, id: str) -> Group:
        """A recorded group: all episodes of one task that were trained on together. In a notebook they stand side by side.

        Args:
            id: of the group, such as `train/12`, or of one of its episodes; the run's name in front may be left out. The number
                of an episode, as pages and lists show it (`17`), names its group too.

        Raises:
            ConfigError: there is no such group, several begin with `id`, or the run's journal is not on this machine.
        """
        return record_reader().read_group(self.folder, self.config, id)

    # -------------------------------------------------------------------------------------------------------- model

    @short_traceback
    def evaluate(self, split: str = "eval", limit: int | None = None, *, progress: bool = True) -> Evaluation:
        """Play a split greedily with the trained model.

        Args:
            split: of the tasks.
            limit: tasks at most; default: `eval.limit`.
            progress: show a live line.

        Raises:
            ConfigError: the environment has no such split; no engine is started then.
            RunError: the engine cannot start.
            RegistryError: the environment cannot be loaded; the message says how to give it.
        """
        require_split(self._known_job().spec, split)
        with Waiting(f"evaluation of {self.config.env} [{split}]", progress) as waiting:
            return self._open(waiting.tell).evaluate(split, limit or self.config.eval.limit, waiting.tell)

    @short_traceback
    def generate(self, messages: str | Sequence[Any], sampling: SamplingParams | None = None) -> AssistantMessage:
        """Ask the trained model.

        Args:
            messages: whatever an environment may return as an observation: text, parts, messages.
            sampling: default: greedy, with the run's token limit.
        """
        chosen = sampling or SamplingParams(max_new_tokens=self.config.sampling.max_new_tokens, temperature=0.0)
        prompt: list[Message] = as_messages(messages)
        return self._open(silent).generate(prompt, chosen)

    def _known_job(self) -> Job:
        if self._job is None:
            spec, agent = load_origin(self.folder, self.config.env, self._env)
            self._job = Job(spec, self.config, self.folder, agent)
        return self._job

    def _open(self, tell: Tell) -> ServedModel:
        with self._opening:
            if self._session is None:
                self._session = find_runtime(self._runtime).open_model(self._known_job(), tell)
                atexit.register(self.close)
            return self._session

    def close(self) -> None:
        """Stop the engine that `evaluate` or `generate` started."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, env={self.config.env!r}, steps={self.config.steps})"
