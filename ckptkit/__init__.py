"""ckptkit: move training runs between PyTorch DDP, FSDP1, FSDP2 and DeepSpeed, and prove that the losses go on."""

__version__ = "0.1.0"
