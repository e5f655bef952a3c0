"""Python's garbage collector in processes that hold much and make many small objects."""

import gc


def spare_what_is_there() -> None:
    """Leave everything made so far out of all later collections.

    A process that has loaded torch, transformers, Ray and a model holds some hundred thousand objects that live as long as it does; looking through them again and again took
    a tenth of the CPU time that the loop needs a step. For the processes of a run: what is garbage in a cycle by then is collected first, what becomes so later stays.
    """
    gc.collect()
    gc.freeze()
