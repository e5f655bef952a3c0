"""Preparation of a data set: read, reject with reasons, hold out, check, and only then publish.

The folder of a data set is named by its content: the data section of the recipe, the seed, and the hashes of the files read. It appears in one rename, with
`record.json` inside, so it is whole or absent. No row is lost: what does not enter training or holdout lies in `rejected.parquet` with its reason.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalerl import home, streams
from scalerl.data import arithmetic, overlap, sources
from scalerl.data.prompt import Prompt, make_prompt, schema
from scalerl.data.render import render_text
from scalerl.recipe import Recipe, digest
from scalerl.rewards.verifier import Verifier
from warehouse import files, writer
from warehouse.errors import UserError

# Raised when preparation gives other rows for the same input: old data sets then keep their names and new ones are new.
CODE_VERSION = 1
RECORD = "record.json"
# Prompts that share a telling word run with a benchmark are held out, never trained on; more than this share of the holdout would bend it.
_MOST_SUSPECTS = 0.1


@dataclass(frozen=True)
class DatasetRecord:
    """What was made: `record.json` of the data set's folder."""

    dataset_id: str
    source: str
    path: str
    sha256: str
    seed: int
    train_rows: int
    holdout_rows: int
    rejected_rows: int
    unused_rows: int
    rejected_reasons: dict[str, int]
    near_copies: int
    held_out_suspects: int
    longest_prompt_tokens: int | None
    checks: int
    recipe_data: dict[str, Any]
    at: str


@dataclass(frozen=True)
class _Candidate:
    line: int
    prompt: Prompt


@dataclass
class _Sorted:
    """The rows on their way: what stays, and what was rejected with its reason."""

    kept: list[_Candidate]
    rejected: list[tuple[_Candidate, str]]

    def reject(self, reasons: dict[int, str]) -> None:
        """Move the rows at these positions of `kept` to the rejected ones."""
        self.rejected += [(self.kept[index], reason) for index, reason in sorted(reasons.items())]
        self.kept = [row for index, row in enumerate(self.kept) if index not in reasons]


def dataset_key(recipe: Recipe) -> str:
    """Return the id of the data set that a recipe asks for: source and 16 hex digits.

    They depend on the data section (paths replaced by the files' SHA-256), the seed, the verifier, what decides a prompt's length in tokens, and the code's
    version. Raises UserError for a missing file.
    """
    data = recipe.data.model_dump(mode="json", exclude={"path", "decontaminate"})
    content = {"code": CODE_VERSION, "seed": recipe.seed, "data": data, "verifier": recipe.reward.verifier}
    if recipe.data.source != "arithmetic":
        path = _source_path(recipe)
        content |= {
            "file": _sha256(path),
            "benchmarks": [_sha256(benchmark) for benchmark in _benchmark_paths(recipe)],
            "model": [recipe.model.kind, recipe.model.path],
            "template": recipe.rollout.model_dump(include={"prompt_template", "system_prompt", "think_in_prompt"}),
        }
    return f"{recipe.data.source}-{digest(content)}"


