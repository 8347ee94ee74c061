"""Batching, sharing, retraction and failure, on the scheduler itself."""

import hashlib

import numpy as np
import psutil
import pytest
import torch
from engine_reference import Reference
from relax_server.engines.embedded.control import TAGS, Control
from relax_server.engines.embedded.core import Prompt, RequestError, Sequence
from relax_server.engines.embedded.model import ModelRunner
from relax_server.engines.embedded.sampling import Sampling
from relax_server.engines.embedded.scheduler import Scheduler, SchedulerConfig
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_weights

from relax_sdk.errors import ConfigError


@pytest.fixture(scope="module", params=["relax/tiny-llama", "relax/tiny-qwen3", "qwen2", "qwen3_moe"])
def reference(request, tmp_path_factory) -> Reference:
    name = request.param
    if not name.startswith("relax/"):
        return Reference(build(name, tmp_path_factory.mktemp(name)))
    return Reference(resolve_model(name))


@pytest.fixture(scope="module")
def llama() -> Reference:
    return Reference(resolve_model("relax/tiny-llama"))


def build(kind: str, folder, dense: tuple[int, ...] = ()):
    """A small random model of another family, with the built-in tokenizer; a mixture of experts may have dense layers."""
    import transformers

    base = resolve_model("relax/tiny-llama")
    shape = dict(vocab_size=268, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    if kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, tie_word_embeddings=True))
    else:
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
        config = transformers.Qwen3MoeConfig(**shape, head_dim=16, **experts, mlp_only_layers=list(dense))
        model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def scheduler_of(reference: Reference, **options) -> Scheduler:
    processor = reference.processor
    config = SchedulerConfig(**{"capacity": 4096, "eos_ids": processor.eos_ids, **options})
    runner = ModelRunner(processor.path, processor.hf_config, torch.float32, config.record_routes)
    return Scheduler(runner, config)


def prompt(ids: list[int]) -> Prompt:
    tokens = np.asarray(ids, np.int64)
    return Prompt(ids, tokens, tokens, hashlib.sha256(tokens.tobytes()).digest(), None, 0.0)


def sequence(ids: list[int], n: int, seed: int, **sampling) -> Sequence:
    options = {"ignore_eos": True, "max_new_tokens": n, **sampling}
    return Sequence(f"r{seed}", 0, prompt(ids), Sampling(**options), seed, lambda s: None)


def run(scheduler: Scheduler, sequences: list[Sequence], steps: int = 10_000) -> None:
    with torch.inference_mode():
        for item in sequences:
            scheduler.add(item)
        while scheduler.has_work and steps:
            scheduler.step()
            steps -= 1


def check(reference: Reference, item: Sequence) -> None:
    expected = reference.logprobs(item.prompt.ids, item.out_ids)
    gap = np.abs(expected - np.asarray(item.logprobs))
    assert gap.max() <= 1e-4 and gap.mean() <= 1e-5, f"max {gap.max():.2e}"


def nothing_leaks(scheduler: Scheduler) -> None:
    scheduler.flush_cache()
    assert scheduler.pool.n_free == scheduler.config.capacity
    assert (scheduler.pool.refs == 0).all()


def random_ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(12, 268, rng.integers(low, high)).tolist()


def test_mixed_lengths_in_small_chunks(reference: Reference):
    """Prompts longer and shorter than a chunk, decoding between them, shared beginnings."""
    scheduler = scheduler_of(reference, chunk=48)
    rng = np.random.default_rng(0)
    common = random_ids(rng, 60, 61)
    items = [sequence((common if i % 2 else []) + random_ids(rng, 1, 150), int(rng.integers(1, 20)), i) for i in range(24)]
    run(scheduler, items)
    for item in items:
        assert len(item.out_ids) == item.sampling.max_new_tokens
        check(reference, item)
    assert scheduler.stats.cached_tokens >= 11 * 60
    nothing_leaks(scheduler)


def test_long_prompts_after_a_cached_prefix(llama: Reference):
    """Chunks of over 256 tokens take the path of their own, with and without tokens before them."""
    scheduler = scheduler_of(llama, chunk=700)
    rng = np.random.default_rng(1)
    long = random_ids(rng, 1500, 1501)
    items = [sequence(long, 3, 0)]
    run(scheduler, items)
    items.append(sequence(long[:900] + random_ids(rng, 400, 401), 3, 1))
    run(scheduler, items[1:])
    assert items[1].cached_tokens == 900
    for item in items:
        check(llama, item)


def test_equal_prompts_that_arrive_together_are_computed_once(llama: Reference):
    scheduler = scheduler_of(llama)
    ids = random_ids(np.random.default_rng(2), 45, 46)
    items = [sequence(ids, 4, i) for i in range(16)]
    run(scheduler, items)
    assert scheduler.stats.prompt_tokens == 45 and scheduler.stats.steps == 4
    assert [i.cached_tokens for i in items] == [0] + [45] * 15
    assert len({tuple(i.out_ids) for i in items}) > 10
    for item in items:
        check(llama, item)
    nothing_leaks(scheduler)


def test_a_full_pool_retracts_the_newest_and_loses_nothing(llama: Reference):
    alone = scheduler_of(llama)
    rng = np.random.default_rng(3)
    prompts = [random_ids(rng, 20, 40) for _ in range(8)]
    wanted = [sequence(p, 60, i) for i, p in enumerate(prompts)]
    for item in wanted:
        run(alone, [item])
    scheduler = scheduler_of(llama, capacity=360)
    items = [sequence(p, 60, i) for i, p in enumerate(prompts)]
    run(scheduler, items)
    assert scheduler.stats.retractions > 0
    assert items[0].n_retractions == 0
    for item, expected in zip(items, wanted, strict=True):
        assert item.out_ids == expected.out_ids  # the random numbers are of seed and place only
        check(llama, item)
    nothing_leaks(scheduler)


def test_a_request_as_large_as_the_pool_runs_alone(llama: Reference):
    scheduler = scheduler_of(llama, capacity=100)
    rng = np.random.default_rng(4)
    items = [sequence(random_ids(rng, 60, 61), 40, i) for i in range(3)]
    run(scheduler, items)
    for item in items:
        check(llama, item)
    nothing_leaks(scheduler)


def test_more_sequences_than_rows_wait_their_turn(llama: Reference):
    scheduler = scheduler_of(llama, max_running=3)
    items = [sequence([20 + i, 30, 40], 5, i) for i in range(10)]
    run(scheduler, items, steps=2)
    assert len(scheduler.running) == 3 and len(scheduler.waiting) == 7
    run(scheduler, [])
    assert all(len(i.out_ids) == 5 for i in items)


def test_a_flush_in_the_middle_keeps_running_sequences_right(llama: Reference):
    scheduler = scheduler_of(llama)
    ids = random_ids(np.random.default_rng(5), 30, 31)
    early = sequence(ids, 20, 0)
    run(scheduler, [early], steps=5)
    scheduler.flush_cache()
    late = sequence(ids, 5, 1)
    run(scheduler, [late])
    assert late.cached_tokens == 0
    for item in (early, late):
        check(llama, item)
    assert len(scheduler.tree.match(late.prompt.keys)) == 30
    follow = sequence([*ids, *early.out_ids], 2, 2)
    run(scheduler, [follow])
    assert follow.cached_tokens < 32  # what the early one computed before the flush is not offered to others
    nothing_leaks(scheduler)


@pytest.mark.parametrize("tokens", [50, 31])
def test_half_a_prompt_of_old_weights_is_computed_again_after_an_update(llama: Reference, tokens: int):
    """However little of it is left: where it is one token, the sequence looks like one that generates."""
    new = Reference(resolve_model("relax/tiny-llama", seed=1))
    scheduler = scheduler_of(llama, chunk=30)
    control = Control(scheduler)
    ids = random_ids(np.random.default_rng(8), tokens, tokens + 1)
    early, late = (sequence(ids, 4, i) for i in range(2))
    run(scheduler, [early], steps=1)
    assert early.computed == 30 and not early.out_ids
    control.update_weights(read_weights(new.processor.path), "1", flush=True, abort_all=False)
    run(scheduler, [late])
    check(new, early)
    check(new, late)
    assert late.versions == early.versions == ["1"] * 4
    nothing_leaks(scheduler)


def test_an_update_between_two_prefill_chunks_leaves_the_sequences_that_generate_alone(llama: Reference):
    """The one goes on with the prompt that the old weights have read; the other's prompt is read by the new ones alone."""
    new = Reference(resolve_model("relax/tiny-llama", seed=1))
    scheduler = scheduler_of(llama, chunk=30)
    control = Control(scheduler)
    rng = np.random.default_rng(9)
    generating, half = sequence(random_ids(rng, 10, 11), 8, 0), sequence(random_ids(rng, 50, 51), 4, 1)
    run(scheduler, [generating], steps=3)
    run(scheduler, [half], steps=1)
    assert (generating.computed, half.computed, half.out_ids) == (13, 30, [])
    control.pause("in_place")
    control.update_weights(read_weights(new.processor.path), "1", flush=True, abort_all=False)
    control.resume()
    run(scheduler, [])
    assert generating.versions == ["0"] * 4 + ["1"] * 4 and generating.n_retractions == 0
    old = llama.logprobs(generating.prompt.ids, generating.out_ids)[:4]
    assert np.abs(old - np.asarray(generating.logprobs[:4])).max() <= 1e-4
    assert half.versions == ["1"] * 4
    check(new, half)
    nothing_leaks(scheduler)


