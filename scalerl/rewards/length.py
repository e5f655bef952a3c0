"""The length penalty of A.10, the alternative to forced interruption."""

from scalerl.recipe import Reward


def length_penalty(length: int, reward: Reward) -> float:
    """Return what a correct trace of `length` tokens loses: clip((L_max - length) / L_cache - 1, -1, 0) (A.10).

    0 up to L_max - L_cache tokens, then falling linearly to -1 at L_max. Wrong traces are not shaped: the caller asks for correct ones only.
    """
    return min(0.0, max(-1.0, (reward.length_max - length) / reward.length_cache - 1.0))
