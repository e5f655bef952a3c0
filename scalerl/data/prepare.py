"""Preparation of a data set: read, reject with reasons, hold out, check, and only then publish.

The folder of a data set is named by its content: the data section of the recipe, the seed, and the hashes of the files read. It appears in one rename, with
`record.json` inside, so it is whole or absent. No row is lost: what does not enter training or holdout lies in `rejected.parquet` with its reason.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalerl import home
from scalerl.data import arithmetic, sources
from scalerl.data.prompt import Prompt, make_prompt, matching_text, schema
from scalerl.data.render import render_text
from scalerl.data.split import Candidate, Parts, Sifted, split
from scalerl.recipe import Recipe, digest
from scalerl.rewards.verifier import Verifier
from warehouse import files, writer
from warehouse.errors import UserError
from warehouse.expectations import Check, require, validate_dataset

# Raised when preparation gives other rows for the same input: old data sets then keep their names and new ones are new.
CODE_VERSION = 1
RECORD = "record.json"
_CHECKABLE = ("expression", "text")


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
    text_answers: int
    held_out_suspects: int
    longest_prompt_tokens: int | None
    checks: int
    recipe_data: dict[str, Any]
    at: str

    def to_text(self) -> str:
        """Return the record as lines for a person."""
        reasons = "".join(f"\n  {reason:<20} {count}" for reason, count in sorted(self.rejected_reasons.items()))
        unused = f" ({self.unused_rows} more usable, not asked for)" if self.unused_rows else ""
        longest = (
            "not measured (the recipe names no model)"
            if self.longest_prompt_tokens is None
            else self.longest_prompt_tokens
        )
        lines = (
            ("data set", self.dataset_id),
            ("train rows", f"{self.train_rows}{unused}"),
            ("holdout rows", f"{self.holdout_rows} (of them {self.held_out_suspects} share 13 words with a benchmark)"),
            ("rejected rows", f"{self.rejected_rows}{reasons}"),
            ("near-copies", f"{self.near_copies} rows, all in train"),
            ("compared as text", f"{self.text_answers} answers are no expression and must be met letter by letter"),
            ("longest prompt", longest),
            ("checks passed", self.checks),
        )
        return "\n".join(f"{name:<22} {value}" for name, value in lines)


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
    rows = Sifted(_candidates(recipe))
    kinds = _reject(rows, recipe, tokenizer)
    benchmark = [problem for path in _benchmark_paths(recipe) for problem in sources.problems(path)]
    parts = split(rows, recipe.data, recipe.seed, benchmark)
    checks = _validate(parts, recipe, benchmark, kinds)
    path = str(_source_path(recipe)) if recipe.data.source != "arithmetic" else ""
    record = DatasetRecord(
        dataset_id=dataset_id,
        source=recipe.data.source,
        path=path,
        sha256=_sha256(Path(path)) if path else "",
        seed=recipe.seed,
        train_rows=len(parts.train),
        holdout_rows=len(parts.holdout),
        rejected_rows=len(rows.rejected),
        unused_rows=parts.unused,
        rejected_reasons=dict(Counter(reason.split(":")[0] for _, reason in rows.rejected)),
        near_copies=parts.near_copies,
        text_answers=sum(kinds[row.prompt.answer] == "text" for row in parts.train + parts.holdout),
        held_out_suspects=parts.suspects,
        longest_prompt_tokens=max(
            (row.tokens for row in parts.train + parts.holdout if row.tokens is not None), default=None
        ),
        checks=len(checks),
        recipe_data=recipe.data.model_dump(mode="json"),
        at=datetime.now(UTC).isoformat(),
    )
    _store(record, checks, warehouse_root or home.warehouse_root())
    require(checks, f"data set {dataset_id}")
    _publish(folder, record, parts, rows.rejected)
    return record


def load_prompts(folder: Path, split: str) -> list[Prompt]:
    """Return the prompts of "train" or "holdout" in the order of the file; raises UserError where the data set is not finished."""
    import pyarrow.parquet as pq

    if not (folder / RECORD).is_file():
        raise UserError(f"data: {folder} holds no finished data set; run `scalerl prepare` first")
    return [Prompt.from_dict(row) for row in pq.read_table(folder / f"{split}.parquet").to_pylist()]


def _candidates(recipe: Recipe) -> list[Candidate]:
    data = recipe.data
    if data.source == "arithmetic":
        existing = (9 * 10 ** (data.digits - 1)) ** data.terms
        if not data.train and existing > 1_000_000:
            raise UserError(f"data: {existing} different sums exist; say with data.train how many to train on")
        count = data.holdout + data.train if data.train else existing
        return [
            Candidate(index, prompt)
            for index, prompt in enumerate(arithmetic.prompts(data.terms, data.digits, count, recipe.seed), 1)
        ]
    return [
        Candidate(row.line, make_prompt(row.problem, row.answer, source=data.source, difficulty=row.difficulty))
        for row in sources.read(_source_path(recipe), data.source)
    ]


def _reject(rows: Sifted, recipe: Recipe, tokenizer: Any) -> dict[str, str]:
    """Reject what cannot be trained on; returns for every answer read how it can be compared against (`Verifier.gold_kinds`)."""
    rows.reject(
        {
            index: "empty problem" if not row.prompt.problem.strip() else "empty answer"
            for index, row in enumerate(rows.kept)
            if not row.prompt.problem.strip() or not row.prompt.answer.strip()
        }
    )
    rows.reject(_duplicates(rows.kept))
    limit = recipe.data.max_prompt_tokens
    rows.measure(_lengths([row.prompt for row in rows.kept], recipe, tokenizer))
    rows.reject(
        {
            index: f"too long: {row.tokens} tokens, limit {limit}"
            for index, row in enumerate(rows.kept)
            if row.tokens is not None and row.tokens > limit
        }
    )
    answers = [row.prompt.answer for row in rows.kept]
    with Verifier(recipe.reward) as verifier:
        kinds = dict(zip(answers, verifier.gold_kinds(answers), strict=True))
    rows.reject(
        {index: f"answer: {kinds[answer]}" for index, answer in enumerate(answers) if kinds[answer] not in _CHECKABLE}
    )
    return kinds


def _validate(parts: Parts, recipe: Recipe, benchmark: Sequence[str], kinds: Mapping[str, str]) -> list[Check]:
    """Check what is about to be published; nothing is taken over from the sifting but what is slow, lengths and readable answers."""
    known = {matching_text(problem) for problem in benchmark}

    def checked(row: Candidate) -> dict[str, Any]:
        # Two sums differ in more than their digits: 1+23 and 12+3 are no copies.
        problem = row.prompt.problem
        text = problem if recipe.data.source == "arithmetic" else matching_text(problem)
        extra = {"matching_text": text, "contaminated": matching_text(problem) in known}
        extra["answer_parses"] = kinds.get(row.prompt.answer) in _CHECKABLE
        tokens = {"prompt_tokens": row.tokens} if row.tokens is not None else {}
        return row.prompt.to_dict() | extra | tokens

    train, holdout = [checked(row) for row in parts.train], [checked(row) for row in parts.holdout]
    return validate_dataset(
        train,
        holdout,
        train_rows=recipe.data.train or None,
        holdout_rows=recipe.data.holdout,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )


def _duplicates(kept: Sequence[Candidate]) -> dict[int, str]:
    first: dict[str, Candidate] = {}
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
    """Return the benchmark files, each looked for in the current folder and then beside the data file; none for generated prompts."""
    if recipe.data.source == "arithmetic":
        return []
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


def _store(record: DatasetRecord, checks: Sequence[Check], root: Path) -> None:
    """Append the rows of `datasets` and `validations`; a repeated preparation only repeats row keys."""
    import json

    now = datetime.fromisoformat(record.at)
    row = {name: getattr(record, name) for name in ("dataset_id", "source", "path", "sha256", "seed")}
    row |= {name: getattr(record, name) for name in ("train_rows", "holdout_rows", "rejected_rows")}
    row |= {"recipe_data": json.dumps(record.recipe_data, sort_keys=True), "at": now}
    writer.append(root, "datasets", "_", [row])
    validations = [check.row(record.dataset_id) | {"at": now} for check in checks]
    if validations:
        writer.append(root, "validations", "_", validations)


def _publish(
    folder: Path,
    record: DatasetRecord,
    parts: Parts,
    rejected: Sequence[tuple[Candidate, str]],
) -> None:
    import os
    import shutil

    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, members in (("train", parts.train), ("holdout", parts.holdout)):
            table = pa.Table.from_pylist([row.prompt.to_dict() for row in members], schema=schema())
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
