"""`shoal plan`: prints what would fit, without torch and without reading a weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from services.common.config import parse
from services.common.errors import StartupError
from services.fleet.planner import report
from services.fleet.planner.config import PlanConfig
from services.fleet.planner.memory import plan


def main(argv: Sequence[str]) -> NoReturn:
    """Prints the plan; exits 1 after one sentence if the model would not be served."""
    config = parse(
        PlanConfig,
        argv,
        prog="shoal plan",
        description="Says what a model takes of a GPU's memory, or a machine's, and how many tokens"
        " and requests fit, without loading it.",
    )
    try:
        form = report.helm if config.helm else report.as_json if config.json else report.text
        print(form(plan(config), config), end="")
    except StartupError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
