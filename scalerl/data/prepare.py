"""Preparation of a data set: read, reject with reasons, hold out, check, and only then publish.

The folder of a data set is named by its content: the data section of the recipe, the seed, and the hashes of the files read. It appears in one rename, with
`record.json` inside, so it is whole or absent. No row is lost: what does not enter training or holdout lies in `rejected.parquet` with its reason.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from scalerl import cluster, home
from scalerl import hub as checkpoints
from scalerl.cluster import Workers
from scalerl.data import arithmetic, gym, hub, overlap, sift, sources, tiny_code
from scalerl.data.prompt import Prompt, matching_text, schema
from scalerl.data.sift import Facts
from scalerl.data.split import Parts, Sifted, split
from scalerl.recipe import GENERATED, TINY, Data, Recipe, digest
from scalerl.rewards import lending
from warehouse import files, writer
from warehouse.errors import UserError
from warehouse.expectations import Check, require, validate_dataset

# Raised when preparation gives other rows for the same input: old data sets then keep their names and new ones are new.
CODE_VERSION = 1
RECORD = "record.json"
# How long a worker may take to end the verifier's processes; one that is lost or busy does so by itself when they have been idle.
RELEASE_S = 30.0
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
    # Knobs that came later count once they are used: data sets from before keep their names.
    for knob in ("task", "gym"):
        if not data[knob]:
            del data[knob]
    content = {"code": CODE_VERSION, "seed": recipe.seed, "data": data, "verifier": recipe.reward.verifier}
    if recipe.data.source not in GENERATED:
        path = _source_path(recipe)
        content |= {"file": _sha256(path), "benchmarks": [_sha256(benchmark) for benchmark in _benchmark_paths(recipe)]}
    if recipe.data.source == "reasoning-gym":
        content["package"] = gym.version()
    if recipe.data.source not in TINY:
        content |= {
            "model": [recipe.model.kind, recipe.model.path, *filter(None, [recipe.model.revision])],
            "template": _template(recipe),
        }
    return f"{recipe.data.source}-{digest(content)}"


def _template(recipe: Recipe) -> dict[str, Any]:
    """Return what turns a prompt into tokens, besides the tokenizer."""
    knobs = {"prompt_template", "system_prompt", "think_in_prompt"}
    return recipe.rollout.model_dump(
        include=knobs | ({"chat_template_kwargs"} if recipe.rollout.chat_template_kwargs else set())
    )


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
    """One source on its way: its work folder, its rows and how many pieces hold them, how they were split, and how each answer can be compared against."""

    recipe: Recipe
    folder: Path
    pieces: int
    rows: Sifted
    parts: Parts
    kinds: dict[str, str]
    benchmark: overlap.Benchmark

    def prompts(self) -> Iterator[tuple[Facts, Prompt]]:
        """Yield every row with its prompt, in the order of the source, a piece at a time."""
        chosen: dict[int, dict[int, Facts]] = {}
        for row in (*self.parts.train, *self.parts.holdout, *(row for row, _ in self.rows.rejected)):
            chosen.setdefault(row.piece, {})[row.place] = row
        for piece in range(self.pieces):
            wanted = chosen.get(piece, {})
            for place, prompt in enumerate(sift.read_prompts(self.folder, piece) if wanted else ()):
                if place in wanted:
                    yield wanted[place], prompt


def _sift(recipe: Recipe, tokenizer: Any, folder: Path, workers: Workers) -> _Sifting:
    """Look at every row of one source, wherever the workers are, and split what can be used."""
    path = Path() if recipe.data.source in GENERATED else _source_path(recipe)
    benchmark = overlap.benchmark_of(
        [problem for file in _benchmark_paths(recipe) for problem in sources.problems(file)]
    )
    if tokenizer is None and recipe.data.source not in TINY:
        tokenizer = _model_tokenizer(recipe)
    sift.start(folder, sift.Job(recipe, path, tokenizer, benchmark))
    content: Iterable[Any] = (
        _generated(recipe) if recipe.data.source in GENERATED else sources.pieces(path, sift.ROWS_PER_PIECE)
    )
    tasks = (sift.Task(folder, number, piece) for number, piece in enumerate(content))
    found = list(workers.map(sift.look, tasks))
    rows = Sifted([row for piece in found for row in piece])
    kinds = _reject(rows, recipe, folder, workers)
    near_copies = partial(_near_copies, folder, [len(piece) for piece in found], workers)
    parts = split(rows, recipe.data, recipe.seed, benchmark, near_copies)
    return _Sifting(recipe, folder, len(found), rows, parts, kinds, benchmark)


def _near_copies(folder: Path, sizes: Sequence[int], workers: Workers, kept: Sequence[Facts]) -> list[int]:
    """Return the clusters of near-copies among the rows kept; `sizes` are the rows of every piece."""
    import numpy as np

    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    numbers = np.full(offsets[-1], -1, np.int64)
    numbers[[offsets[row.piece] + row.place for row in kept]] = np.arange(len(kept))
    np.save(folder / "kept.npy", numbers)
    np.save(folder / "offsets.npy", offsets)
    bits = sift.bucket_bits(sum(row.runs for row in kept))
    buckets = [(folder, bucket, bits, len(sizes)) for bucket in range(1 << bits)]
    shared = list(workers.map(sift.pairs_of_bucket, buckets))
    pairs, counts = (np.concatenate([answer[part] for answer in shared]) for part in (0, 1))
    near = overlap.near_pairs(pairs, counts, np.array([row.runs for row in kept], np.int64))
    return overlap.clusters([row.text for row in kept], near)


def _without_leaks(sifted: Sequence[_Sifting]) -> None:
    """Reject training prompts of one source whose text another source holds out."""
    held = [{row.text: part.recipe.data.task_name for row in part.parts.holdout} for part in sifted]
    for number, part in enumerate(sifted):
        others = {text: task for other, texts in enumerate(held) if other != number for text, task in texts.items()}
        leaks = [row for row in part.parts.train if row.text in others]
        part.rows.rejected += [(row, f"held out: by the task {others[row.text]}") for row in leaks]
        kept = [row for row in part.parts.train if row.text not in others]
        part.parts = replace(part.parts, train=kept)


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
    with files.temporary_folder(home.home() / "work" / f"prepare-{dataset_id}") as work, cluster.workers() as workers:
        parts = enumerate(_parts(recipe))
        try:
            sifted = [_sift(part, tokenizer, work / str(number), workers) for number, part in parts]
        finally:
            workers.everywhere(lending.release, RELEASE_S)
        _without_leaks(sifted)
        checks = _validate(sifted, recipe)
        record = _record(dataset_id, sifted, recipe, len(checks))
        _store(record, checks, warehouse_root or home.warehouse_root())
        require(checks, f"data set {dataset_id}")
        _publish(folder, record, sifted)
    return record


def slow_start(recipe: Recipe) -> str:
    """Return what `prepare` does first and takes long over, in words; "" where there is nothing such."""
    from scalerl.data import smollm2

    if recipe.model.kind != "smollm2" or smollm2.is_converted():
        return ""
    return "converting the weights of SmolLM2 once, about 20 s"


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
            part.kinds[row.gold] == "text" for part in sifted for row in part.parts.train + part.parts.holdout
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


def _generated(recipe: Recipe) -> Iterator[list[tuple[int, Prompt, str]]]:
    """Yield the prompts that the recipe's source makes, in pieces of (number from 1, prompt, why it cannot be judged or "")."""
    data = recipe.data
    made: list[tuple[Prompt, str]]
    if data.source == "tiny-code":
        wanted = data.holdout + data.train if data.train else len(tiny_code.problems())
        made = [(tiny_code.prompt(problem, data.task_name), "") for problem in tiny_code.shuffled(wanted, recipe.seed)]
    elif data.source == "reasoning-gym":
        made = gym.prompts(data, recipe.seed)
    else:
        existing = (9 * 10 ** (data.digits - 1)) ** data.terms
        if not data.train and existing > 1_000_000:
            raise UserError(f"data: {existing} different sums exist; say with data.train how many to train on")
        count = data.holdout + data.train if data.train else existing
        sums = arithmetic.prompts(data.terms, data.digits, count, recipe.seed, data.task_name)
        made = [(prompt, "") for prompt in sums]
    for begin in range(0, len(made), sift.ROWS_PER_PIECE):
        part = made[begin : begin + sift.ROWS_PER_PIECE]
        yield [(begin + place, *row) for place, row in enumerate(part, 1)]


