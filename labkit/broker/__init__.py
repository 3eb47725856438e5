"""The broker: find a RabbitMQ that answers, or start one that leaves nothing behind.

    find, lease ─▶ finding ─▶ node ─▶ guard (a process) ─▶ recipe, watch, failure
                      └────▶ reach ─▶ address
"""

from labkit.broker.address import Address, Secret
from labkit.broker.finding import Broker, find


def lease() -> Broker:
    """Holds the broker that notebooks will find, as a context manager, so that their node stays between two kernels."""
    return find()


__all__ = ["Address", "Broker", "Secret", "find", "lease"]