def prepare(
    recipe: Recipe, folder: Path, tokenizer: Any = None, *, warehouse_root: Path | None = None
) -> DatasetRecord:
    """Make train.parquet, holdout.parquet, rejected.parquet and record.json in `folder`; a finished folder is left as it is.

    `tokenizer` measures prompt lengths; None takes the recipe's model's, and where the recipe names no model lengths go unchecked. Rows of the tables
    `datasets` and `validations` go to `warehouse_root` (default: the home's). Raises UserError for missing or malformed input, too few rows, or a data
    set that fails its checks; nothing is published then.
    """
    if (folder / RECORD).is_file():
        return DatasetRecord(**files.read_json(folder / RECORD))
    dataset_id = dataset_key(recipe)
    rows = _Sorted(_candidates(recipe), [])
    longest = _reject(rows, recipe, tokenizer)
    train, holdout, unused, near, suspects = _split(rows, recipe)
    from warehouse.expectations import validate_dataset

    checks = validate_dataset([row.to_dict() for row in train], [row.to_dict() for row in holdout])
    path = str(_source_path(recipe)) if recipe.data.source != "arithmetic" else ""
    record = DatasetRecord(
        dataset_id=dataset_id,
        source=recipe.data.source,
        path=path,
        sha256=_sha256(Path(path)) if path else "",
        seed=recipe.seed,
        train_rows=len(train),
        holdout_rows=len(holdout),
        rejected_rows=len(rows.rejected),
        unused_rows=unused,
        rejected_reasons=dict(Counter(reason.split(":")[0] for _, reason in rows.rejected)),
        near_copies=near,
        held_out_suspects=suspects,
        longest_prompt_tokens=longest,
        checks=len(checks),
        recipe_data=recipe.data.model_dump(mode="json"),
        at=datetime.now(UTC).isoformat(),
    )
    _store(record, checks, warehouse_root or home.warehouse_root())
    failed = [check for check in checks if not check.success]
    if failed:
        first = failed[0]
        raise UserError(
            f"data: {len(failed)} of {len(checks)} checks failed, first {first.expectation} on {first.column}: {first.detail or first.unexpected_examples}; "
            "nothing was published, see table validations"
        )
    _publish(folder, record, train, holdout, rows.rejected)
    return record


def load_prompts(folder: Path, split: str) -> list[Prompt]:
    """Return the prompts of "train" or "holdout" in the order of the file; raises UserError where the data set is not finished."""
    import pyarrow.parquet as pq

    if not (folder / RECORD).is_file():
        raise UserError(f"data: {folder} holds no finished data set; run `scalerl prepare` first")
    return [Prompt.from_dict(row) for row in pq.read_table(folder / f"{split}.parquet").to_pylist()]


def _candidates(recipe: Recipe) -> list[_Candidate]:
    data = recipe.data
    if data.source == "arithmetic":
        existing = (9 * 10 ** (data.digits - 1)) ** data.terms
        if not data.train and existing > 1_000_000:
            raise UserError(f"data: {existing} different sums exist; say with data.train how many to train on")
        count = data.holdout + data.train if data.train else existing
        return [
            _Candidate(index, prompt)
            for index, prompt in enumerate(arithmetic.prompts(data.terms, data.digits, count, recipe.seed), 1)
        ]
    return [
        _Candidate(row.line, make_prompt(row.problem, row.answer, source=data.source, difficulty=row.difficulty))
        for row in sources.read(_source_path(recipe), data.source)
    ]


def _reject(rows: _Sorted, recipe: Recipe, tokenizer: Any) -> int | None:
    """Reject what cannot be trained on; returns the longest prompt in tokens, None where no tokenizer was at hand."""
    rows.reject(
        {
            index: "empty problem" if not row.prompt.problem else "empty answer"
            for index, row in enumerate(rows.kept)
            if not row.prompt.problem or not row.prompt.answer
        }
    )
    rows.reject(_duplicates(rows.kept))
    lengths = _lengths([row.prompt for row in rows.kept], recipe, tokenizer)
    limit = recipe.data.max_prompt_tokens
    if lengths is not None:
        rows.reject(
            {
                index: f"too long: {length} tokens, limit {limit}"
                for index, length in enumerate(lengths)
                if length > limit
            }
        )
    with Verifier(recipe.reward) as verifier:
        problems = verifier.gold_problems([row.prompt.answer for row in rows.kept])
    rows.reject(
        {index: f"answer cannot be checked: {problem}" for index, problem in enumerate(problems) if problem is not None}
    )
    return max((length for length in lengths if length <= limit), default=0) if lengths is not None else None


