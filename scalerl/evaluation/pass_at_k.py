"""pass@k without bias, and its standard error (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1)."""

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that at least one of k answers drawn from n without replacement is right, c of the n being right.

    Taking 1 - (1 - c/n)^k instead would be biased. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {correct} correct: needs 1 <= k <= samples >= correct >= 0")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def estimates(correct: Sequence[int], samples: int) -> dict[int, tuple[float, float]]:
    """Return k -> (pass@k, standard error) for k = 1, 2, 4, ... up to `samples`, over prompts with these numbers of right answers.

    The samples of one prompt are one cluster: the error is the spread of the prompts' own estimates over sqrt(number of prompts). For a single prompt,
    where no spread can be seen, it is 0.
    """
    found: dict[int, tuple[float, float]] = {}
    k = 1
    while k <= samples:
        each = [pass_at_k(samples, count, k) for count in correct]
        mean = math.fsum(each) / len(each)
        spread = math.fsum((value - mean) ** 2 for value in each) / max(1, len(each) - 1)
        found[k] = mean, math.sqrt(spread / len(each))
        k *= 2
    return found
