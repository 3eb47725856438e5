"""JupyterLab that ends with its parent: run as `python -m labkit.setup.jupyter ARGUMENTS`, standard input a pipe.

The parent holds the pipe's other end. When that closes, because the parent let go or was killed, JupyterLab gets the
SIGTERM on which it ends its kernels and itself.
"""
import os
import signal
import sys
import threading

from jupyterlab.labapp import main


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: this returns at the end of the file only
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main())
