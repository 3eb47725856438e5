"""What is done to a running node from inside, as rabbitmqctl does it: a second Erlang calls it, and ends."""

from labkit.broker.recipe import MEMORY_BYTES, Recipe
from labkit.broker.server import erlang

SECONDS = 20  #: for a call

_WATERMARK = "ok = rpc:call(N, vm_memory_monitor, set_vm_memory_high_watermark, [{absolute, %d}])"
#: a command -> what it is in Erlang, where N is the node
CALLS = {
    "settle": "[ok = rpc:call(N, dets, sync, [T]) || T <- rpc:call(N, dets, all, [])]",
    "block": _WATERMARK % 1,
    "unblock": _WATERMARK % MEMORY_BYTES,
}


def call(recipe: Recipe, command: str) -> list[str]:
    """Returns the program, with its arguments, that does one of CALLS to the node, and ends with 0 if that was done."""
    name = recipe.environ["RABBITMQ_NODENAME"]
    return [str(erlang(recipe.server)), "-noinput", "-hidden", "-sname", f"inside-{name}", "-kernel", "inet_dist_use_interface", "{127,0,0,1}",
            "-eval", f"N = '{name}', {CALLS[command]}, halt(0)."]
