"""Start JupyterLab in the container, as whoever the container runs as, on the mounted checkout."""
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

from jupyterlab import labapp

WORKBOOK = Path("/workbook")
FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
PORT = 8888  #: of the container; compose publishes it on loopback only, as LABKIT_JUPYTER_PORT


def main() -> None:
    """Be JupyterLab, and print its address as the learner's browser sees it when it answers."""
    if not os.access(WORKBOOK / "notebooks", os.W_OK):
        sys.exit(_not_writable(WORKBOOK.stat()))
    os.environ["JUPYTER_TOKEN"] = token = secrets.token_hex(24)
    address = f"http://127.0.0.1:{os.environ['LABKIT_JUPYTER_PORT']}/lab/tree/{FIRST_NOTEBOOK}?token={token}"
    threading.Thread(target=_tell, args=[address], daemon=True).start()
    labapp.main([
        "--no-browser", "--log-level=WARN", f"--ServerApp.root_dir={WORKBOOK}",
        "--ServerApp.ip=0.0.0.0", f"--ServerApp.port={PORT}", "--ServerApp.port_retries=0",
        "--ServerApp.allow_remote_access=False",  # a page elsewhere cannot reach it through a name that it made up
        "--allow-root",  # only with LABKIT_UID=0: with rootless Docker the container's root is the learner
    ])


def _tell(address: str) -> None:
    while True:  # as long as JupyterLab lives
        try:
            socket.create_connection(("127.0.0.1", PORT)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    print(f"JupyterLab is ready at the address in the next line. Ctrl-C ends it, and RabbitMQ with it.\n{address}", flush=True)


def _not_writable(checkout: os.stat_result) -> str:
    return (f"The notebooks could not be saved.\n"
            f"Likely cause: the checkout belongs to user {checkout.st_uid}, and this is user {os.geteuid()}.\n"
            f"What now: LABKIT_UID={checkout.st_uid} LABKIT_GID={checkout.st_gid} docker compose up")


if __name__ == "__main__":
    main()