def _duplicates(kept: Sequence[_Candidate]) -> dict[int, str]:
    first: dict[str, _Candidate] = {}
    reasons: dict[int, str] = {}
    for index, row in enumerate(kept):
        earlier = first.setdefault(row.prompt.prompt_id, row)
        if earlier is not row:
            other = "" if earlier.prompt.answer == row.prompt.answer else ", with another answer"
            reasons[index] = f"duplicate: of line {earlier.line}{other}"
    return reasons


def _lengths(prompts: Sequence[Prompt], recipe: Recipe, tokenizer: Any) -> list[int] | None:
    if recipe.data.source == "arithmetic" and tokenizer is None:
        marks = 1 + recipe.rollout.think_in_prompt  # <bos> and <think>
        return [len(arithmetic.encode(prompt.problem)) + marks for prompt in prompts]
    tokenizer = tokenizer if tokenizer is not None else _model_tokenizer(recipe)
    if tokenizer is None or not prompts:
        return None
    texts = [render_text(prompt, tokenizer, recipe.rollout) for prompt in prompts]
    plain = recipe.rollout.prompt_template == "plain"
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=plain).input_ids]


def _model_tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer of the recipe's model, or None where `model.path` is empty."""
    if recipe.model.kind == "folder" and not recipe.model.path:
        return None
    from transformers import AutoTokenizer

    if recipe.model.kind == "smollm2":
        from scalerl.data import smollm2

        return AutoTokenizer.from_pretrained(smollm2.converted())
    folder = Path(recipe.model.path).expanduser()
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"model.path = {folder}: no tokenizer in this folder; name a Hugging Face checkpoint folder")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _split(rows: _Sorted, recipe: Recipe) -> tuple[list[Prompt], list[Prompt], int, int, int]:
    """Return training prompts, held-out prompts, how many were left over, the near-copies and the held-out suspects.

    The holdout is drawn at random from problems without a near-copy (near-copies all go to training, so no problem stands on both sides). Prompts that
    share a telling run of words with a benchmark are held out first: they may be asked, never trained on.
    """
    data = recipe.data
    suspects, near = set(), [*range(len(rows.kept))]
    if data.source != "arithmetic":
        suspects = _decontaminate(rows, recipe)
        near = overlap.near_copies([row.prompt.problem for row in rows.kept])
    size = Counter(near)
    alone = [index for index, cluster in enumerate(near) if size[cluster] == 1 and index not in suspects]
    order = streams.generator(recipe.seed, "data", "holdout").permutation(len(alone)).tolist()
    needed = data.holdout - len(suspects)
    if needed > len(alone) or data.holdout + data.train > len(rows.kept):
        raise UserError(
            f"data: {data.holdout} held-out and {data.train or 'all other'} training prompts asked for, but only {len(rows.kept)} usable rows "
            f"({len(alone) + len(suspects)} fit to be held out; {len(rows.rejected)} rejected); lower data.holdout or data.train"
        )
    held = suspects | {alone[index] for index in order[:needed]}
    rest = [index for index in range(len(rows.kept)) if index not in held]
    if not rest:
        raise UserError(
            f"data: all {len(held)} usable rows are held out and none is left to train on; lower data.holdout"
        )
    if data.train and len(rest) > data.train:
        keep = streams.generator(recipe.seed, "data", "train").permutation(len(rest))[: data.train]
        unused = len(rest) - data.train
        rest = [rest[position] for position in sorted(keep.tolist())]
    else:
        unused = 0
    train = [rows.kept[index].prompt for index in rest]
    holdout = [_held_out(rows.kept[index].prompt) for index in sorted(held)]
    return train, holdout, unused, sum(count for count in size.values() if count > 1), len(suspects)


