"""The shop: the world that a handler acts on."""

from labkit.ledger import Ledger


class Shop:
    """What a handler is given beside its delivery. `ledger` holds the effects."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