def test_a_retracted_sequence_is_computed_again_by_one_version_too(llama: Reference):
    """What it generated before is part of what it reads: an update between the chunks of it begins them anew."""
    new = Reference(resolve_model("relax/tiny-llama", seed=1))
    scheduler = scheduler_of(llama, chunk=30)
    control = Control(scheduler)
    item = sequence(random_ids(np.random.default_rng(10), 50, 51), 6, 0)
    run(scheduler, [item], steps=4)
    assert len(item.out_ids) == 3
    control.pause("retract")
    scheduler.flush_cache()
    control.resume()
    run(scheduler, [], steps=1)
    assert item.computed == 30
    control.update_weights(read_weights(new.processor.path), "1", flush=True, abort_all=False)
    run(scheduler, [])
    expected = new.logprobs(item.prompt.ids, item.out_ids)[3:]
    assert item.versions == ["0"] * 3 + ["1"] * 3
    assert np.abs(expected - np.asarray(item.logprobs[3:])).max() <= 1e-4
    nothing_leaks(scheduler)


def test_a_failed_step_fails_its_sequences_and_the_next_ones_are_right(llama: Reference, monkeypatch):
    scheduler = scheduler_of(llama)
    ids = random_ids(np.random.default_rng(6), 30, 31)
    items = [sequence(ids, 4, i) for i in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.runner, "forward", lambda *a: 1 / 0)
        for item in items:
            scheduler.add(item)
        with pytest.raises(ZeroDivisionError):
            scheduler.step()
        scheduler.fail("broken")
    assert all(i.finish is not None and i.finish.status == 500 and i.finish.message == "broken" for i in items)
    again = sequence(ids, 4, 9)
    run(scheduler, [again])
    check(llama, again)
    nothing_leaks(scheduler)


def test_stop_strings_and_end_of_turn(llama: Reference):
    processor = llama.processor
    decode = processor.decode
    scheduler = scheduler_of(llama, decode=decode)
    free = sequence([20, 21, 22], 40, 5)
    run(scheduler, [free])
    text = decode(free.out_ids)
    stop = text[10:13]
    cut = sequence([20, 21, 22], 40, 5, stop=(stop,))
    run(scheduler, [cut])
    assert cut.finish is not None and cut.finish.matched == stop
    assert cut.out_ids == free.out_ids[: len(cut.out_ids)] and stop in decode(cut.out_ids)
    assert stop not in decode(cut.out_ids[:-1])
    ended = sequence([20, 21, 22], 40, 5, ignore_eos=False, logit_bias={processor.eos_ids[0]: 50.0})
    run(scheduler, [ended])
    assert ended.finish is not None and ended.finish.type == "stop" and ended.out_ids == [processor.eos_ids[0]]


def test_released_memory_is_really_given_back(llama: Reference):
    scheduler = scheduler_of(llama, capacity=150_000)
    control = Control(scheduler)
    scheduler.pool.keys.fill_(1.0)
    scheduler.pool.values.fill_(1.0)
    size = scheduler.pool.keys.nbytes + scheduler.pool.values.nbytes
    full = psutil.Process().memory_info().rss
    control.release(TAGS)
    assert full - psutil.Process().memory_info().rss > 0.9 * size > 100e6
    assert sum(p.numel() for p in scheduler.runner.model.parameters()) == 0
    with pytest.raises(RequestError, match="released"):
        control.update_weights({}, "1", flush=True, abort_all=False)
    control.restore(TAGS)
    assert control.refusal is not None
    control.update_weights(read_weights(llama.processor.path), "1", flush=True, abort_all=False)
    assert control.refusal is None
    item = sequence([20, 30, 40], 3, 0)
    run(scheduler, [item])
    check(llama, item)
    assert item.versions == ["1"] * 3


@pytest.mark.parametrize("dense", [0, 1])
def test_routes_are_of_every_decoder_layer_and_zero_where_it_is_dense(tmp_path, dense: int):
    reference = Reference(build("qwen3_moe", tmp_path, (dense,)))
    scheduler = scheduler_of(reference, record_routes=True)
    items = [sequence(random_ids(np.random.default_rng(11), 40, 41), 5, i) for i in range(2)]
    for item in items:
        item.want_routes = True
    run(scheduler, items)
    chosen: list[np.ndarray] = []
    gate = reference.model.model.layers[1 - dense].mlp.gate
    gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].numpy()))
    for item in items:
        check(reference, item)
        routes = item.routed_experts
        assert routes is not None and routes.shape == (40 + 5 - 1, 2, 2)
        assert (routes[:, dense] == 0).all()
        assert (np.sort(routes[:, 1 - dense]) == np.sort(chosen.pop()[:-1])).all()


def test_models_that_cannot_be_served_are_refused(llama: Reference, tmp_path):
    processor = llama.processor
    with pytest.raises(ConfigError, match="no experts"):
        ModelRunner(processor.path, processor.hf_config, torch.float32, record_routes=True)
    import transformers

    with pytest.raises(ConfigError, match="gpt2"):
        ModelRunner(tmp_path, transformers.GPT2Config(), torch.float32, record_routes=False)
    windowed = transformers.Qwen2Config(
        vocab_size=268, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_window_layers=0,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(windowed).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding"):
        ModelRunner(tmp_path, windowed, torch.float32, record_routes=False)
