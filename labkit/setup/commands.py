"""The commands of `python3 -m labkit`, and how each of them ends."""
import argparse
import os
import signal
import sys

from labkit.errors import LabError
from labkit.setup import SetupError
from labkit.setup.progress import say


def main(argv: list[str]) -> int:
    """Carry out one command line and return its exit code: 130 after Ctrl-C, 1 after an error, which is told on stderr."""
    if os.name == "nt":
        return _tell(SetupError("On Windows the lab runs inside WSL 2, or beside Docker.",
                                "its workers are forked and killed in ways that Windows does not know",
                                "wsl --install, then this command in its Ubuntu; or: docker compose up"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "test":
        parser.error(f"unknown: {' '.join(rest)}")
    try:
        return options.carry_out(options, rest)
    except KeyboardInterrupt:
        say("\nInterrupted; the same command goes on from here.")
        return 130
    except LabError as error:
        return _tell(error)


def _tell(error: LabError) -> int:
    print(error, file=sys.stderr)
    return 1


def _up(options, _):
    _set_up(options.yes)
    from labkit.setup.up import up
    return up(options.port, browser=not options.no_browser)


def _test(options, rest):
    from labkit.setup import suite
    _set_up(options.yes, broker=suite.needs_a_broker())
    return suite.test(rest)


def _doctor(*_):
    _use_environment_if_ready()
    from labkit.setup.doctor import doctor
    return doctor()


def _broker(options, _):
    _use_environment_if_ready()
    from labkit.broker import commands
    return commands.main([options.action])


def _notebooks(options, _):
    _set_up(options.yes)
    from labkit.setup import notebooks
    return notebooks.run(options.names)


def _clean(options, _):
    from labkit.setup.clean import clean
    return clean(options.yes)


def _set_up(yes: bool, broker: bool = True) -> None:
    """Provide what the command needs, and go on in the environment's Python."""
    from labkit.setup import packages
    packages.ensure(yes, broker)
    from labkit.setup import environment
    environment.ensure()
    environment.enter()


def _use_environment_if_ready() -> None:
    from labkit.setup import environment
    if environment.ready():
        environment.enter()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m labkit", allow_abbrev=False,
                                     description="The lab: a real RabbitMQ, workers that really die, a verdict.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, carry_out, text, yes=None):
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(carry_out=carry_out)
        if yes:
            added.add_argument("--yes", action="store_true", help=yes)
        return added

    install = "install missing system packages without asking"
    up = command("up", _up, "set up what is missing, start RabbitMQ and JupyterLab, open the first notebook", install)
    up.add_argument("--no-browser", action="store_true", help="print the address only")
    up.add_argument("--port", type=int, help="JupyterLab's port; without it the first free one from 8888")
    command("test", _test, "set up what is missing and run the whole suite; all other arguments go to pytest", install)
    command("doctor", _doctor, "tell what is here, what is wrong and the command that mends it; exit code 1 if something is")
    broker = command("broker", _broker, "start, stop or look at the private RabbitMQ node")
    broker.add_argument("action", choices=("start", "stop", "status", "login"))
    notebooks = command("notebooks", _notebooks, "run the notebooks and save their outputs the canonical way", install)
    notebooks.add_argument("action", choices=("run",))
    notebooks.add_argument("names", nargs="*", help="notebook files; without them all in notebooks/")
    command("clean", _clean, "remove runs, data and the node", "without asking")
    return parser
