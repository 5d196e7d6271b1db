"""Imported once by the fork server of a pool on CPU: DeepSpeed, where it is installed, and what it looks up when used.

Not on GPUs: its import asks the CUDA driver what there is, after which a fork could not use it any more.
"""

import contextlib

with contextlib.suppress(ImportError):
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # compiles functions at import; every ZeRO engine imports it

    with contextlib.suppress(AttributeError):
        _ = deepspeed.ops.__compatible_ops__  # asks the compiler what can be built

    from .deepspeed_ops import load_built_ops

    with contextlib.suppress(RuntimeError, OSError):  # said where the op is used, with the reason
        load_built_ops()
