"""What a piece of a data set is worth, found out wherever the piece is sent: its rows as prompts, their lengths, what they share with benchmarks and with each other.

A piece's prompts and letter runs are written to files in a work folder, and only `Facts` come back: a few hundred bytes a row, whatever the length of its problem and
tests. So neither the caller nor a worker ever holds more than a piece, and the answer does not depend on who did what.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.data import arithmetic, overlap, sources
from scalerl.data.prompt import Prompt, make_prompt, matching_text, schema
from scalerl.data.render import render_text
from scalerl.recipe import GENERATED, TINY, Recipe
from scalerl.rewards.lending import lent

# Rows of a piece: some seconds of reading for Math-Verify.
ROWS_PER_PIECE = 2000
# Letter runs that one bucket holds, about: 8 MB of them and some 50 MB of pairs.
RUNS_PER_BUCKET = 1_000_000


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a row: its piece and place in it (from 0), its line in the source (from 1), and what decides its fate.

    `text` is the key of its text as compared with others, `gold` of what it is judged by, `hits` the numbers of the benchmark's word runs in it. `tokens` is its
    length, None where it was not measured; `unusable` says why it cannot be judged ("" where it can).
    """

    piece: int
    place: int
    line: int
    prompt_id: str
    answer: str
    gold: str
    text: str
    hits: tuple[int, ...]
    runs: int
    tokens: int | None
    unusable: str


@dataclass(frozen=True)
class Job:
    """What every piece is looked at with. `file` names the source in complaints; `tokenizer` measures lengths, None leaves them."""

    recipe: Recipe
    file: Path
    tokenizer: Any
    benchmark: overlap.Benchmark


@dataclass(frozen=True)
class Task:
    """A piece on its way: its number, its rows as the source holds them (or (line, prompt, why not) of prompts that are made already), the folder with the job."""

    folder: Path
    number: int
    content: "sources.Piece | Sequence[tuple[int, Prompt, str]]"


def start(folder: Path, job: Job) -> None:
    """Write the job into an empty work folder."""
    folder.mkdir(parents=True)
    (folder / "job.pickle").write_bytes(pickle.dumps(job))


@lru_cache(maxsize=2)
def _job(folder: Path) -> Job:
    job: Job = pickle.loads((folder / "job.pickle").read_bytes())
    return job


