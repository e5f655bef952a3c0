"""The same questions, the same prompts, two harnesses: verdict per question from ours and from EleutherAI's lm-evaluation-harness.

    python benchmarks/lm_eval.py --lm-eval-python OTHER_ENV/bin/python --gsm8k gsm8k_test.jsonl --questions 200 --out lm-eval.md

lm-evaluation-harness (with reasoning-gym, which makes the sums) lives in an environment of its own: `pip install lm-eval==0.4.13 reasoning-gym==0.1.25 torch
transformers accelerate`. Both sides decode greedily in fp32 with at most --tokens new tokens and the same stop texts. The model is SmolLM2-135M-Instruct (`make smollm2`),
or any checkpoint folder (--model). Every difference is explained: another text (with the gap between the two likeliest tokens where the texts part), a budget that was
used up (ours calls such an answer wrong), or another reading of the same text. Exits with 1 where fewer than 99% of the verdicts agree or a difference has no explanation.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This folder holds a warehouse.py, which must not stand in for the package of that name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

TEMPLATE = "Question: {problem}\nAnswer:"
STOP = ("Question:", "</s>", "<|im_end|>")
# Below this gap of log-probabilities the order of fp32 sums decides which token is the likeliest.
ROUNDING = 1e-3
LEAST_AGREEMENT = 0.99
SUMS = """
import json, sys, reasoning_gym
data = reasoning_gym.create_dataset("chain_sum", size=2000, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
seen = {}
for row in data:
    seen.setdefault(row["question"], row["answer"])
for question, answer in list(seen.items())[:int(sys.argv[1])]:
    print(json.dumps({"question": question, "answer": answer}))
"""
# gsm8k.yaml of lm-evaluation-harness 0.4.13 over a file, zero-shot; the flexible filter takes the last number of the text.
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs:
  until: ["Question:", "</s>", "<|im_end|>"]
  do_sample: false
  temperature: 0.0
  max_gen_toks: {tokens}
num_fewshot: 0
filter_list:
  - name: strict-match
    filter:
      - {{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}
      - {{function: take_first}}
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
metadata:
  version: 3.0
"""


@dataclass
class Theirs:
    """One answer of lm-evaluation-harness: prompt and text, what the flexible filter read, verdict of both filters."""

    prompt: str
    text: str
    read: str
    flexible: bool
    strict: bool = False


def lm_eval(
    python: str, model: Path, files: dict[str, Path], work: Path, tokens: int, batch: int
) -> dict[str, list[Theirs]]:
    """Run lm-evaluation-harness over the files; return its answers in the order of the questions."""
    tasks = work / "tasks"
    tasks.mkdir(exist_ok=True)
    for name, file in files.items():
        (tasks / f"{name}_here.yaml").write_text(TASK.format(name=f"{name}_here", file=file, tokens=tokens))
    out = work / "lm-eval"
    command = [python, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32"]
    command += ["--tasks", ",".join(f"{name}_here" for name in files), "--include_path", str(tasks)]
    command += ["--device", "cpu", "--batch_size", str(batch), "--log_samples", "--output_path", str(out)]
    private = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache"), "DO_NOT_TRACK": "1"}
    subprocess.run(command, check=True, env=os.environ | private, timeout=6 * 3600)
    found: dict[str, list[Theirs]] = {}
    for name in files:
        path = max(out.rglob(f"samples_{name}_here_*.jsonl"), key=lambda each: each.stat().st_mtime)
        by_place: dict[int, Theirs] = {}
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            right = bool(line["exact_match"])
            if line["filter"] == "flexible-extract":
                prompt = line["arguments"]["gen_args_0"]["arg_0"]
                by_place[line["doc_id"]] = Theirs(prompt, line["resps"][0][0], str(line["filtered_resps"][0]), right)
        for line in lines:
            if line["filter"] == "strict-match":
                by_place[line["doc_id"]].strict = bool(line["exact_match"])
        found[name] = [by_place[place] for place in sorted(by_place)]
    return found


def ours(model: Path, files: dict[str, Path], tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Ask our harness the same; return its answers in the order of the questions."""
    from scalerl.evaluation import downstream
    from scalerl.evaluation.checkpoint import of_folder
    from scalerl.recipe import Benchmark, load

    recipe = load("scalerl", ["model.body_dtype=float32", "rollout.slots=16"])
    common: dict[str, Any] = {"samples": 1, "temperature": 0.0, "prompt": "plain", "think": "none", "stop": STOP}
    entries = [
        Benchmark(
            name=name,
            path=str(file),
            format="gsm8k" if name == "gsm8k" else "jsonl",
            template=TEMPLATE,
            max_tokens=tokens,
            **common,
        )
        for name, file in files.items()
    ]
    checkpoint = of_folder(model, recipe, {})
    found = {}
    for record in downstream.ask(checkpoint, entries):
        path = downstream.record_path(checkpoint, record["benchmark"]).parent / record["answers"]
        found[record["name"]] = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    return found


class Gaps:
    """How close the two likeliest tokens are where two texts part, by one forward pass of transformers."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def at(self, prompt: str, first: str, second: str) -> float:
        """Return the gap in nats at the first token in which the texts differ."""
        start = self._tokenizer(prompt).input_ids
        one, two = (self._tokenizer(text, add_special_tokens=False).input_ids for text in (first, second))
        same = 0
        while same < min(len(one), len(two)) and one[same] == two[same]:
            same += 1
        with self._torch.no_grad():
            logits = self._model(input_ids=self._torch.tensor([start + one[:same]])).logits[0, -1]
        best = logits.log_softmax(-1).topk(2).values
        return float(best[0] - best[1])


def explain(mine: dict[str, Any], theirs: Theirs, gaps: Gaps) -> str:
    """Say why two verdicts differ; "" where nothing explains it."""
    if mine["text"].strip() != theirs.text.strip():
        gap = gaps.at(theirs.prompt, mine["text"], theirs.text)
        return f"other text; gap of the two likeliest tokens where they part: {gap:.1e} nats" if gap < ROUNDING else ""
    if mine["finish"] == "truncated":
        return "same text, cut off at the budget: wrong and truncated in ours, judged as it stands in theirs"
    return f"same text, read as {mine['answer']!r} by ours and {theirs.read!r} by theirs"


def compare(name: str, mine: list[dict[str, Any]], theirs: list[Theirs], gaps: Gaps) -> tuple[list[str], float, int]:
    """Return the lines of one table, the share of equal verdicts, and the number of differences without an explanation."""
    if len(mine) != len(theirs):
        sys.exit(f"{name}: {len(mine)} answers of ours, {len(theirs)} of lm-evaluation-harness")
    other = sum(answer["problem"] != their.prompt for answer, their in zip(mine, theirs, strict=True))
    if other:
        sys.exit(f"{name}: {other} prompts are not the same; first: {mine[0]['problem']!r} and {theirs[0].prompt!r}")
    count = len(mine)
    differences = [
        (place, answer, their, explain(answer, their, gaps))
        for place, (answer, their) in enumerate(zip(mine, theirs, strict=True))
        if answer["correct"] != their.flexible
    ]
    same_text = sum(answer["text"].strip() == their.text.strip() for answer, their in zip(mine, theirs, strict=True))
    agreement = 1 - len(differences) / count
    lines = [
        f"## {name}",
        "",
        "| questions | same text | ours right | theirs right (flexible) | theirs right (strict) | verdicts agree | truncated in ours |",
        "|---|---|---|---|---|---|---|",
        f"| {count} | {same_text} | {sum(a['correct'] for a in mine)} | {sum(t.flexible for t in theirs)} | {sum(t.strict for t in theirs)} | "
        f"{agreement:.1%} | {sum(a['finish'] == 'truncated' for a in mine)} |",
        "",
    ]
    if differences:
        lines += ["| question | gold | ours | theirs | why |", "|---|---|---|---|---|"]
    for place, answer, their, why in differences:
        verdicts = " | ".join("right" if right else "wrong" for right in (answer["correct"], their.flexible))
        lines.append(f"| {place} | {answer['gold']} | {verdicts} | {why or 'NOT EXPLAINED'} |")
    return [*lines, ""], agreement, sum(not why for *_, why in differences)


def main() -> int:
    """Run both and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--lm-eval-python", required=True, help="interpreter of the environment with lm-eval and reasoning-gym"
    )
    parser.add_argument("--gsm8k", required=True, type=Path, help="gsm8k_test.jsonl")
    parser.add_argument("--model", type=Path, help="checkpoint folder [default: SmolLM2-135M-Instruct]")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="most new tokens of an answer")
    parser.add_argument("--batch", type=int, default=8, help="batch size of lm-evaluation-harness")
    parser.add_argument("--work", type=Path, default=Path("lm-eval-work"), help="folder for everything that is made")
    parser.add_argument("--out", type=Path, default=Path("lm-eval.md"))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ["SCALERL_HOME"] = str(work / "home")
    from scalerl.data import smollm2

    model = arguments.model.resolve() if arguments.model else smollm2.converted()
    files = {"gsm8k": work / "gsm8k.jsonl", "sums": work / "sums.jsonl"}
    with arguments.gsm8k.open() as handle:
        files["gsm8k"].write_text("".join(line for _, line in zip(range(arguments.questions), handle, strict=False)))
    command = [arguments.lm_eval_python, "-c", SUMS, str(arguments.questions)]
    files["sums"].write_text(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
    mine = ours(model, files, arguments.tokens)
    theirs = lm_eval(arguments.lm_eval_python, model, files, work, arguments.tokens, arguments.batch)
    gaps = Gaps(model)
    lines = [
        "# Verdicts of two harnesses",
        "",
        f"{model.name}, greedy, fp32, zero-shot, at most {arguments.tokens} new tokens; prompt `Question: ...\\nAnswer:` on both sides.",
        "",
    ]
    failed = False
    for name in files:
        table, agreement, unexplained = compare(name, mine[name], theirs[name], gaps)
        lines += table
        failed |= agreement < LEAST_AGREEMENT or unexplained > 0
    arguments.out.write_text("\n".join(lines))
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
