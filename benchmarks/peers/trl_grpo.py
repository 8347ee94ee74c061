"""TRL's `GRPOTrainer` on tasks and a model that `benchmarks.trl` wrote; run by it in an environment of TRL's own.

Prints one line of JSON: seconds of every step, rewards of the training batches, and held-out greedy rewards with the seconds
until then, evaluations left out.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help='JSON: {"train": [{"prompt", "answer"}], "eval": […]}')
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--full", action="store_true", help="answers of exactly --new tokens")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--goal", type=float, default=2.0, help="held-out reward to stop at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", required=True)
    return parser.parse_args()


def reward(completions: list, answer: list, **_: object) -> list[float]:
    """1.0 where the answer's text begins with the right letter; the share of `e` where there is none."""
    texts = [completion[0]["content"] for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [float(text.startswith(right)) if right else text.count("e") / max(len(text), 1) for text, right in pairs]


class Record(TrainerCallback):
    """Times of the steps, without the evaluations in between."""

    def __init__(self, evaluate, every: int, goal: float) -> None:
        self.evaluate, self.every, self.goal = evaluate, every, goal
        self.ends, self.rewards, self.held, self.away = [], [], [], 0.0

    def on_train_begin(self, args, state, control, **_: object) -> None:
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_: object) -> None:
        if "reward" not in (logs or {}):
            return
        self.ends.append(time.perf_counter() - self.began - self.away)
        self.rewards.append(logs["reward"])
        if self.every and len(self.ends) % self.every == 0:
            paused = time.perf_counter()
            self.held.append([len(self.ends), self.ends[-1], self.evaluate()])
            control.should_training_stop = self.held[-1][2] >= self.goal
            self.away += time.perf_counter() - paused


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    set_seed(args.seed)
    with open(args.rows) as file:
        rows = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def evaluate() -> float:
        model.eval()
        template = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True)
        inputs = tokenizer.apply_chat_template([chat(row["prompt"]) for row in rows["eval"]], **template)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=args.new, do_sample=False)
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        model.train()
        right = [text.startswith(row["answer"]) for text, row in zip(texts, rows["eval"], strict=True)]
        return sum(right) / len(right)

    need = args.steps * args.prompts
    train = [rows["train"][i % len(rows["train"])] for i in range(need)]
    config = GRPOConfig(
        output_dir=args.folder,
        per_device_train_batch_size=args.prompts * args.size,
        num_generations=args.size,
        max_completion_length=args.new,
        generation_kwargs={"min_new_tokens": args.new} if args.full else None,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        temperature=1.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=args.seed,
    )
    record = Record(evaluate, args.eval_every, args.goal)
    dataset = Dataset.from_list([{"prompt": chat(row["prompt"]), "answer": row["answer"]} for row in train])
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[record]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = [after - before for before, after in zip([0.0, *record.ends], record.ends, strict=False)]
    print(json.dumps({"seconds": seconds, "rewards": record.rewards, "held_out": record.held}))


if __name__ == "__main__":
    main()
