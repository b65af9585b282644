"""Calculator tool of the agent example: completes a line that ends in an equals sign."""

import re

_CALL = re.compile(r"(\d{1,9})([-+*])(\d{1,9})=")


def call_calculator(line: str) -> str | None:
    """Output of the calculator for a line of model output, or None if it is not a tool call."""
    found = _CALL.fullmatch(line)
    if found is None:
        return None
    left, right = int(found[1]), int(found[3])
    match found[2]:
        case "+":
            return f"{left + right}\n"
        case "-":
            return f"{left - right}\n"
    return f"{left * right}\n"
