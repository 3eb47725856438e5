"""The shop: the world that a handler acts on."""

from labkit.ledger import Ledger
from labkit.status import Status


class Shop:
    """What a handler is given beside its delivery. `ledger` holds the effects, `status` the state of each entity."""

    def __init__(self, ledger: Ledger, status: Status):
        self.ledger, self.status = ledger, status
