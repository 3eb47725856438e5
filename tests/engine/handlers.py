"""The handlers that several tests hand to the lab: right ones and wrong ones, named by what they do."""
import os
import sys


def effect_then_ack(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def ack_then_effect(delivery, shop):
    delivery.ack()
    shop.ledger.record(delivery.message.effect_key)


def once_then_ack(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def look_then_record(delivery, shop):
    if shop.ledger.find(delivery.message.effect_key) is None:
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def look_inside(delivery, shop):
    """Looks and records inside one transaction."""
    with shop.ledger.transaction():
        if shop.ledger.find(delivery.message.effect_key) is None:
            shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def effect_only(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)


def raise_value_error(delivery, shop):
    raise ValueError("the invoice has no address")


def ack_twice(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    delivery.ack()
    delivery.ack()


def exit_with_three(delivery, shop):
    sys.exit(3)


def loop_for_ever(delivery, shop):
    while True:
        pass


def nack_always(delivery, shop):
    delivery.nack(requeue=True)


def leave_a_child(delivery, shop):
    """Forks a child that lives on in a session of its own, before the effect."""
    if delivery.attempt == 1 and not os.fork():
        os.setsid()
        os.execvp("sleep", ["sleep", "30"])
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()
