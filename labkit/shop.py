"""The shop: the world that a handler or a producer acts on."""

from labkit.ledger import Ledger
from labkit.message import Message
from labkit.outbox import Outbox
from labkit.provider.client import Client
from labkit.sender import Sender
from labkit.status import Status
from labkit.terminal import Terminal


class Shop:
    """`ledger` holds the effects, `status` the state of each entity, `outbox` the events that are still to be published, `terminal` what a person
    decides on, and `provider` charges customers."""

    def __init__(self, ledger: Ledger, status: Status, outbox: Outbox, terminal: Terminal, sender: Sender, provider: Client):
        self.ledger, self.status, self.outbox, self.terminal, self.provider, self._sender = ledger, status, outbox, terminal, provider, sender

    def publish(self, message: Message, *, to: str | None = None, confirm: bool = True, mandatory: bool = True) -> str:
        """Publishes a message, persistent, and tells what became of it. Two steps: it is sent, and its confirm is waited for.

        to:        a queue's name; without one the message goes to the events of this run
        confirm:   False only sends: `confirm` tells the outcome later, for many at once
        mandatory: False lets the broker drop a message that no queue takes, and confirm it all the same
        Returns "confirmed", "nacked" (the queue is full), "returned" (there is no such queue), "blocked" (the broker takes no
        messages), "unknown" (the connection ended before the confirm came) or "not sent"; with confirm=False "sent" or "not sent".
        """
        sent = self._sender.publish(message, to, mandatory)
        return self._sender.confirm(message)[message.message_id] if confirm else sent

    def confirm(self) -> dict[str, str]:
        """Waits for the outcomes of all that was sent, and returns those that were not told yet: message id -> outcome."""
        return self._sender.confirm()