def _reject(rows: Sifted, recipe: Recipe, folder: Path, workers: Workers) -> dict[str, str]:
    """Reject what cannot be trained on; returns how each answer that was read can be compared against (`Verifier.gold_kinds`), by its key."""
    rows.reject({index: row.unusable for index, row in enumerate(rows.kept) if row.unusable})
    rows.reject(_duplicates(rows.kept))
    limit = recipe.data.max_prompt_tokens
    rows.reject(
        {
            index: f"too long: {row.tokens} tokens, limit {limit}"
            for index, row in enumerate(rows.kept)
            if row.tokens is not None and row.tokens > limit
        }
    )
    # Every different answer is read once, in the piece where it stands first.
    first = {row.gold: row for row in reversed(rows.kept)}
    wanted: dict[int, list[Facts]] = {}
    for row in sorted(first.values(), key=lambda row: (row.piece, row.place)):
        wanted.setdefault(row.piece, []).append(row)
    asked = [(folder, piece, tuple(row.place for row in found)) for piece, found in wanted.items()]
    read = workers.map(sift.kinds, asked)
    kinds = {
        row.gold: kind
        for found, answers in zip(wanted.values(), read, strict=True)
        for row, kind in zip(found, answers, strict=True)
    }
    rows.reject(
        {
            index: f"answer: {kinds[row.gold]}"
            for index, row in enumerate(rows.kept)
            if kinds[row.gold] not in _CHECKABLE
        }
    )
    return kinds


