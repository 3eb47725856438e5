"""The command line: `python3 -m labkit up` and its friends. It needs nothing but Python until the environment exists."""
import sys

if sys.version_info < (3, 11):  # said before anything is imported that an older Python cannot even read
    sys.exit("labkit needs Python 3.11 or newer, and this is Python %d.%d.\n"
             "What now: install a newer Python and run it by its full name, for example: python3.12 -m labkit up"
             % sys.version_info[:2])

from labkit.setup.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
