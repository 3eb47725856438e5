"""Makes the README's picture from real runs: three handlers, killed before and after each of their steps.

    .venv/bin/python docs/make_picture.py
"""
from pathlib import Path

from labkit import Lab


def ack_first(delivery, shop):
    delivery.ack()
    shop.ledger.record(delivery.message.effect_key)


def effect_first(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def unique_key(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


with Lab() as lab:
    first, *others = [lab.sweep(handler, lab.reminders(1)) for handler in (ack_first, effect_first, unique_key)]
    Path(__file__).with_name("crash-points.png").write_bytes(first.plot(*others).png)
