"""From a fresh clone to a running lab: the environment, a RabbitMQ, JupyterLab, and the suite.

Everything here but `notebooks` and `jupyter` runs on a bare Python. Arrows go one way:

    commands ─▶ up · suite · doctor · clean · notebooks ─▶ environment · packages ─▶ progress
"""
from labkit.errors import LabError


class SetupError(LabError):
    """Raised when the machine cannot be set up; the message holds the command that mends it."""