def _decontaminate(rows: _Sorted, recipe: Recipe) -> set[int]:
    """Reject copies of benchmark problems; return the positions of prompts that only share a telling run of words with one."""
    paths = _benchmark_paths(recipe)
    if not paths:
        return set()
    problems = [row.prompt.problem for row in rows.kept]
    benchmark = [problem for path in paths for problem in sources.problems(path)]
    copies, sharing = overlap.contaminated(problems, benchmark)
    most = int(_MOST_SUSPECTS * recipe.data.holdout)
    surplus = sorted(sharing)[most:]
    reasons = {index: "contaminated: equals a benchmark problem" for index in copies}
    reasons |= {
        index: f"contaminated: shares {overlap.WORDS} words in a row with a benchmark problem" for index in surplus
    }
    suspects = {rows.kept[index].line for index in sharing if index not in reasons}
    rows.reject(reasons)
    return {index for index, row in enumerate(rows.kept) if row.line in suspects}


def _held_out(prompt: Prompt) -> Prompt:
    return Prompt(**{**asdict(prompt), "split": "holdout", "messages": prompt.messages})


def _source_path(recipe: Recipe) -> Path:
    if not recipe.data.path:
        raise UserError(
            f"data.path is empty; name the file of data.source = {recipe.data.source}, for example --path prompts.jsonl"
        )
    path = Path(recipe.data.path).expanduser()
    if not path.is_file():
        raise UserError(
            f"data.path = {recipe.data.path}: no such file; paths are taken from the current folder {Path.cwd()}"
        )
    return path.resolve()


def _benchmark_paths(recipe: Recipe) -> list[Path]:
    """Return the benchmark files, each looked for in the current folder and then beside the data file."""
    beside = _source_path(recipe).parent
    found = []
    for name in recipe.data.decontaminate:
        candidates = [Path(name).expanduser(), beside / name]
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            raise UserError(
                f"data.decontaminate names {name}, found neither in {Path.cwd()} nor in {beside}; put it there, or drop it from the list"
            )
        found.append(path.resolve())
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _store(record: DatasetRecord, checks: Sequence[Any], root: Path) -> None:
    """Append the rows of `datasets` and `validations`; a repeated preparation only repeats row keys."""
    import json

    now = datetime.fromisoformat(record.at)
    row = {name: getattr(record, name) for name in ("dataset_id", "source", "path", "sha256", "seed")}
    row |= {name: getattr(record, name) for name in ("train_rows", "holdout_rows", "rejected_rows")}
    row |= {"recipe_data": json.dumps(record.recipe_data, sort_keys=True), "at": now}
    writer.append(root, "datasets", "_", [row])
    validations = [
        {
            "dataset_id": record.dataset_id,
            "suite": check.suite,
            "expectation": check.expectation,
            "column": check.column,
            "success": check.success,
            "unexpected_count": check.unexpected_count,
            "examples": list(check.unexpected_examples),
            "detail": check.detail,
            "at": now,
        }
        for check in checks
    ]
    if validations:
        writer.append(root, "validations", "_", validations)


def _publish(
    folder: Path,
    record: DatasetRecord,
    train: Sequence[Prompt],
    holdout: Sequence[Prompt],
    rejected: Sequence[tuple[_Candidate, str]],
) -> None:
    import os
    import shutil

    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, prompts in (("train", train), ("holdout", holdout)):
            table = pa.Table.from_pylist([prompt.to_dict() for prompt in prompts], schema=schema())
            pq.write_table(table, temporary / f"{name}.parquet")
        reasons = [
            {
                "line": row.line,
                "problem": row.prompt.problem,
                "answer": row.prompt.answer,
                "difficulty": row.prompt.difficulty,
                "reason": reason,
            }
            for row, reason in sorted(rejected, key=lambda pair: pair[0].line)
        ]
        columns = [("line", pa.int64())] + [
            (name, pa.string()) for name in ("problem", "answer", "difficulty", "reason")
        ]
        pq.write_table(pa.Table.from_pylist(reasons, schema=pa.schema(columns)), temporary / "rejected.parquet")
        files.write_json(temporary / RECORD, asdict(record))
        files.publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
