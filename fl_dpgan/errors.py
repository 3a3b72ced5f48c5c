"""The typed errors a user can meet: each says what is wrong with which value, and what to do."""


class FlDpganError(Exception):
    """Base of every error that the command line prints on one line (exit code 2)."""


class ConfigError(FlDpganError):
    """A plan, scenario or option is invalid."""


class DataError(FlDpganError):
    """Image data are missing, corrupt or do not fit what was declared of them."""


class BudgetError(FlDpganError):
    """A charge would pass a budget; nothing was charged and no data were touched.

    Attributes:
        rule: which cap it is, `eps_max` (the site's budget) or `share` (the run's part of it).
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class LedgerError(FlDpganError):
    """A ledger cannot be opened, read or written; nothing is trained without one."""


class WireError(FlDpganError):
    """A message does not have the form, shapes or finite values that the protocol demands."""


class RunFolderError(FlDpganError):
    """A run's folder is missing, belongs to another run, or holds a damaged checkpoint."""


class FederationError(FlDpganError):
    """A federation cannot go on: too few sites joined or answered."""


class PolicyError(FlDpganError):
    """A request breaks a rule of the site's policy; nothing was charged and no data were touched.

    Attributes:
        rule: the rule's name, a key of the policy.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule
