"""Request for Linux's permission to use AMX, omitted by vLLM's CPU attention.

https://docs.kernel.org/arch/x86/xstate.html

Linux ends a process with SIGILL that uses AMX without this permission. vLLM selects its AMX kernel
if the processor has AMX, and requests no permission. Large matrix products of torch and oneDNN
request it, but a small model may not reach one before its first attention.
"""

import torch


def install() -> None:
    """Request the permission for all threads of this process; without AMX this does nothing."""
    torch.cpu._init_amx()
