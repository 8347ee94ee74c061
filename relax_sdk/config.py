"""Configuration: one small frozen dataclass a concern; every field has a default that suits a pretrained model.

`Trainer` puts other ones in their place where the model is made from random weights: see `relax_sdk.defaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_sdk.algorithm import AlgorithmConfig, OptimizerConfig
from relax_sdk.autoscale_config import AutoscaleConfig
from relax_sdk.devices import DevicesConfig
from relax_sdk.errors import ConfigError
from relax_sdk.field_checks import check_types, require
from relax_sdk.layout import LayoutConfig
from relax_sdk.media_config import MediaConfig
from relax_sdk.training_config import TrainingConfig
from relax_sdk.tuning import LoraConfig, TowersConfig, Tuning

Mode = Literal["async", "colocate"]
EngineKind = Literal["embedded", "sglang", "vllm"]
WeightsWay = Literal["folder", "broadcast"]
BusName = Literal["local", "transfer_queue"]

STOP_LENGTH = 1000
"""Characters of a text that ends a response."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of how responses are sampled; the names are those of the SGLang API."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's end-of-turn token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; their tokens are part of it."""
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """What the seeds of single answers are derived from; None: the run's `seed`. In `Turn.sampling`, the answer's own seed."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.max_new_tokens >= 1, self, "max_new_tokens", "1 or more")
        require(self.temperature >= 0, self, "temperature", "0 (greedy) or more")
        require(0 < self.top_p <= 1, self, "top_p", "above 0, at most 1")
        require(self.top_k == -1 or self.top_k >= 1, self, "top_k", "-1 (all) or 1 and more")
        require(
            all(0 < len(text) <= STOP_LENGTH for text in self.stop), self, "stop", f"texts of 1 to {STOP_LENGTH} characters"
        )

    def with_seed(self, seed: int | None) -> SamplingParams:
        """The same sampling with another seed. Nothing is checked again, as every call makes one."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, sampling_seed=seed)
        return other


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of how episodes are played."""

    groups_per_step: int = 16
    """Groups (tasks) in one training batch."""
    group_size: int = 16
    """Episodes of each task."""
    max_turns: int = 16
    """An episode with more turns is truncated."""
    max_tokens: int = 4096
    """Prompt and responses of one episode together."""
    on_failure: Literal["retry", "count", "drop"] = "retry"
    """A failed episode is tried again with the same seed (`max_retries` times, then dropped); kept without a reward, to be
    looked at; dropped. A failed episode is in no baseline and is never trained on."""
    max_retries: int = 1
    max_failed_groups: int = 64
    """The run ends when this many groups in a row have no usable episode. It ends sooner, after the groups of one batch (8 at
    least), if no episode of the run was ever usable and all failed with the same error."""
    max_failed_share: float = 0.5
    """The run ends when more than this share of the last 256 attempts at an episode, or of those of two batches where these are
    more, has failed."""
    keep_failed: int = 256
    """Failed attempts kept in the journal, in the split `failed`, to be looked at; those after them are only counted."""
    concurrency: int = 1024
    """Episodes in flight at once."""
    fork_agents: bool = True
    """An agent that is a Python program is forked from a process that has imported `openai` and the like already, where it
    does so at its top; False starts a new interpreter for every episode."""
    reset_timeout: float = 60.0
    """Seconds, as all time-outs here; queueing does not count."""
    turn_timeout: float = 120.0
    """One model call."""
    step_timeout: float = 60.0
    score_timeout: float = 60.0
    episode_timeout: float = 600.0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.groups_per_step >= 1, self, "groups_per_step", "1 or more")
        require(self.group_size >= 1, self, "group_size", "1 or more")
        require(self.max_turns >= 1, self, "max_turns", "1 or more")
        require(self.max_tokens >= 1, self, "max_tokens", "1 or more")
        require(self.max_retries >= 0, self, "max_retries", "0 or more")
        require(self.max_failed_groups >= 1, self, "max_failed_groups", "1 or more")
        require(0.0 < self.max_failed_share <= 1.0, self, "max_failed_share", "above 0, at most 1 (never)")
        require(self.keep_failed >= 0, self, "keep_failed", "0 or more")
        require(self.concurrency >= 1, self, "concurrency", "1 or more")
        for name in ("reset_timeout", "turn_timeout", "step_timeout", "score_timeout", "episode_timeout"):
            require(getattr(self, name) > 0, self, name, "above 0 seconds")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation: the `eval` split, played greedily."""

    every: int = 50
    """Steps; 0 evaluates only at the end."""
    limit: int = 256
    """Tasks played at most."""
    check_senses: bool = False
    """At the end of the run, say whether the policy uses what it is shown; see `relax_sdk.check_senses`."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.every >= 0, self, "every", "0 (only at the end) or more")
        require(self.limit >= 1, self, "limit", "1 or more")


@dataclass(frozen=True)
class WarmupConfig:
    """A supervised warm-up on the *form* of an action, with contents drawn at random: it says nothing about the answers.

    It happens where the environment defines `format_example`, before the first step; a pretrained model needs none.
    """

    steps: int = 0
    """0: none; 60 where `Trainer` trains a model from random weights."""
    batch_size: int = 16
    lr: float = 1e-3

    def __post_init__(self) -> None:
        check_types(self)
        require(self.steps >= 0, self, "steps", "0 (none) or more")
        require(self.batch_size >= 1, self, "batch_size", "1 or more")
        require(self.lr > 0, self, "lr", "above 0")


@dataclass(frozen=True)
class RayConfig:
    """Settings of the cluster that `runtime="ray"` uses."""

    address: str | None = None
    """Address of a cluster, such as `10.0.0.1:6379`. None: what `RAY_ADDRESS` says, else a cluster of the run's own on this
    machine."""
    object_store_mb: int = 200
    """Memory for Ray's objects in a cluster of the run's own, in MB; what is large goes around it."""
    journal: str | None = None
    """`postgresql://user@host/database`, which a run on several machines needs; None: a SQLite file in the run folder."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray's `runtime_env` of the roles: `working_dir`, `py_modules`, `env_vars`, `pip` and so on."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.object_store_mb >= 80, self, "object_store_mb", "80 or more")
        require(self.address is None or isinstance(self.address, str), self, "address", "host:port")
        postgres = str(self.journal).startswith(("postgresql://", "postgres://"))
        require(self.journal is None or postgres, self, "journal", "postgresql://user@host/database")
        require(isinstance(self.runtime_env, dict), self, "runtime_env", "a dictionary, as for ray.init")


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run is shown besides its folder (`docs/tracking.md`)."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """`tensorboard`, `wandb`, `mlflow`, `prometheus`, one of an installed package, or `"package.module:Class"`. One that fails
    is told of, and the run goes on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a tracker by its name, such as `{"wandb": {"project": "tones"}}`. Secrets belong into the environment."""
    traces: str = ""
    """URL of a receiver of OpenTelemetry traces over HTTP, such as `http://localhost:4318`, which gets a span of every episode
    and of each of its stages; empty: none."""

    def __post_init__(self) -> None:
        check_types(self)
        require(len(set(self.trackers)) == len(self.trackers), self, "trackers", "each name once")
        sections = isinstance(self.options, dict) and all(isinstance(value, dict) for value in self.options.values())
        require(sections, self, "options", "a dictionary of the options of each tracker, by its name")
        strangers = sorted(set(self.options) - set(self.trackers))
        require(
            not self.traces or self.traces.startswith(("http://", "https://")), self, "traces", "http://host:port, or empty"
        )
        require(not strangers, self, "options", f"options of trackers that are used; {', '.join(strangers)} is none of them")


@dataclass(frozen=True)
class RunConfig:
    """All that a training run needs besides the environment itself."""

    env: str
    model: str = "relax/tiny-omni"
    steps: int = 200
    seed: int = 0
    mode: Mode = "async"
    max_staleness: int = 1
    """Optimizer steps that a group may be old at its lease; 0 is on-policy. An older one is dropped and counted. Rollouts run
    ahead of training by `max_staleness // algorithm.updates_per_batch` batches."""
    engine: EngineKind = "embedded"
    """What generates: our own small server, or a real SGLang or vLLM server from an environment of its own."""
    engine_flags: tuple[str, ...] = ()
    """More flags for the command line of SGLang or vLLM, such as `("--tp", "2")`."""
    engines: int = 1
    engine_hosts: tuple[str, ...] = ()
    """Hosts besides this machine from which engines may be added to the run by their URL."""
    bus: BusName = "local"
    """How groups reach the trainer: straight from the journal, or through TransferQueue on Ray, where roles of their own
    compute advantages and, if `algorithm.kl_coef` is above 0, the reference's logprobs."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    towers: TowersConfig = field(default_factory=TowersConfig)

    def __post_init__(self) -> None:
        if "://" in str(self.engine):
            raise ConfigError(
                f"engine={self.engine!r}: a run starts its own engines, as training needs token ids and weight updates, which "
                "a URL of the OpenAI API does not give. `relax eval ENV --engine-url URL` evaluates it"
            )
        check_types(self)
        require(self.steps >= 1, self, "steps", "1 or more")
        require(self.max_staleness >= 0, self, "max_staleness", "0 or more")
        require(self.engines >= 1, self, "engines", "1 or more")
        self._check_algorithm()
        _ = self.tuning  # checks that both of its parts fit together
        scale = self.autoscale
        if scale.max_engines and not scale.min_engines <= self.engines <= scale.max_engines:
            raise ConfigError(f"engines = {self.engines}; autoscale allows {scale.min_engines} to {scale.max_engines}")
        if scale.max_engines and self.mode == "colocate":
            raise ConfigError("autoscale.max_engines needs mode='async'; in mode='colocate' the trainer always waits")
        if self.engine_flags and self.engine == "embedded":
            raise ConfigError(f"engine_flags {list(self.engine_flags)} need engine='sglang' or 'vllm', whose own they are")
        self.check_engine(self.engine)
        if self.training.offload == "all" and self.mode != "colocate":
            raise ConfigError(
                "training.offload = 'all' needs mode='colocate', as the trainer works all the time in mode='async'"
            )
        if self.mode == "colocate" and self.max_staleness != 0:
            raise ConfigError(
                f"mode='colocate' alternates generation and training, so max_staleness must be 0, got {self.max_staleness}"
            )

    def check_engine(self, kind: EngineKind) -> None:
        """Refuse a kind of engine whose answers this run could not train on; the run's own, or one that is added to it.

        Raises:
            ConfigError: it cannot do what `sampling` asks for, or takes whole weights only where adapters are published.
        """
        if kind != "embedded" and self.publishes_adapters:
            raise ConfigError(
                f"an engine of kind {kind!r} takes whole weights, and this run, with engine='embedded' and lora.rank = "
                f"{self.lora.rank}, publishes adapters alone; begin a run with engine={kind!r}, which publishes merged weights"
            )
        if kind == "sglang" and (self.sampling.top_p < 1 or self.sampling.top_k > 0):
            raise ConfigError(
                f"sampling.top_p = {self.sampling.top_p}, top_k = {self.sampling.top_k} with engine='sglang': SGLang reports "
                "logprobs from before this cut, which are not those of what it sampled; use sampling.temperature, or "
                "engine='embedded' or 'vllm', which report them after it"
            )

    def check_trainable(self) -> None:
        """Refuse what may be set to play an environment but not to train on it.

        Raises:
            ConfigError: the sampling is greedy.
        """
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature = 0 makes all answers of a group alike, so that there is nothing to learn from: "
                "set it above 0, 1 as a rule"
            )

    def _check_algorithm(self) -> None:
        """Raise `ConfigError` for settings of the algorithm that do not fit the run."""
        algorithm = self.algorithm
        if algorithm.updates_per_batch > self.rollout.groups_per_step:
            raise ConfigError(
                f"algorithm.updates_per_batch = {algorithm.updates_per_batch}: a batch is split by groups, and "
                f"rollout.groups_per_step is {self.rollout.groups_per_step}; allowed: 1 to that"
            )
        if self.max_staleness and algorithm.old_logprobs == "recompute" and algorithm.correction == "none":
            raise ConfigError(
                f"max_staleness = {self.max_staleness} with algorithm.old_logprobs='recompute' and correction='none' trains on "
                "tokens of older weights as if they were of the current ones; use correction='tis', old_logprobs='engine' or "
                "max_staleness=0"
            )

    @property
    def tuning(self) -> Tuning:
        """What is trained of the model."""
        return Tuning(self.lora, self.towers)

    @property
    def needs_reference_model(self) -> bool:
        """Whether the KL reference is weights of its own; with adapters it is the policy with these switched off."""
        return self.algorithm.kl_coef > 0 and self.lora.rank == 0

    @property
    def publishes_adapters(self) -> bool:
        """Whether engines are sent adapters, which they merge into the weights they were started with, or whole weights."""
        return self.lora.rank > 0 and self.engine == "embedded"

    @property
    def batches_ahead(self) -> int:
        """Batches that rollouts may be ahead of training, so that no group is older than `max_staleness` at its lease."""
        return self.max_staleness // self.algorithm.updates_per_batch

    def version_at(self, step: int) -> int:
        """Version of the weights after `step` training steps: the number of optimizer steps in them."""
        return step * self.algorithm.updates_per_batch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for YAML or JSON."""
        import dataclasses

        return dataclasses.asdict(self)


def from_dict(cls: type[Any], values: Any, where: str = "") -> Any:
    """Build a configuration dataclass from plain data.

    Raises:
        ConfigError: an unknown field; the message lists the known ones.
    """
    import dataclasses
    import typing

    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    made = {}
    for name, value in dict(values).items():
        if name not in known:
            raise ConfigError(f"{where or cls.__name__}: no field {name!r}; there are {', '.join(sorted(known))}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            value = from_dict(typing.cast(type, hint), value, f"{where or cls.__name__}.{name}")
        elif isinstance(value, list):
            value = tuple(value)
        made[name] = value
    return cls(**made)


def run_config_from_dict(values: dict[str, Any]) -> RunConfig:
    """Read back `RunConfig.to_dict()`.

    Raises:
        ConfigError: an unknown field or a value outside its range.
    """
    return from_dict(RunConfig, values)