def _validate(sifted: Sequence[_Sifting], recipe: Recipe) -> list[Check]:
    """Check what is about to be published; nothing is taken over from the sifting but what is slow, lengths and readable answers."""
    both: dict[str, list[dict[str, Any]]] = {"train": [], "holdout": []}
    for part in sifted:
        held = {row.prompt_id for row in part.parts.holdout}
        published = held | {row.prompt_id for row in part.parts.train}
        rejected = {(row.piece, row.place) for row, _ in part.rows.rejected}
        for row, prompt in part.prompts():
            if row.prompt_id in published and (row.piece, row.place) not in rejected:
                split_name = "holdout" if row.prompt_id in held else "train"
                both[split_name].append(_checked(part, row, replace(prompt, split=split_name)))
    settings = recipe.data.parts()
    leaks = any(reason.startswith("held out") for part in sifted for _, reason in part.rows.rejected)
    every = [source.train for source in settings]
    return validate_dataset(
        both["train"],
        both["holdout"],
        train_rows=sum(every) if all(every) and not leaks else None,
        holdout_rows=sum(source.holdout for source in settings),
        max_prompt_tokens=recipe.data.longest_prompt,
    )


def _checked(part: _Sifting, row: Facts, prompt: Prompt) -> dict[str, Any]:
    """Return a row for the checks: the columns of the schema but for the long ones, whose place their keys take."""
    plain = matching_text(prompt.problem)
    compared = sift.comparable_text(prompt)
    content = {name: getattr(prompt, name) for name in ("prompt_id", "task", "answer", "difficulty", "source", "split")}
    content |= {"messages": None, "matching_text": overlap.text_key(compared) if compared.strip() else ""}
    content |= {"contaminated": overlap.text_key(plain) in part.benchmark.runs_of}
    content |= {"answer_parses": part.kinds.get(overlap.text_key(prompt.gold)) in _CHECKABLE}
    return content | ({"prompt_tokens": row.tokens} if row.tokens is not None else {})


def _duplicates(kept: Sequence[Facts]) -> dict[int, str]:
    first: dict[str, Facts] = {}
    reasons: dict[int, str] = {}
    for index, row in enumerate(kept):
        earlier = first.setdefault(row.prompt_id, row)
        if earlier is not row:
            other = "" if earlier.answer == row.answer else ", with another answer"
            reasons[index] = f"duplicate: of line {earlier.line}{other}"
    return reasons


def _model_tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer of the recipe's model, or None where `model.path` is empty."""
    if recipe.model.kind == "folder" and not recipe.model.path:
        return None
    from transformers import AutoTokenizer

    if recipe.model.kind == "smollm2":
        from scalerl.data import smollm2

        return AutoTokenizer.from_pretrained(smollm2.converted())
    folder = Path(recipe.model.path).expanduser()
    if checkpoints.is_name(recipe.model.path):
        folder = checkpoints.checkpoint(recipe.model.path, recipe.model.revision)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"model.path = {folder}: no tokenizer in this folder; name a Hugging Face checkpoint folder")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _source_path(recipe: Recipe) -> Path:
    if not recipe.data.path:
        raise UserError(
            f"data.path is empty; name the file of data.source = {recipe.data.source}, for example --path prompts.jsonl"
        )
    if hub.is_address(recipe.data.path):
        return hub.fetch(recipe.data.path)
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
        if hub.is_address(name):
            found.append(hub.fetch(name))
            continue
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
    """Write the data set and put it in place; its rows stream from the work folders, so none of its files is in memory as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [("line", pa.int64())] + [
        (name, pa.string()) for name in ("problem", "answer", "difficulty", "reason", "task")
    ]
    layouts = {"train": schema(), "holdout": schema(), "rejected": pa.schema(columns)}
    with files.making_folder(folder) as temporary:
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(pq.ParquetWriter(temporary / f"{name}.parquet", layout))
                for name, layout in layouts.items()
            }
            for part in sifted:
                for name, found in _batches(_published(part)):
                    writers[name].write_table(pa.Table.from_pylist(found, schema=layouts[name]))
        files.write_json(temporary / RECORD, asdict(record))


def _published(part: _Sifting) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file, row) of everything in one source."""
    places: dict[tuple[int, int], tuple[str, str]] = {}
    for name, members in (("train", part.parts.train), ("holdout", part.parts.holdout)):
        places |= {(row.piece, row.place): (name, "") for row in members}
    places |= {(row.piece, row.place): ("rejected", reason) for row, reason in part.rows.rejected}
    for row, prompt in part.prompts():
        name, reason = places[row.piece, row.place]
        if name != "rejected":
            yield name, replace(prompt, split=name).to_dict()
            continue
        content = {"line": row.line, "problem": prompt.problem, "reason": reason, "task": prompt.task}
        yield name, content | {"answer": prompt.answer, "difficulty": prompt.difficulty}


def _batches(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Gather the rows of each file into lists of some length."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows:
        found = waiting.setdefault(name, [])
        found.append(row)
        if len(found) >= sift.ROWS_PER_PIECE:
            yield name, waiting.pop(name)
    yield from waiting.items()
