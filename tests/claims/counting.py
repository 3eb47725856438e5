"""What the claims tests read off a run."""


def numbers(run, *names):
    """Returns the named counts, in this order."""
    return tuple(run.counts[name] for name in names)


def handed_over(run):
    """Returns the events at which a worker was given a message, in the order of time."""
    return [event for event in run.events if event.name == "receive" and event.phase == "after"]
