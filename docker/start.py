"""Start JupyterLab in the container, as whoever the container runs as, on the mounted checkout."""
import os
import sys
from pathlib import Path

from labkit.setup.environment import QUIET

WORKBOOK = Path("/workbook")
FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"


def main() -> None:
    """Become JupyterLab, or say which user the checkout belongs to when its notebooks could not be saved."""
    if not os.access(WORKBOOK / "notebooks", os.W_OK):
        owner = WORKBOOK.stat()
        sys.exit(f"The notebooks could not be saved: the checkout belongs to user {owner.st_uid}, and this is user {os.geteuid()}.\n"
                 f"What now: LABKIT_UID={owner.st_uid} LABKIT_GID={owner.st_gid} docker compose up")
    settings = Path.home() / ".jupyter" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(QUIET)
    address = f"http://127.0.0.1:{os.environ['LABKIT_JUPYTER_PORT']}/lab/tree/{FIRST_NOTEBOOK}"
    os.execvp("jupyter", [
        "jupyter", "lab", "--no-browser", "--log-level=WARN",
        "--ServerApp.ip=0.0.0.0", "--ServerApp.port=8888", "--ServerApp.port_retries=0",  # the container's; compose publishes it on loopback
        "--ServerApp.allow_remote_access=False",  # so it answers to the names of loopback only, as outside a container
        "--ServerApp.allow_root=True",  # with rootless Docker the container's root is the learner
        f"--ServerApp.root_dir={WORKBOOK}", f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}",
        f"--ServerApp.custom_display_url={address}", "--ServerApp.no_browser_open_file=True",
    ])


if __name__ == "__main__":
    main()
