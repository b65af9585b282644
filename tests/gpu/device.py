"""Device of the GPU tests. Imports PyTorch only, so that kernels can be tested without vLLM.

With COPPICE_REHEARSE set, tests that need no CUDA kernel of ours run on a CPU, with vLLM's CPU
backend, so that their code is tried before a GPU is at hand.
"""

import os

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
REHEARSE = "COPPICE_REHEARSE"
CAN_RUN = ON_GPU or REHEARSE in os.environ
