"""Every error Relax Gym raises on purpose; all derive from `RelaxError`.

RelaxError
├── ConfigError              a setting is outside its range, or two settings contradict each other
├── RegistryError            an environment or runtime name is unknown or taken
├── MediaError               a file is missing, too large, damaged or of the wrong kind
├── EpisodeError             something went wrong inside one episode
│   ├── EnvError             the environment raised, hung or returned nonsense
│   ├── RewardError          a reward function raised or returned a value that is not finite
│   ├── EpisodeTimeout       a stage of the episode passed its time limit
│   └── EpisodeOver          no failure: a limit on turns or tokens has ended the episode
├── TokenError               tokens, placeholders, media and weight versions do not fit together
├── EngineError              an inference engine refused, failed or answered wrongly
│   ├── EngineFaulty         it failed inside, or its answer cannot be right
│   │   └── EngineDenied     it wants a token that it was not shown
│   ├── EngineUnavailable    it cannot be reached, or did not answer in time
│   └── EngineAborted        the request was aborted before it finished
├── JournalError             the journal cannot be read or written, or a lease is not held
│   ├── ClaimLost            another program has what this one worked on, so it may not write to it any more
│   └── UnstorableError      a value or a group cannot be stored as it is, however often it is tried
├── StorageError             the disk that media are kept on is full or cannot be written
├── BusError                 the queue between the training roles cannot be started, reached or rebuilt
├── TrainingError            the trainer failed
│   ├── CheckpointError      a checkpoint is missing, damaged or of another model
│   ├── OutOfMemory          the machine or the device has no memory left for it
│   └── DiskFull             the disk has no room for what the trainer writes
├── RunError                 a run ended before its last step
└── ServiceError             a rollout service refused a request
    └── ServiceUnavailable   it cannot be reached, or is too busy
"""

from __future__ import annotations

import traceback
from pathlib import Path

__all__ = [
    "BusError",
    "CheckpointError",
    "ClaimLost",
    "ConfigError",
    "DiskFull",
    "EngineAborted",
    "EngineDenied",
    "EngineError",
    "EngineFaulty",
    "EngineUnavailable",
    "EnvError",
    "EpisodeError",
    "EpisodeOver",
    "EpisodeTimeout",
    "JournalError",
    "MediaError",
    "OutOfMemory",
    "RegistryError",
    "RelaxError",
    "RewardError",
    "RunError",
    "ServiceError",
    "ServiceUnavailable",
    "StorageError",
    "TokenError",
    "TrainingError",
    "UnstorableError",
]


def raised(error: BaseException) -> str:
    """`raised KeyError: 'x' (env.py:12)`: what an error is and the line that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{line}"


class RelaxError(Exception):
    """Base of all errors raised on purpose by Relax Gym."""


class ConfigError(RelaxError, ValueError):
    """A setting is outside its range; the message names the field, the value and the allowed range."""


class RegistryError(RelaxError, LookupError):
    """A name is unknown to the registry, or is already taken by something else."""


class MediaError(RelaxError, ValueError):
    """An image, sound or video is missing, too large, damaged or of the wrong kind."""


class EpisodeError(RelaxError):
    """Something went wrong inside one episode.

    The message names the environment, the task and the turn where they are known.
    """


class EnvError(EpisodeError):
    """The environment raised, or returned something that is not an observation, reward or flag."""


class RewardError(EpisodeError):
    """A reward function raised, or returned a value that is not a finite number."""


class EpisodeTimeout(EpisodeError, TimeoutError):
    """A stage of an episode (reset, turn, step, scoring or the whole) passed its time limit."""


class EpisodeOver(EpisodeError):
    """A limit on turns or tokens has ended the episode. Not a failure: an agent lets it pass, and the episode is scored."""


class TokenError(RelaxError, ValueError):
    """Token ids, media placeholders, media and weight versions do not fit together; the message gives both counts."""


class EngineError(RelaxError):
    """An inference engine refused a request, failed, or answered something that cannot be right."""


class EngineFaulty(EngineError):
    """The engine failed inside, or answered something that cannot be right; another engine may do better."""


class EngineDenied(EngineFaulty):
    """The engine wants to be shown its token, and was shown none or another one."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached or did not answer in time.

    Args:
        message: what was wrong.
        retry_after: seconds that it asks to wait for before the next try; 0 if it does not.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineAborted(EngineError):
    """The request was aborted before it finished."""


class JournalError(RelaxError):
    """The journal cannot be read or written, or a lease is not (or no longer) held."""


class ClaimLost(JournalError):
    """What this program worked on is another program's now, or is over; nothing was written, and trying again does not help."""


class UnstorableError(JournalError):
    """A value or a group cannot be stored as it is; trying again does not help, and says nothing about others.

    Args:
        message: what was wrong, with the field.
        field: to blame; empty if it is not known.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class StorageError(RelaxError):
    """The disk that media are kept on is full, or cannot be read or written; trying again later may help."""


class BusError(RelaxError):
    """The queue between the training roles cannot be started, reached or rebuilt; the journal still holds every group."""


class TrainingError(RelaxError):
    """The trainer process failed; the message holds the cause."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class OutOfMemory(TrainingError):
    """The machine or the device has no memory left to load, save or restore a model; what is on the disk is whole."""


class DiskFull(TrainingError):
    """The disk has no room for a checkpoint or a model folder; what was written before is whole."""


class RunError(RelaxError):
    """A run ended before its last step; the message says where it is and how to resume it."""


class ServiceError(RelaxError):
    """A rollout service refused a request; the message is the service's.

    Args:
        message: what was wrong.
        status: of the HTTP answer; 0 if there was none.
        code: for programs.
        retry_after: seconds that the service asks to wait for before the next try; 0 if it does not.
    """

    def __init__(self, message: str, status: int = 0, code: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


class ServiceUnavailable(ServiceError):
    """A rollout service cannot be reached, is too busy, or is shutting down."""
