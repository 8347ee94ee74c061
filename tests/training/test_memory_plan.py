"""`relax plan` against what the tiny models really hold: weights, gradients and optimizer exactly, activations within 10%."""

from __future__ import annotations

import re
from typing import Any

import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.division import moe_layers
from relax_server.training.memory_plan import again_bytes, fitting, plan, plan_layout
from relax_server.training.planned_model import Model
from typer.testing import CliRunner

from relax_sdk import ConfigError, TrainingConfig, planning_cli
from relax_sdk.layout import LayoutConfig
from relax_sdk.planning import PlanRequest, parse_tuning
from relax_sdk.tuning import TARGETS, LoraConfig, TowersConfig, Tuning

TINY = ["relax/tiny-qwen3", "relax/tiny-llama", "relax/tiny-omni"]


def held(name: str, dtype: str, recompute: Any, tokens: int, tuning: Tuning | None = None) -> dict[str, int]:
    """Bytes by kind after a step, and those kept for the backward pass of a forest of about so many tokens, without media."""
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack
    from training_data import conversation, kept_for_backward, letter_groups, make_policy, read

    from benchmarks.gpu_check import held_bytes

    policy = make_policy(resolve_model(name), dtype=dtype, recompute=recompute, kl_coef=0.0, tuning=tuning)
    policy.train_step(letter_groups(policy.processor, 2), read, 0)
    out = held_bytes(policy)
    sample = conversation(policy.processor, [(["a question " * (tokens // 12)], "answer")])
    (forest,) = pack(make_batch([sample], policy.processor, read_features([sample], policy.processor, read)), 10 * tokens)
    return out | {"tokens": len(forest.ids), "activations": kept_for_backward(policy._loaded.model, forest)}


def hf_config(name: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(resolve_model(name))


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in TINY), ("relax/tiny-qwen3", "bfloat16")])
def test_the_plan_of_one_process_is_what_it_holds(worker, name, dtype):
    real = worker.run(held, name, dtype, False, 600)
    training = TrainingConfig(dtype=dtype, token_budget=real["tokens"])
    (plan,) = plan_layout(Model.of(hf_config(name)), LayoutConfig(), training, reference=False, flex=False).ranks
    assert plan.weights == real["weights"]
    assert abs(plan.gradients - real["gradients"]) <= 0.001 * real["gradients"]  # buffers may end with padding
    assert abs(plan.optimizer - real["optimizer"]) <= 0.001 * real["optimizer"]  # a step counter for each tensor
    assert abs(plan.activations - real["activations"]) < 0.1 * real["activations"], (plan.activations, real["activations"])


@pytest.mark.parametrize(
    ("name", "recompute", "tuning"),
    [
        ("relax/tiny-qwen3", "selective", Tuning()),
        ("relax/tiny-omni", "selective", Tuning()),
        ("relax/tiny-qwen3", False, Tuning(LoraConfig(rank=8))),
        ("relax/tiny-omni", False, Tuning(LoraConfig(rank=8, targets=TARGETS))),
        ("relax/tiny-omni", False, Tuning(LoraConfig(rank=8), TowersConfig(visual="train"))),
        ("relax/tiny-omni", False, Tuning(towers=TowersConfig(audio_tower="freeze"))),
    ],
)
def test_what_is_computed_again_or_not_trained_is_planned(worker, name, recompute, tuning):
    real = worker.run(held, name, "float32", recompute, 600, tuning)
    model, layout = Model.of(hf_config(name)), LayoutConfig()
    training = TrainingConfig(token_budget=real["tokens"], recompute=recompute)
    (plan,) = plan_layout(model, layout, training, reference=False, flex=False, tuning=tuning).ranks
    assert plan.weights == real["weights"]
    assert abs(plan.gradients - real["gradients"]) <= 0.002 * real["gradients"]
    assert abs(plan.optimizer - real["optimizer"]) <= 0.01 * real["optimizer"]  # a step counter for each tensor
    planned = plan.activations
    if recompute:  # what is computed again of one layer comes on top of what is kept
        planned -= max(
            again_bytes(model, sparse, real["tokens"], layout, training, False, tuning) for sparse in moe_layers(model.config)
        )
    assert abs(planned - real["activations"]) < 0.1 * real["activations"], (planned, real["activations"])


def test_media_of_a_forest_are_planned_on_the_first_stage_alone() -> None:
    def planned(**settings: Any) -> Any:
        layout = settings.pop("layout", LayoutConfig(pp=2))
        return plan(PlanRequest("relax/tiny-omni", 4, 10**9, layout, TrainingConfig(token_budget=1024), **settings))

    without, told = planned(), planned(visual_tokens=500, audio_tokens=100)
    per_token = told.tower_bytes_per_token
    first, last = told.layouts[0].ranks
    assert per_token == without.tower_bytes_per_token and min(per_token.values()) > 10_000
    assert first.towers == 2 * round(500 * per_token["visual"] + 100 * per_token["audio_tower"])  # of two forests at once
    assert first.total - first.towers == without.layouts[0].ranks[0].total
    assert last == without.layouts[0].ranks[1] and last.towers == 0
    with pytest.raises(ConfigError, match="visual_tokens = 1025 is more than the 1024 tokens of a forest"):
        planned(visual_tokens=1025)
    with pytest.raises(ConfigError, match="audio_tokens = 5: the model has no tower for such media"):
        plan(PlanRequest("relax/tiny-qwen3-vl", 1, 10**9, audio_tokens=5))
    for number, allowed in ((-1, "0 or more"), ("x", "an integer")):
        with pytest.raises(ConfigError, match=f"PlanRequest.visual_tokens = {number!r}; allowed: {allowed}"):
            planned(visual_tokens=number)


def test_media_are_kept_of_all_forests_that_the_first_part_holds_at_once() -> None:
    from transformers import AutoConfig

    deep = Model.of(AutoConfig.for_model("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=64, vocab_size=64))
    layouts, training = (LayoutConfig(), LayoutConfig(pp=2), LayoutConfig(pp=2, vpp=2)), TrainingConfig(token_budget=1024)
    plans = [plan_layout(deep, layout, training, reference=False, flex=False, towers=10) for layout in layouts]
    assert [plan.ranks[0].towers for plan in plans] == [10, 20, 30]


def test_the_command_says_what_media_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_sdk.progress.TICK", 0.001)
    arguments = ["--model", "relax/tiny-omni", "--devices", "1x1GB", "--layout", "dp=1", "--dtype", "float32"]
    untold = CliRunner().invoke(planning_cli.app, arguments)
    assert (
        "towers on the first stage keep 0.085 MB for each token of an image or a film (--visual-tokens: none planned), and "
        "0.053 MB for each token of a sound (--audio-tokens: none planned; a longer sound than 13 in whole chunks)."
    ) in untold.output
    assert "planning relax/tiny-omni · " in untold.stderr
    told = CliRunner().invoke(planning_cli.app, [*arguments, "--visual-tokens", "1000"])
    assert "(--visual-tokens: 1,000 planned)" in told.output and "(--audio-tokens: none planned;" in told.output
    assert " 0.085 " in told.stdout.splitlines()[1]
    text = CliRunner().invoke(planning_cli.app, ["--model", "relax/tiny-qwen3", "--devices", "1x1GB"])
    assert text.exit_code == 0 and "towers on" not in text.output


def test_what_is_trained_is_read_from_settings():
    tuning = parse_tuning(["lora.rank=8", 'lora.targets=["attention"]', "towers.visual=train"])
    assert tuning == Tuning(LoraConfig(rank=8, targets=("attention",)), TowersConfig(visual="train"))
    assert parse_tuning([]) == Tuning()
    for setting, message in (
        ("optimizer.lr=1", "--set optimizer: only settings of lora and towers change what is planned"),
        ("lora.rang=8", "--set lora.rang: there are rank, alpha, targets"),
        ("lora.rank=-8", "LoraConfig.rank = -8"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_tuning([setting])
    answer = CliRunner().invoke(
        planning_cli.app, ["--model", TINY[0], "--devices", "2x1GB", "--set", "lora.rank=8", "--recompute-selective"]
    )
    assert answer.exit_code == 0 and "dp=2 distributed_optimizer=True" in answer.output
    assert re.search(
        r"768 bytes of keys and values a token: on a device of its own it has room for 1,19\d,\d{3} tokens", answer.output
    )
    small = CliRunner().invoke(planning_cli.app, ["--model", TINY[0], "--devices", "1x0.001GB", "--layout", "dp=1"])
    assert "keys and values a token: on a device of its own its weights do not fit" in small.output


def test_layouts_share_the_weights_and_the_best_that_fits_comes_first():
    model, training = Model.of(hf_config("relax/tiny-omni")), TrainingConfig(token_budget=1024)
    one = plan_layout(model, LayoutConfig(), training, reference=True, flex=True).ranks[0]
    two = plan_layout(model, LayoutConfig(tp=2), training, reference=True, flex=True).ranks[0]
    piped = plan_layout(model, LayoutConfig(pp=2), training, reference=True, flex=True)
    assert one.weights / 2 < two.weights < one.weights and one.reference == one.weights
    assert sum(rank.weights for rank in piped.ranks) == one.weights
    assert plan_layout(model, LayoutConfig(tp=8), training, reference=True, flex=True).refused.startswith("layout.tp = 8")
    moved = plan_layout(model, LayoutConfig(), TrainingConfig(offload="optimizer"), reference=True, flex=True).ranks[0]
    kept = plan_layout(model, LayoutConfig(), TrainingConfig(), reference=True, flex=True).ranks[0]
    computed = kept.activations + kept.logits + kept.attention_plan
    assert kept.total - moved.total == min(kept.optimizer, computed) > 0
    found = fitting(model, 4, 10**9, training, reference=True)
    assert found[0].layout == LayoutConfig(dp=4, distributed_optimizer=True) and len(found) > 5
    tight = fitting(model, 4, found[0].largest, training, reference=True)
    assert tight and all(plan.largest <= found[0].largest for plan in tight) and found[0] not in tight


@pytest.mark.parametrize(
    ("layout", "dtype", "attention", "flex"),
    [
        (LayoutConfig(), "bfloat16", "auto", True),
        (LayoutConfig(), "float32", "auto", False),
        (LayoutConfig(), "float32", "flex", True),
        (LayoutConfig(cp=2), "bfloat16", "auto", False),
    ],
)
def test_a_plan_attends_as_the_trainer_will_on_a_gpu(layout: LayoutConfig, dtype: Any, attention: Any, flex: bool) -> None:
    model = Model.of(hf_config("relax/tiny-qwen3"))
    training = TrainingConfig(token_budget=1024, dtype=dtype, attention=attention)
    (planned,) = fitting(model, layout.ranks, 10**9, training, reference=False, only=layout)
    wanted, other = (plan_layout(model, layout, training, reference=False, flex=way) for way in (flex, not flex))
    assert planned == wanted != other


def test_an_interleaved_pipeline_that_cannot_be_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"LayoutConfig.vpp = 2; allowed: 1 where pp is 1"):
        LayoutConfig(vpp=2)
    model = Model.of(hf_config("relax/tiny-qwen3"))
    refused = plan_layout(model, LayoutConfig(pp=2, vpp=2), TrainingConfig(), reference=True, flex=True).refused
    assert refused == ("layout.vpp = 2 with layout.pp = 2: the model has 3 decoder layers, which 4 parts cannot share evenly")


@pytest.mark.parametrize(("text", "message"), [("{", "not a valid JSON file"), ("{}", "Should have a `model_type` key")])
def test_a_folder_that_holds_no_model_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"is not a model folder transformers can read .*{message}"):
        plan(PlanRequest(str(tmp_path), 1, 10**9))
