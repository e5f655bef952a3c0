"""Preparation of a data set: read, reject with reasons, hold out, check, and only then publish.

The folder of a data set is named by its content: the data section of the recipe, the seed, and the hashes of the files read. It appears in one rename, with
`record.json` inside, so it is whole or absent. No row is lost: what does not enter training or holdout lies in `rejected.parquet` with its reason.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from scalerl import home
from scalerl.cluster import spread
from scalerl.data import arithmetic, sources, tiny_code
from scalerl.data.prompt import Prompt, make_prompt, matching_text, schema
from scalerl.data.render import render_text
from scalerl.data.split import Candidate, Parts, Sifted, split
from scalerl.recipe import GENERATED, Data, Recipe, Reward, digest
from scalerl.rewards.verifier import Verifier
from warehouse import files, writer
from warehouse.errors import UserError
from warehouse.expectations import Check, require, validate_dataset

# Raised when preparation gives other rows for the same input: old data sets then keep their names and new ones are new.
CODE_VERSION = 1
RECORD = "record.json"
# Half a minute of reading for Math-Verify.
ANSWERS_PER_PIECE = 5000
_CHECKABLE = ("expression", "text", "tests")


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
    tasks: dict[str, dict[str, int]] = field(default_factory=dict)  # task -> rows of train and holdout

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
            *(
                (f"  task {task}", f"{rows['train']} train, {rows['holdout']} holdout")
                for task, rows in self.tasks.items()
                if len(self.tasks) > 1
            ),
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
    if recipe.data.mixture:
        return f"mixture-{digest([dataset_key(part) for part in _parts(recipe)])}"
    data = recipe.data.model_dump(mode="json", exclude={"path", "decontaminate", "mixture"})
    if not data["task"]:
        del data["task"]
    content = {"code": CODE_VERSION, "seed": recipe.seed, "data": data, "verifier": recipe.reward.verifier}
    if recipe.data.source not in GENERATED:
        path = _source_path(recipe)
        content |= {
            "file": _sha256(path),
            "benchmarks": [_sha256(benchmark) for benchmark in _benchmark_paths(recipe)],
            "model": [recipe.model.kind, recipe.model.path],
            "template": recipe.rollout.model_dump(include={"prompt_template", "system_prompt", "think_in_prompt"}),
        }
    return f"{recipe.data.source}-{digest(content)}"


def _parts(recipe: Recipe) -> list[Recipe]:
    """Return the recipe once for every source of its data, each with that source alone; raises UserError naming a mixture's entry without its file."""
    if not recipe.data.mixture:
        return [recipe]
    alone = []
    for number, part in enumerate(recipe.data.mixture):
        data = Data(**part.model_dump(exclude={"weight"}) | {"task": part.task_name})
        alone.append(recipe.model_copy(update={"data": data}))
        if part.source not in GENERATED:
            try:
                _source_path(alone[-1])
            except UserError as error:
                raise UserError(
                    f"data.mixture.{number} (task {part.task_name}): {error}; set data.mixture.{number}.path"
                ) from None
    return alone


@dataclass
class _Sifting:
    """One source on its way: its rows, how they were split, how each answer can be compared against, and the benchmark problems looked for."""

    recipe: Recipe
    rows: Sifted
    parts: Parts
    kinds: dict[str, str]
    benchmark: list[str]


def _sift(recipe: Recipe, tokenizer: Any) -> _Sifting:
    rows = Sifted(_candidates(recipe))
    kinds = _reject(rows, recipe, tokenizer)
    benchmark = [problem for path in _benchmark_paths(recipe) for problem in sources.problems(path)]
    return _Sifting(recipe, rows, split(rows, recipe.data, recipe.seed, benchmark), kinds, benchmark)


def _without_leaks(sifted: Sequence[_Sifting]) -> None:
    """Reject training prompts of one source whose text another source holds out."""
    held = [{_text(row): part.recipe.data.task_name for row in part.parts.holdout} for part in sifted]
    for number, part in enumerate(sifted):
        others = {text: task for other, texts in enumerate(held) if other != number for text, task in texts.items()}
        leaks = [row for row in part.parts.train if _text(row) in others]
        part.rows.rejected += [(row, f"held out: by the task {others[_text(row)]}") for row in leaks]
        kept = [row for row in part.parts.train if _text(row) not in others]
        part.parts = replace(part.parts, train=kept)


