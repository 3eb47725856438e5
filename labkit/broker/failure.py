"""Why a node did not start, in one sentence: the cause that its log names, out of two hundred lines of Erlang."""

import re

from labkit.broker.recipe import Recipe

_PORT_TAKEN = r"eaddrinuse|distribution port \d+|Address already in use"
#: what the log says, the likely cause, the next step
_KNOWN = (
    (_PORT_TAKEN, "another program took one of its ports", "try again"),
    (r"erl(exec)?: (command )?not found|Can't find.*erl|No such file.*\berl\b", "RabbitMQ is here, and Erlang is not, or not on the PATH",
     "install Erlang, or add the folder of `erl` to PATH"),
    (r"[Oo]nly root or rabbitmq", "this is a wrapper for the system service", "name the server itself, under /usr/lib/rabbitmq/bin"),
    (r"enospc|[Nn]o space left", "the disk is full", "make room, or name another folder in LABKIT_STATE"),
    (r"enomem|Cannot allocate|[Oo]ut of memory", "the machine has too little free memory", "close other programs, then try again"),
    (r"emfile|[Tt]oo many open files", "it may open too few files", "ulimit -n 4096"),
    (r"(requires|supports) Erlang|unsupported_erlang", "this RabbitMQ does not run on the Erlang that is here",
     "install RabbitMQ and Erlang from the same source"),
    (r"eacces|[Pp]ermission denied|Operation not permitted", "it may not read or write one of its files",
     "look at who owns the state folder and the server, or name another folder in LABKIT_STATE"),
)
_BANNER = re.compile(r"^[\s#=*]*$|^\s*(Starting broker|Doc guides|Support|Tutorials|Monitoring|Upgrading|Config file|Logs|Copyright|Licensed)|"
                     r"^\s+https?://|Kernel pid terminated|Crash dump is being|[Ss]tack ?trace|^\s*[\[{]")


def explain(recipe: Recipe, program: str, code: int | None) -> dict:
    """Returns what, why and now of a program of the node that ended with `code`, or does not listen in time (None).

    `port_taken` tells whether other ports may help.
    """
    text = recipe.console.read_text(errors="replace") if recipe.console.exists() else ""
    text = text.replace(recipe.password.reveal(), "***")
    why, now = next(((why, now) for pattern, why, now in _KNOWN if re.search(pattern, text)),
                    ("the machine is very busy", "try again") if code is None else
                    ("something killed it; too little memory is the usual reason", "close other programs, then try again") if code == -9 else
                    ("its own log says more", f"look into {recipe.console}, or run: python3 -m labkit doctor"))
    ended = "does not listen" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended, with exit code {code}"
    line = _telling_line(text)
    what = f"{program} {ended}." + (f" It said: {line}" if line else "")
    return {"what": what, "why": why, "now": now, "port_taken": bool(re.search(_PORT_TAKEN, text))}


def _telling_line(text: str) -> str:
    """Returns the first line that is marked as an error, or else the last one that is no banner."""
    lines = [re.sub(r"^\S+ \S+ (?=\[)|\[(error|critical|notice|warning|info)\] |<[\d.]+> ", "", line).strip()
             for line in text.splitlines() if not _BANNER.search(re.sub(r"^\S+ \S+ \[\w+\] <[\d.]+>", "", line))]
    lines = [line for line in lines if line]
    telling = [line for line in lines if re.search(r"[Ee]rror|ERROR|failed|FAILED|not found|[Cc]annot|eaddrinuse", line) and "BOOT FAILED" not in line]
    line = (telling or lines[::-1] or [""])[0]
    return line if len(line) <= 200 else f"{line[:199]}…"
