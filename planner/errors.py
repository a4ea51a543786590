"""The one error of the planner: a question that has no answer, said in one line."""

from __future__ import annotations


class PlanError(ValueError):
    """The user asked for what can't be planned: message = asked, found, allowed. The command ends with `exit_code`."""

    exit_code = 2
