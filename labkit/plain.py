"""What each labkit verb is in plain pika or SQL, so that what is learned here works elsewhere."""

from labkit import sql
from labkit.errors import PlanError

_PLAIN = {
    "ack": ("pika", "channel.basic_ack(method.delivery_tag)"),
    "nack": ("pika", "channel.basic_nack(method.delivery_tag, requeue=True)"),
    "reject": ("pika", "channel.basic_reject(method.delivery_tag, requeue=False)"),
    "receive": ("pika, then SQL", "channel.basic_qos(prefetch_count=1)\nchannel.basic_consume(queue, on_message, auto_ack=False)\n\n" + sql.LOG_DELIVERY.strip()),
    "ledger.record": ("SQL", sql.RECORD),
    "ledger.record_once": ("SQL", f"BEGIN IMMEDIATE;\n{sql.CLAIM_KEY};\n-- one row changed: the key is new\n{sql.RECORD};\n"
                           f"-- none changed: a duplicate, or another payload under the same key\n{sql.FIND_FINGERPRINT};\nCOMMIT;"),
    "ledger.find": ("SQL", sql.FIND),
    "ledger.remember": ("SQL", sql.REMEMBER),
    "status.move": ("SQL", f"{sql.MOVE_STATUS};\n-- one row changed: moved; none changed: it is in another status\n{sql.FIND_STATUS};"),
    "publish": ("pika", "channel.confirm_delivery()  # once; from then on each publish waits for its confirm\n"
                        "channel.basic_publish(\"\", queue, body, pika.BasicProperties(message_id=…, delivery_mode=2), mandatory=True)"),
    "retry": ("pika", "channel.queue_declare(\"delay-100\", durable=True, arguments={\n"
                      "    \"x-queue-type\": \"quorum\", \"x-message-ttl\": 100,                          # nobody consumes from it\n"
                      "    \"x-dead-letter-exchange\": \"\", \"x-dead-letter-routing-key\": work,       # expired, it goes back to the work queue\n"
                      "    \"x-dead-letter-strategy\": \"at-least-once\", \"x-overflow\": \"reject-publish\"})\n"
                      "channel.confirm_delivery()\n"
                      "channel.basic_publish(\"\", \"delay-100\", body, properties, mandatory=True)  # returns when it is confirmed\n"
                      "channel.basic_ack(method.delivery_tag)"),
    "park": ("SQL, then pika", f"{sql.WRITE_RECORD};\n\nchannel.basic_ack(method.delivery_tag)"),
    "outbox.add": ("SQL", f"{sql.ADD_EVENT};"),
    "outbox.waiting": ("SQL", f"-- first, to wait for a relay that is at work:\n{sql.TAKE_TURN};\n{sql.WAITING_EVENTS};"),
    "outbox.mark": ("SQL", f"{sql.MARK_EVENT};"),
    "provider.charge": ("Python", "request = urllib.request.Request(url, json.dumps({\"effect_key\": effect_key}).encode(), {\"Content-Type\": \"application/json\"})\n"
                                  "with urllib.request.urlopen(request, timeout=1.0) as response:\n    answer = json.load(response)"),
    "ledger.transaction": ("SQL", "BEGIN IMMEDIATE;\n-- your statements\nCOMMIT;  -- or ROLLBACK;"),
}


class Plain:
    """One verb in plain words; shows as text and as HTML."""

    def __init__(self, verb: str):
        if verb not in _PLAIN:
            raise PlanError(f"There is nothing to show for {verb!r}.", "it is not a verb of labkit", "Try one of: " + ", ".join(_PLAIN) + ".")
        self.verb = verb
        self.language, self.text = _PLAIN[verb]

    def __repr__(self) -> str:
        return f"{self.verb} in plain {self.language}:\n\n{self.text}"
