"""What goes wrong on the weight channel; apart from it, so that callers need no torch to name it."""


class ChannelLost(Exception):
    """The other side of the weight channel is dead or silent."""


class ChannelMismatch(ChannelLost):
    """The two sides of the weight channel mean different weights."""
