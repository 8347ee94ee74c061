"""Relax Gym's SDK: everything a user imports.

Write an environment, register it, train a model on it:

    import relax_sdk as relax

    relax.Trainer(env="tone-v0").fit(steps=200)
"""

from relax_sdk.client import AsyncClient, Client
from relax_sdk.comparing import Comparison, compare
from relax_sdk.config import (
    AlgorithmConfig,
    AutoscaleConfig,
    EvalConfig,
    OptimizerConfig,
    RayConfig,
    RolloutConfig,
    RunConfig,
    SamplingParams,
    TrackingConfig,
    TrainingConfig,
    WarmupConfig,
)
from relax_sdk.defaults import FROM_SCRATCH
from relax_sdk.devices import DevicesConfig
from relax_sdk.endpoint import Endpoint
from relax_sdk.env import Env, MessageSpace
from relax_sdk.errors import (
    BusError,
    CheckpointError,
    ConfigError,
    DiskFull,
    EngineAborted,
    EngineDenied,
    EngineError,
    EngineFaulty,
    EngineUnavailable,
    EnvError,
    EpisodeError,
    EpisodeOver,
    EpisodeTimeout,
    JournalError,
    MediaError,
    OutOfMemory,
    RegistryError,
    RelaxError,
    RewardError,
    RunError,
    ServiceError,
    ServiceUnavailable,
    TokenError,
    TrainingError,
)
from relax_sdk.evals.check import check_senses
from relax_sdk.evals.play import evaluate
from relax_sdk.evals.report import EvalReport
from relax_sdk.evals.senses import SensesReport
from relax_sdk.evaluation import Evaluation
from relax_sdk.exporting import Exported, export_trajectories
from relax_sdk.gymnasium_env import from_gymnasium
from relax_sdk.hosting import Hosting, host
from relax_sdk.judge import Judge
from relax_sdk.layout import LayoutConfig
from relax_sdk.mask import MaskExplanation, explain_mask
from relax_sdk.media import Audio, Image, MediaLimits, MediaRef, MediaStore, Video
from relax_sdk.media_config import MediaConfig
from relax_sdk.messages import AssistantMessage, ControlToken, Message, Text, ToolCall
from relax_sdk.model_export import ExportedModel, export_model
from relax_sdk.recorded import RecordedTrajectory, Trajectories, TrajectoryFilter
from relax_sdk.registry import EnvSpec, get_spec, list_envs, register
from relax_sdk.replay import Difference, EpisodeReplay, replay_episode
from relax_sdk.rescoring import Rescored, rescore
from relax_sdk.rewards import Rubric, reward
from relax_sdk.run import Run
from relax_sdk.session import Agent, Session, StepOutcome
from relax_sdk.tools import ToolResult, tool
from relax_sdk.trainer import Trainer
from relax_sdk.trajectory import Group, Sample, Status, Trajectory, Turn
from relax_sdk.tuning import LoraConfig, TowersConfig

__version__ = "0.1.0"

__all__ = [
    "FROM_SCRATCH",
    "Agent",
    "AlgorithmConfig",
    "AssistantMessage",
    "AsyncClient",
    "Audio",
    "AutoscaleConfig",
    "BusError",
    "CheckpointError",
    "Client",
    "Comparison",
    "ConfigError",
    "ControlToken",
    "DevicesConfig",
    "Difference",
    "DiskFull",
    "Endpoint",
    "EngineAborted",
    "EngineDenied",
    "EngineError",
    "EngineFaulty",
    "EngineUnavailable",
    "Env",
    "EnvError",
    "EnvSpec",
    "EpisodeError",
    "EpisodeOver",
    "EpisodeReplay",
    "EpisodeTimeout",
    "EvalConfig",
    "EvalReport",
    "Evaluation",
    "Exported",
    "ExportedModel",
    "Group",
    "Hosting",
    "Image",
    "JournalError",
    "Judge",
    "LayoutConfig",
    "LoraConfig",
    "MaskExplanation",
    "MediaConfig",
    "MediaError",
    "MediaLimits",
    "MediaRef",
    "MediaStore",
    "Message",
    "MessageSpace",
    "OptimizerConfig",
    "OutOfMemory",
    "RayConfig",
    "RecordedTrajectory",
    "RegistryError",
    "RelaxError",
    "Rescored",
    "RewardError",
    "RolloutConfig",
    "Rubric",
    "Run",
    "RunConfig",
    "RunError",
    "Sample",
    "SamplingParams",
    "SensesReport",
    "ServiceError",
    "ServiceUnavailable",
    "Session",
    "Status",
    "StepOutcome",
    "Text",
    "TokenError",
    "ToolCall",
    "ToolResult",
    "TowersConfig",
    "TrackingConfig",
    "Trainer",
    "TrainingConfig",
    "TrainingError",
    "Trajectories",
    "Trajectory",
    "TrajectoryFilter",
    "Turn",
    "Video",
    "WarmupConfig",
    "__version__",
    "check_senses",
    "compare",
    "evaluate",
    "explain_mask",
    "export_model",
    "export_trajectories",
    "from_gymnasium",
    "get_spec",
    "host",
    "list_envs",
    "register",
    "replay_episode",
    "rescore",
    "reward",
    "tool",
]
