"""Live models: loading any checkpoint straight into one, and saving one, each rank only the boxes that it owns.

One kind of model a file: plain (and DDP), fsdp1, fsdp2, deepspeed. Each says with `adapt(model, optimizer)` which
tensors of this rank hold which boxes of which parameter; the reading, casting and checking is the same for all.
"""