def _text(row: Candidate) -> str:
    """The form in which two problems are compared. Two sums differ in more than their digits: 1+23 and 12+3 are no copies."""
    problem = row.prompt.problem
    return problem if row.prompt.source in GENERATED else matching_text(problem)


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
    sifted = [_sift(part, tokenizer) for part in _parts(recipe)]
    _without_leaks(sifted)
    checks = _validate(sifted, recipe)
    record = _record(dataset_id, sifted, recipe, len(checks))
    _store(record, checks, warehouse_root or home.warehouse_root())
    require(checks, f"data set {dataset_id}")
    _publish(folder, record, sifted)
    return record


def _record(dataset_id: str, sifted: Sequence[_Sifting], recipe: Recipe, checks: int) -> DatasetRecord:
    rejected = [pair for part in sifted for pair in part.rows.rejected]
    both = [row for part in sifted for row in (*part.parts.train, *part.parts.holdout)]
    paths = [str(_source_path(part.recipe)) for part in sifted if part.recipe.data.source not in GENERATED]
    sums = [_sha256(Path(path)) for path in paths]
    return DatasetRecord(
        dataset_id=dataset_id,
        source="mixture" if recipe.data.mixture else recipe.data.source,
        path=", ".join(paths),
        sha256=", ".join(sums),
        seed=recipe.seed,
        train_rows=sum(len(part.parts.train) for part in sifted),
        holdout_rows=sum(len(part.parts.holdout) for part in sifted),
        rejected_rows=len(rejected),
        unused_rows=sum(part.parts.unused for part in sifted),
        rejected_reasons=dict(Counter(reason.split(":")[0] for _, reason in rejected)),
        near_copies=sum(part.parts.near_copies for part in sifted),
        text_answers=sum(
            part.kinds[row.prompt.gold] == "text" for part in sifted for row in part.parts.train + part.parts.holdout
        ),
        held_out_suspects=sum(part.parts.suspects for part in sifted),
        longest_prompt_tokens=max((row.tokens for row in both if row.tokens is not None), default=None),
        checks=checks,
        recipe_data=recipe.data.model_dump(mode="json"),
        at=datetime.now(UTC).isoformat(),
        tasks={
            part.recipe.data.task_name: {"train": len(part.parts.train), "holdout": len(part.parts.holdout)}
            for part in sifted
        },
    )


def load_prompts(folder: Path, split: str) -> list[Prompt]:
    """Return the prompts of "train" or "holdout" in the order of the file; raises UserError where the data set is not finished."""
    import pyarrow.parquet as pq

    if not (folder / RECORD).is_file():
        raise UserError(f"data: {folder} holds no finished data set; run `scalerl prepare` first")
    return [Prompt.from_dict(row) for row in pq.read_table(folder / f"{split}.parquet").to_pylist()]


def _candidates(recipe: Recipe) -> list[Candidate]:
    data = recipe.data
    if data.source == "tiny-code":
        wanted = data.holdout + data.train if data.train else len(tiny_code.problems())
        return [
            Candidate(index, tiny_code.prompt(problem, data.task_name))
            for index, problem in enumerate(tiny_code.shuffled(wanted, recipe.seed), 1)
        ]
    if data.source == "arithmetic":
        existing = (9 * 10 ** (data.digits - 1)) ** data.terms
        if not data.train and existing > 1_000_000:
            raise UserError(f"data: {existing} different sums exist; say with data.train how many to train on")
        count = data.holdout + data.train if data.train else existing
        made = arithmetic.prompts(data.terms, data.digits, count, recipe.seed, data.task_name)
        return [Candidate(index, prompt) for index, prompt in enumerate(made, 1)]
    return [
        Candidate(
            row.line,
            make_prompt(
                row.problem,
                row.answer,
                source=data.source,
                task=data.task_name,
                difficulty=row.difficulty,
                tests=row.tests,
            ),
            unusable=row.unusable,
        )
        for row in sources.read(_source_path(recipe), data.source)
    ]


