"""The error that a user can mend."""


class UserError(Exception):
    """Bad input, told in one line: what is wrong, where, and what to do next.

    The command line prints the message on standard error and exits with code 2; flows do not retry it.
    """
