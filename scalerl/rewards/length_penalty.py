"""The length penalty of A.10: correct traces lose reward as they come near the longest allowed length."""

from scalerl.recipe import Reward
from scalerl.rewards.verifier import Outcome


def length_penalty(length: int, length_max: int, length_cache: int) -> float:
    """Return clip((L_max - length) / L_cache - 1, -1, 0): 0 up to L_max - L_cache tokens, -1 from L_max on, linear between (A.10)."""
    return min(0.0, max(-1.0, (length_max - length) / length_cache - 1.0))


def shaped_reward(outcome: Outcome, length: int, reward: Reward) -> float:
    """Return +1 for a correct and -1 for any other trace (section 3), less the penalty on correct traces where the recipe asks for it.

    `length` counts the tokens of the completion. Filters look at the outcome, not at this number: a length-shaped reward would make a group of equal outcomes
    look varied.
    """
    if outcome != "correct":
        return -1.0
    penalty = length_penalty(length, reward.length_max, reward.length_cache) if reward.length_penalty else 0.0
    return 1.0 + penalty
