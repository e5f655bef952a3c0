"""TRL's GRPOTrainer on a given model, prompts and batch; prints seconds a step as JSON. Called by benchmarks/loop.py with the interpreter of TRL's environment.

It knows nothing of this project, so that the environment needs TRL alone.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d+")


def last_number(completions: list[str], gold: list[str], **_: Any) -> list[float]:
    """+1 where the last number of the completion is the gold answer, else -1."""
    return [
        1.0 if (NUMBER.findall(text) or [""])[-1] == answer else -1.0
        for text, answer in zip(completions, gold, strict=True)
    ]


class Clock(TrainerCallback):
    """Wall time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note when a step ended."""
        self.times.append(time.perf_counter())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **__: Any) -> None:
        """Note the mean length of the step's completions, in tokens."""
        if "completions/mean_length" in logs:
            self.tokens.append(logs["completions/mean_length"])


def main() -> None:
    """Train for the given number of steps; leave the first two out of the mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a Hugging Face checkpoint")
    parser.add_argument("prompts", help="JSONL with prompt and gold")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=0, help="completions per forward pass; 0: all")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lines = Path(given.prompts).read_text().splitlines()
    data = Dataset.from_list([json.loads(line) for line in lines])
    completions = given.groups * given.group_size
    micro = given.micro_batch or completions
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
            reward_funcs=last_number,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=completions // micro,
                num_generations=given.group_size,
                max_completion_length=given.max_tokens,
                max_steps=given.steps,
                learning_rate=given.lr,
                lr_scheduler_type="constant",
                loss_type="cispo",
                epsilon_high=5.0,
                beta=0.0,
                temperature=1.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                dataloader_num_workers=0,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    skip = 2
    seconds = (clock.times[-1] - clock.times[skip - 1]) / (len(clock.times) - skip)
    tokens = clock.tokens[skip:]
    print(json.dumps({"seconds": seconds, "threads": given.threads, "tokens": sum(tokens) / len(tokens) * completions}))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
