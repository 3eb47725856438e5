"""The verdict: the rules that turn a run's facts into holds, broken or unknown, in the order in which they apply."""

from labkit import steps
from labkit.table import plain
from labkit.trace import Event

HOLDS, BROKEN, UNKNOWN = "holds", "broken", "unknown"


def judge(run) -> tuple[str, str, list[Event]]:
    """Returns (verdict, why in one sentence, the shortest list of events that shows it)."""
    return _broken(run) or unproven(run) or (HOLDS, _what_holds(run), [])


def _broken(run):
    facts = run.facts
    for key, status in run.statuses.items():
        if status == "duplicated":
            numbers = {"recorded": facts.effects.get(key, 0), "charged": (facts.charges or {}).get(key, 0)}
            return (BROKEN, f"{plain(key)} was " + " and ".join(f"{done} {number} times" for done, number in numbers.items() if number > 1),
                    _of(run, key, "ledger.record", "ledger.record_once", "ledger.execute", steps.PROVIDER_CHARGE, "charged", "killed"))
    for key, status in run.statuses.items():
        if status == "lost":
            charged = (facts.charges or {}).get(key)
            return BROKEN, (f"{plain(key)} was charged, and its record was lost: no effect in the ledger, and no message of it left" if charged else
                            f"{plain(key)} was lost: no effect, and no message of it left"), _of(run, key, steps.RECEIVE, steps.PROVIDER_CHARGE, "charged", steps.ACK, "killed", "exited")
    for key in run.strays:
        return BROKEN, f"an effect was recorded for {plain(key)}, which nobody published", _of(run, key, *steps.STEPS)
    if facts.misuse:
        return BROKEN, facts.misuse, [e for e in run.events if e.name == "channel.closed"][:1]
    if facts.ending == "max_deliveries":
        return BROKEN, facts.reason, [e for e in run.events if e.name == steps.RECEIVE and e.phase == steps.AFTER][-3:]
    if facts.ending == "gave up":
        return BROKEN, facts.reason, [e for e in run.events if e.name in ("exited", "killed")]
    if facts.stuck:
        return BROKEN, facts.stuck, [e for e in run.events if e.name == "returned"][-1:]


def unproven(run) -> tuple[str, str, list[Event]] | None:
    """Returns the verdict unknown with its reason, where a run that is not broken proves nothing; else None."""
    facts = run.facts
    if facts.ending in ("deadline", "unreachable", "stopped"):
        return UNKNOWN, facts.reason, []
    for plan, fired in zip(facts.planned, facts.fired):
        if not fired:
            return UNKNOWN, f"the planned {plan} did not fire, so this run proves nothing about it", []
    for key, status in run.statuses.items():
        if status in ("pending", "unknown"):
            return UNKNOWN, f"{plain(key)} is {status} at the end", _of(run, key, *steps.STEPS)


def _what_holds(run) -> str:
    counts = run.counts
    said = [f"{counts[status]} of {counts['keys']} {status}" for status in ("once", "terminal") if counts[status]]
    return (f"{run.KEPT}: " + ", ".join(said)) if said else "nothing was published, and nothing happened"


def _of(run, key: str, *names: str) -> list[Event]:
    return [e for e in run.events if e.detail.get("effect_key", e.effect_key) == key and e.name in names and e.phase in (steps.AFTER, steps.NOTE)]