def _reject(rows: Sifted, recipe: Recipe, tokenizer: Any) -> dict[str, str]:
    """Reject what cannot be trained on; returns for every answer read how it can be compared against (`Verifier.gold_kinds`)."""
    rows.reject({index: row.unusable for index, row in enumerate(rows.kept) if row.unusable})
    rows.reject(
        {
            index: "empty problem" if not row.prompt.problem.strip() else "empty answer"
            for index, row in enumerate(rows.kept)
            if not row.prompt.problem.strip() or not row.prompt.gold.strip()
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
    answers = [row.prompt.gold for row in rows.kept]
    pieces = [answers[start : start + ANSWERS_PER_PIECE] for start in range(0, len(answers), ANSWERS_PER_PIECE)]
    read = spread(partial(_kinds, recipe.reward), pieces)
    kinds = dict(zip(answers, (kind for piece in read for kind in piece), strict=True))
    rows.reject(
        {index: f"answer: {kinds[answer]}" for index, answer in enumerate(answers) if kinds[answer] not in _CHECKABLE}
    )
    return kinds


def _kinds(reward: Reward, answers: list[str]) -> list[str]:
    """What the verifier says of each answer; the slow part of a large data set, so a cluster's machines each take a piece."""
    with Verifier(reward) as verifier:
        return verifier.gold_kinds(answers)


def _validate(sifted: Sequence[_Sifting], recipe: Recipe) -> list[Check]:
    """Check what is about to be published; nothing is taken over from the sifting but what is slow, lengths and readable answers."""

    def checked(part: _Sifting, row: Candidate, known: set[str]) -> dict[str, Any]:
        extra = {"matching_text": _text(row), "contaminated": matching_text(row.prompt.problem) in known}
        extra["answer_parses"] = part.kinds.get(row.prompt.gold) in _CHECKABLE
        tokens = {"prompt_tokens": row.tokens} if row.tokens is not None else {}
        return row.prompt.to_dict() | extra | tokens

    train: list[dict[str, Any]] = []
    holdout: list[dict[str, Any]] = []
    for part in sifted:
        known = {matching_text(problem) for problem in part.benchmark}
        train += [checked(part, row, known) for row in part.parts.train]
        holdout += [checked(part, row, known) for row in part.parts.holdout]
    settings = recipe.data.parts()
    leaks = any(reason.startswith("held out") for part in sifted for _, reason in part.rows.rejected)
    every = [source.train for source in settings]
    return validate_dataset(
        train,
        holdout,
        train_rows=sum(every) if all(every) and not leaks else None,
        holdout_rows=sum(source.holdout for source in settings),
        max_prompt_tokens=recipe.data.longest_prompt,
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
    if recipe.data.source in GENERATED and tokenizer is None:
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
    if recipe.data.source in GENERATED:
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


def _publish(folder: Path, record: DatasetRecord, sifted: Sequence[_Sifting]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with files.making_folder(folder) as temporary:
        train = [row for part in sifted for row in part.parts.train]
        held_out = [row for part in sifted for row in part.parts.holdout]
        for name, members in (("train", train), ("holdout", held_out)):
            table = pa.Table.from_pylist([row.prompt.to_dict() for row in members], schema=schema())
            pq.write_table(table, temporary / f"{name}.parquet")
        reasons = [
            {
                "line": row.line,
                "problem": row.prompt.problem,
                "answer": row.prompt.answer,
                "difficulty": row.prompt.difficulty,
                "reason": reason,
                "task": row.prompt.task,
            }
            for part in sifted
            for row, reason in sorted(part.rows.rejected, key=lambda pair: pair[0].line)
        ]
        columns = [("line", pa.int64())] + [
            (name, pa.string()) for name in ("problem", "answer", "difficulty", "reason", "task")
        ]
        pq.write_table(pa.Table.from_pylist(reasons, schema=pa.schema(columns)), temporary / "rejected.parquet")
        files.write_json(temporary / RECORD, asdict(record))
