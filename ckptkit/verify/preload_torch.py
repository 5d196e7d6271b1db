"""Imported once by the pool's fork server: the modules of torch that every job would import anew.

All are single-threaded after their import and open no CUDA context (measured, torch 2.13), which makes forking safe.
torch._dynamo is what the first optimizer of a process imports, and takes longer than torch.
"""

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401
