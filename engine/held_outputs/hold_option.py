"""Option of a request whose outputs EngineCore may hold back, and ids of special outputs.

vLLM ignores outputs with unknown request ids.
"""

from typing import Final, Literal

HOLD_ARG: Final = "coppice_hold"
"""Key of the option in the `extra_args` of a request's SamplingParams."""
Hold = Literal["final", "stream"]
"""`final` if only the end of the sample is read, `stream` if its tokens are read while it runs."""
LOGPROBS_ID: Final = "coppice-logprobs"
"""Request id of an output with the logprobs of the outputs after it, in their order."""
STEPS_ID: Final = "coppice-steps"
"""Request id of an output whose token ids are the numbers of tokens of the steps until then."""
FLUSH_ID: Final = "coppice-flush-"
"""Begin of the request id of an output that follows all outputs of a flush."""