def look(task: Task) -> list[Facts]:
    """Read a piece, write its prompts and letter runs, and return the facts of its rows, in order. Raises UserError for a malformed row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    job = _job(task.folder)
    found = list(_prompts(task, job))
    lengths = _lengths([prompt for _, prompt, unusable in found if not unusable], job)
    facts = []
    compared = job.recipe.data.source not in GENERATED
    runs: list[np.ndarray] = []
    for place, (line, prompt, unusable) in enumerate(found):
        own = overlap.letter_runs(matching_text(prompt.problem)) if compared else np.zeros(0, np.uint64)
        runs.append(own)
        facts.append(
            Facts(
                piece=task.number,
                place=place,
                line=line,
                prompt_id=prompt.prompt_id,
                answer=overlap.text_key(prompt.answer),
                gold=overlap.text_key(prompt.gold),
                text=overlap.text_key(comparable_text(prompt)),
                hits=job.benchmark.hits(prompt.problem) if compared else (),
                runs=len(own),
                tokens=None if unusable or lengths is None else next(lengths),
                unusable=unusable,
            )
        )
    table = pa.Table.from_pylist([prompt.to_dict() for _, prompt, _ in found], schema=schema())
    pq.write_table(table, task.folder / f"{task.number}.parquet")
    if compared:
        _write_runs(task, runs)
    return facts


def _prompts(task: Task, job: Job) -> Iterator[tuple[int, Prompt, str]]:
    """Yield (line, prompt, why it cannot be used) of every row."""
    data = job.recipe.data
    if not isinstance(task.content, sources.Piece):
        yield from task.content
        return
    for row in sources.rows(task.content, job.file, data.source):
        prompt = make_prompt(
            row.problem,
            row.answer,
            source=data.source,
            task=data.task_name,
            difficulty=row.difficulty,
            tests=row.tests,
        )
        unusable = row.unusable
        if not unusable and not (prompt.problem.strip() and prompt.gold.strip()):
            unusable = "empty answer" if prompt.problem.strip() else "empty problem"
        yield row.line, prompt, unusable


def comparable_text(prompt: Prompt) -> str:
    """Return the form in which two problems are compared. Two sums differ in more than their digits: 1+23 and 12+3 are no copies."""
    return prompt.problem if prompt.source in GENERATED else matching_text(prompt.problem)


def _lengths(prompts: Sequence[Prompt], job: Job) -> Iterator[int] | None:
    rollout = job.recipe.rollout
    if job.tokenizer is None:
        if job.recipe.data.source not in TINY:
            return None
        marks = 1 + rollout.think_in_prompt  # <bos> and <think>
        return (len(arithmetic.encode(prompt.problem)) + marks for prompt in prompts)
    if not prompts:
        return iter(())
    texts = [render_text(prompt, job.tokenizer, rollout) for prompt in prompts]
    ids = job.tokenizer(texts, add_special_tokens=rollout.prompt_template == "plain").input_ids
    return (len(row) for row in ids)


def read_prompts(folder: Path, number: int) -> list[Prompt]:
    """Return the prompts of a piece that has been looked at."""
    import pyarrow.parquet as pq

    return [Prompt.from_dict(row) for row in pq.read_table(folder / f"{number}.parquet").to_pylist()]


def kinds(wanted: tuple[Path, int, tuple[int, ...]]) -> list[str]:
    """Say of the rows at these places of a piece how the verifier can compare against their answers (`Verifier.gold_kinds`).

    The verifier's processes stay for the next piece; whoever sent the pieces ends them (`lending.release`).
    """
    folder, number, places = wanted
    prompts = read_prompts(folder, number)
    with lent(_job(folder).recipe.reward) as verifier:
        return verifier.gold_kinds([prompts[place].gold for place in places])


def _write_runs(task: Task, runs: Sequence[np.ndarray]) -> None:
    """Write the letter runs of a piece by number, so that a bucket finds its own in one stretch."""
    hashes = np.concatenate([*runs, np.zeros(0, np.uint64)])
    rows = np.repeat(np.arange(len(runs), dtype=np.int32), [len(own) for own in runs])
    order = np.argsort(hashes, kind="stable")
    np.save(task.folder / f"{task.number}.hashes.npy", hashes[order])
    np.save(task.folder / f"{task.number}.rows.npy", rows[order])


def pairs_of_bucket(wanted: tuple[Path, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Count the letter runs that rows share, for the runs of one bucket: (work folder, number of the bucket, its bits, pieces).

    `kept.npy` in the folder holds for every row its number among the rows that are compared, -1 for the others, `offsets.npy` where each piece's rows begin in it. Returns what `overlap.shared_pairs` does.
    """
    folder, bucket, bits, pieces = wanted
    numbers = np.load(folder / "kept.npy", mmap_mode="r")
    low = bucket << (64 - bits)
    hashes, rows = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    offsets = np.load(folder / "offsets.npy")
    for piece in range(pieces):
        own = np.load(folder / f"{piece}.hashes.npy", mmap_mode="r")
        begin = int(np.searchsorted(own, np.uint64(low)))
        last = bucket + 1 == 1 << bits
        end = len(own) if last else int(np.searchsorted(own, np.uint64(low + (1 << (64 - bits)))))
        members = numbers[offsets[piece] + np.load(folder / f"{piece}.rows.npy", mmap_mode="r")[begin:end]]
        hashes.append(own[begin:end][members >= 0])
        rows.append(members[members >= 0])
    return overlap.shared_pairs(np.concatenate(hashes), np.concatenate(rows))


def bucket_bits(runs: int) -> int:
    """Return how many leading bits of a run's number name its bucket (at least 1)."""
    return max(1, (runs // RUNS_PER_BUCKET).bit_length())


def held_out(prompt: Prompt) -> Prompt:
    """Return the prompt as a held-out one."""
    return replace(prompt, split="holdout")
