"""Configuration: what is refused, and that the error names field, value and range."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from relax_sdk.config import (
    AlgorithmConfig,
    AutoscaleConfig,
    EvalConfig,
    OptimizerConfig,
    RayConfig,
    RolloutConfig,
    RunConfig,
    SamplingParams,
    TrainingConfig,
    WarmupConfig,
)
from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_sdk.media_config import MediaConfig
from relax_sdk.tuning import LoraConfig, TowersConfig

NAN = float("nan")
BAD: list[tuple[type, str, Any, str]] = [
    (SamplingParams, "max_new_tokens", 0, "1 or more"),
    (SamplingParams, "max_new_tokens", 1.5, "an integer"),
    (SamplingParams, "max_new_tokens", "5", "an integer"),
    (SamplingParams, "max_new_tokens", True, "an integer"),
    (SamplingParams, "max_new_tokens", None, "an integer"),
    (SamplingParams, "temperature", -0.1, "0 (greedy) or more"),
    (SamplingParams, "temperature", NAN, "a number"),
    (SamplingParams, "temperature", "hot", "a number"),
    (SamplingParams, "top_p", 0, "above 0, at most 1"),
    (SamplingParams, "stop", ("",), "texts of 1 to 1000 characters"),
    (SamplingParams, "stop", ("x" * 1001,), "texts of 1 to 1000 characters"),
    (SamplingParams, "top_p", 1.01, "above 0, at most 1"),
    (SamplingParams, "top_k", 0, "-1 (all) or 1 and more"),
    (SamplingParams, "stop_token_ids", 3, "a list of integers"),
    (SamplingParams, "stop_token_ids", ["a"], "a list of integers"),
    (SamplingParams, "ignore_eos", 1, "true or false"),
    (SamplingParams, "sampling_seed", "x", "an integer"),
    (RolloutConfig, "groups_per_step", 0, "1 or more"),
    (RolloutConfig, "group_size", -1, "1 or more"),
    (RolloutConfig, "max_turns", 0, "1 or more"),
    (RolloutConfig, "max_tokens", 0, "1 or more"),
    (RolloutConfig, "max_retries", -1, "0 or more"),
    (RolloutConfig, "max_failed_groups", 0, "1 or more"),
    (RolloutConfig, "max_failed_share", 0.0, "above 0, at most 1 (never)"),
    (RolloutConfig, "keep_failed", -1, "0 or more"),
    (RolloutConfig, "concurrency", 0, "1 or more"),
    (RolloutConfig, "on_failure", "ignore", "retry, count, drop"),
    (RolloutConfig, "reset_timeout", 0, "above 0 seconds"),
    (RolloutConfig, "episode_timeout", NAN, "a number"),
    (LayoutConfig, "tp", 0, "1 or more"),
    (LayoutConfig, "ep", 2, "a divisor of tp * cp * dp = 1, over whose processes experts are divided"),
    (MediaConfig, "fps", 0.0, "above 0, or None"),
    (MediaConfig, "max_frames", 1, "2 or more, or None"),
    (MediaConfig, "use_audio_in_video", 1, "true or false"),
    (LoraConfig, "rank", -1, "0 (no adapters) or more"),
    (LoraConfig, "rank", 8.0, "an integer"),
    (LoraConfig, "alpha", 0, "above 0"),
    (LoraConfig, "targets", ("attention", "embeddings"), "one or more of attention, mlp, experts, visual, audio_tower"),
    (LoraConfig, "targets", (), "one or more of attention, mlp, experts, visual, audio_tower"),
    (LoraConfig, "targets", "mlp", "a list of texts"),
    (TowersConfig, "visual", "frozen", "auto, train, freeze"),
    (TowersConfig, "audio_tower_lr", 0, "above 0"),
    (TowersConfig, "visual_lr", "slow", "a number"),
    (TowersConfig, "visual_lr_factor", -1.0, "above 0"),
    (AlgorithmConfig, "advantage", "ppo", "dr_grpo, grpo, rloo, or 'package.module:function'"),
    (AlgorithmConfig, "credit", "token", "trajectory, turn"),
    (AlgorithmConfig, "clip_low", 1.0, "between 0 and 1"),
    (AlgorithmConfig, "clip_high", 0, "above 0"),
    (AlgorithmConfig, "entropy_coef", -1, "0 or more"),
    (AlgorithmConfig, "kl_coef", -1, "0 or more"),
    (AlgorithmConfig, "old_logprobs", None, "recompute, engine"),
    (AlgorithmConfig, "tis_clip", 0, "above 0 (correction='none' turns it off)"),
    (AlgorithmConfig, "dual_clip", 1, "above 1"),
    (AlgorithmConfig, "updates_per_batch", 0, "1 or more"),
    (OptimizerConfig, "lr", 0, "above 0"),
    (OptimizerConfig, "lr", NAN, "a number"),
    (OptimizerConfig, "warmup_steps", -1, "0 or more"),
    (OptimizerConfig, "decay", "cosine", "linear, constant"),
    (OptimizerConfig, "min_lr_ratio", 2, "0 to 1"),
    (OptimizerConfig, "beta1", 1.0, "0 or more, below 1"),
    (OptimizerConfig, "beta2", -0.1, "0 or more, below 1"),
    (OptimizerConfig, "eps", 0, "above 0"),
    (OptimizerConfig, "weight_decay", -1, "0 or more"),
    (OptimizerConfig, "clip_grad", 0, "above 0"),
    (TrainingConfig, "token_budget", 10, "64 or more"),
    (TrainingConfig, "dtype", "float16", "float32, bfloat16"),
    (TrainingConfig, "share_prompts", "yes", "true or false"),
    (TrainingConfig, "recompute", "maybe", "true, false, selective"),
    (TrainingConfig, "recompute", 1, "true, false, selective"),
    (TrainingConfig, "checkpoint_every", 0, "1 or more"),
    (TrainingConfig, "keep_checkpoints", 0, "1 or more"),
    (TrainingConfig, "threads", 0, "1 or more"),
    (EvalConfig, "every", -1, "0 (only at the end) or more"),
    (EvalConfig, "limit", 0, "1 or more"),
    (WarmupConfig, "steps", -1, "0 (none) or more"),
    (WarmupConfig, "batch_size", 0, "1 or more"),
    (WarmupConfig, "lr", 0, "above 0"),
    (AutoscaleConfig, "min_engines", 0, "1 or more"),
    (AutoscaleConfig, "max_engines", -1, "0 (off), or min_engines (1) and more"),
    (AutoscaleConfig, "wait_above", 0.0, "above 0, at most 1"),
    (AutoscaleConfig, "wait_below", 0.5, "0 to less than wait_above (0.3)"),
    (AutoscaleConfig, "window", 0.0, "above 0 seconds"),
    (AutoscaleConfig, "cooldown", 1.0, "window (30.0) or more seconds"),
    (RayConfig, "address", 6379, "host:port"),
    (RayConfig, "object_store_mb", 10, "80 or more"),
    (RayConfig, "journal", "sqlite:///runs.db", "postgresql://user@host/database"),
    (RayConfig, "runtime_env", ["numpy"], "a dictionary, as for ray.init"),
    (RunConfig, "bus", "redis", "local, transfer_queue"),
    (RunConfig, "steps", 0, "1 or more"),
    (RunConfig, "max_staleness", -1, "0 or more"),
    (RunConfig, "engines", 0, "1 or more"),
    (RunConfig, "mode", "sync", "async, colocate"),
    (RunConfig, "engine", "tgi", "embedded, sglang, vllm"),
    (RunConfig, "model", 3, "text"),
]


@pytest.mark.parametrize(("config", "field", "value", "allowed"), BAD, ids=[f"{c.__name__}.{f}={v!r}" for c, f, v, _ in BAD])
def test_an_error_names_field_value_and_range(config: type, field: str, value: Any, allowed: str) -> None:
    required = {"env": "tone-v0"} if config is RunConfig else {}
    with pytest.raises(ConfigError) as caught:
        config(**required | {field: value})
    assert str(caught.value) == f"{config.__name__}.{field} = {value!r}; allowed: {allowed}"


def test_colocation_is_on_policy() -> None:
    with pytest.raises(ConfigError, match="max_staleness must be 0, got 1"):
        RunConfig("tone-v0", mode="colocate", max_staleness=1)
    assert RunConfig("tone-v0", mode="colocate", max_staleness=0).mode == "colocate"


def test_flags_of_an_engine_need_that_engine():
    with pytest.raises(ConfigError, match=r"--tp.*engine='sglang'"):
        RunConfig("tone-v0", engine_flags=("--tp", "2"))
    for engine in ("sglang", "vllm"):
        assert RunConfig("tone-v0", engine=engine, engine_flags=("--tp", "2")).engine_flags == ("--tp", "2")


def test_every_default_is_allowed_and_plain() -> None:
    config = RunConfig("tone-v0")
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["sampling"]["temperature"] == 1.0 and plain["rollout"]["group_size"] == 16
    again = SamplingParams(**plain["sampling"])
    assert again == config.sampling and isinstance(again.stop_token_ids, tuple)


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig("tone-v0").steps = 0  # type: ignore[misc]


def test_whole_numbers_are_numbers() -> None:
    assert OptimizerConfig(lr=1, weight_decay=0).lr == 1
    assert RolloutConfig(episode_timeout=float("inf")).episode_timeout == float("inf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": AlgorithmConfig(updates_per_batch=17)},
            "groups_per_step is 16",
        ),
        ({"algorithm": AlgorithmConfig(old_logprobs="recompute", correction="none")}, "max_staleness=0"),
    ],
)
def test_algorithms_that_do_not_fit_the_run(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig("tone-v0", **settings)


@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.9), SamplingParams(top_k=20)])
def test_a_cut_whose_logprobs_the_engine_does_not_report_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(ConfigError, match="before this cut"):
        RunConfig("tone-v0", engine="sglang", sampling=sampling)
    RunConfig("tone-v0", engine="vllm", sampling=sampling)
    RunConfig("tone-v0", engine="embedded", sampling=sampling)


def test_on_policy_data_need_no_correction() -> None:
    RunConfig("tone-v0", max_staleness=0, algorithm=AlgorithmConfig(old_logprobs="recompute", correction="none"))


@pytest.mark.parametrize(("staleness", "updates", "ahead"), [(0, 1, 0), (1, 1, 1), (3, 1, 3), (1, 4, 0), (4, 4, 1), (7, 4, 1)])
def test_how_far_rollouts_run_ahead(staleness: int, updates: int, ahead: int) -> None:
    config = RunConfig("tone-v0", max_staleness=staleness, algorithm=AlgorithmConfig(updates_per_batch=updates))
    assert config.batches_ahead == ahead
    assert config.version_at(3) == 3 * updates


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("8", 8),
        ("1e-3", 1e-3),
        ("['--tp', '2']", ["--tp", "2"]),
        ("async", "async"),
    ],
)
def test_settings_of_the_command_line_are_read_as_yaml_json_or_python_write_them(text: str, value: Any) -> None:
    from relax_sdk.cli import parse_settings

    assert parse_settings([f"training.replay_routes={text}"]) == {"training": {"replay_routes": value}}


def test_another_seed_changes_nothing_else_of_how_responses_are_sampled():
    given = SamplingParams(max_new_tokens=7, top_p=0.9, stop=("x",), sampling_seed=1)
    assert given.with_seed(5) == dataclasses.replace(given, sampling_seed=5) and given.sampling_seed == 1
    assert given.with_seed(None) == SamplingParams(max_new_tokens=7, top_p=0.9, stop=("x",))
