"""The same task in the plainest possible way: one process, one forward a prompt, no engine, no journal, no recording.

    python -m benchmarks.plain_loop [--env tone-v0] [--steps 60]

What the pipeline costs is measured against it (`benchmarks.step`). It plays one-turn environments with
one sampled token only: all samples of a group come from one forward, whose graph is used for the gradient too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import relax_envs  # noqa: F401  (registers)
import torch
from relax_server.models.catalog import resolve_model
from relax_server.models.hf_inputs import hf_inputs
from relax_server.models.processor import Processor
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

from relax_sdk.messages import as_messages
from relax_sdk.registry import get_spec


class PlainLoop:
    """GRPO on one-token answers with transformers' own model.

    Args:
        env: a registered environment whose episodes are one turn and one token.
        groups: prompts a step.
        size: answers a prompt.
    """

    def __init__(self, env: str, groups: int, size: int, lr: float = 1e-3) -> None:
        path = resolve_model("relax/tiny-omni")
        self.processor, self.model = Processor.load(path), Model.from_pretrained(path, dtype=torch.float32)
        spec = get_spec(env)
        self.rows = spec.splits()["train"]
        self.env: Any = spec.make()
        self.groups, self.size, self.task = groups, size, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.99))
        self.banned = list(self.processor.banned_ids)

    def prompt(self) -> tuple[list[int], list[Any], int]:
        """Ids and features of the next task, and the id of its right answer."""
        row = self.rows.row(self.task)
        self.task += 1
        observation, _ = self.env.reset(options={"task": row})
        rendered = self.processor.render(as_messages(observation))
        features = [self.processor.features(m.bytes(), m.ref.sha256, m.ref.kind) for m in rendered.media]
        answer = self.processor.tokenizer.encode(row["answer"], add_special_tokens=False)[0]
        return self.processor.expand(rendered.ids, features), features, answer

    def step(self) -> float:
        """One step; returns its mean reward."""
        prompts = [self.prompt() for _ in range(self.groups)]
        ids = torch.tensor([p[0] for p in prompts])
        answers = torch.tensor([p[2] for p in prompts])[:, None]
        self.model.model.rope_deltas = None
        media = hf_inputs([f for p in prompts for f in p[1]])
        out = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1, **media)
        logits = out.logits[:, -1].float()
        logits[:, self.banned] = -torch.inf
        logprobs = torch.log_softmax(logits, -1)
        sampled = torch.multinomial(logprobs.detach().exp(), self.size, replacement=True)
        rewards = (sampled == answers).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        self.optimizer.zero_grad()
        (-(advantages * logprobs.gather(1, sampled)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="tone-v0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = PlainLoop(args.env, args.groups, args.size)
    seconds, rewards = [], []
    for _ in range(args.steps):
        began = time.perf_counter()
        rewards.append(loop.step())
        seconds.append(time.perf_counter() - began)
    steady = seconds[args.steps // 4 :]
    print(json.dumps({"seconds": statistics.median(steady), "mean": float(np.mean(steady)), "reward": np.mean(rewards[-10:])}))


if __name__ == "__main__":
    main()
