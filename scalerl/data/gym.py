"""Prompts of reasoning-gym: puzzles made on the spot, checkable, the same for the same seed (package extra reasoning-gym).

Answers are judged as any other: by value, or letter by letter. A dataset whose class brings a scoring rule of its own may accept several answers; of those only
the problems whose answer is a number can be judged here, the others are kept as rejected with that reason.
"""

import dataclasses
import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scalerl import streams
from scalerl.data.prompt import Prompt, make_prompt
from scalerl.recipe import Gym, Source
from warehouse.errors import UserError

# A dataset that has given nothing new, or nothing that can be judged, for this many problems in a row has no more.
_PATIENCE = 1000
_NUMBER = re.compile(r"[+-]?(\d+(\.\d+)?|\.\d+)(/\d+)?")
_LARGEST = 10_000_000


def prompts(data: Source, seed: int) -> list[tuple[Prompt, str]]:
    """Return (prompt, why it cannot be judged or "") of holdout + train different problems, the datasets of `data.gym` taking turns.

    Rejected problems do not count. Raises UserError for a missing package, an unknown dataset or setting, or too few different problems.
    """
    wanted = data.holdout + data.train
    makers = [
        _problems(entry, data, streams.key(seed, "reasoning-gym", number) % 2**31)
        for number, entry in enumerate(data.gym)
    ]
    found: list[tuple[Prompt, str]] = []
    known: set[str] = set()
    usable = 0
    fruitless: Counter[int] = Counter()  # maker -> problems in a row that cannot be judged
    while makers and usable < wanted:
        for maker in list(makers):
            made = next(_new(maker, known), None)
            if made is None or fruitless[id(maker)] >= _PATIENCE:
                makers.remove(maker)
                continue
            found.append(made)
            usable += not made[1]
            fruitless[id(maker)] = fruitless[id(maker)] + 1 if made[1] else 0
            if usable == wanted:
                break
    if usable < wanted:
        names = ", ".join(entry.name for entry in data.gym)
        raise UserError(
            f"data: reasoning-gym ({names}) makes only {usable} different problems that can be judged, but {wanted} are asked for; "
            "lower data.train or data.holdout, or widen the config"
        )
    return found


def version() -> str:
    """Return the version of the package, which decides what is made; raises UserError where it is missing."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "data.source = reasoning-gym: reasoning-gym is not installed; run `make smollm2` in the project's folder, or: "
            'pip install "scalerl-pipelines[reasoning-gym]"'
        ) from None


def _new(maker: Iterator[tuple[Prompt, str]], known: set[str]) -> Iterator[tuple[Prompt, str]]:
    """Yield problems not seen so far; ends after _PATIENCE that were."""
    seen = 0
    for prompt, unusable in maker:
        if prompt.prompt_id not in known:
            known.add(prompt.prompt_id)
            yield prompt, unusable
            seen = 0
        seen += 1
        if seen > _PATIENCE:
            return


def _problems(entry: Gym, data: Source, seed: int) -> Iterator[tuple[Prompt, str]]:
    made, own_rule = _dataset(entry, seed)
    for index in range(_LARGEST):
        row = made[index]
        answer = str(row["answer"]).strip()
        unusable = (
            "several answers: the dataset judges by a rule of its own"
            if own_rule and not _NUMBER.fullmatch(answer)
            else ""
        )
        yield make_prompt(str(row["question"]), answer, source="reasoning-gym", task=data.task_name), unusable


def _dataset(entry: Gym, seed: int) -> tuple[Any, bool]:
    """Return the dataset, and whether it has a scoring rule of its own."""
    version()
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    if entry.name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(entry.name, DATASETS, 3)
        raise UserError(f"data.gym: reasoning-gym has no dataset {entry.name}; near it are {', '.join(near) or 'none'}")
    kind, settings = DATASETS[entry.name]
    known = {field.name for field in dataclasses.fields(settings)} - {"seed", "size"}
    if unknown := sorted(set(entry.config) - known):
        raise UserError(
            f"data.gym: {entry.name} has no setting {unknown[0]} (seed and size are the recipe's); it has {', '.join(sorted(known))}"
        )
    try:
        config = settings(**entry.config, seed=seed, size=_LARGEST)
        config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.gym: {entry.name} refuses its config ({error or type(error).__name__})") from None
    return kind(config=config), kind.score_answer is not ProceduralDataset.score_answer
