#!/usr/bin/env bash
# The one prepared GPU check (`make verify-gpu`): the strategies form under NCCL in fp32 and bf16 with as many ranks as
# there are GPUs, DeepSpeed included where it is installed, then the tests of the gpu marker. Under six minutes on one GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-.cache/gpu}"
mkdir -p "$out"
unset DS_ACCELERATOR  # DeepSpeed chooses CUDA by itself
export TORCH_EXTENSIONS_DIR="${PWD}/.cache/torch_extensions_cuda" PYTHONPATH="${PWD}${PYTHONPATH:+:$PYTHONPATH}"
python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device here")'
# What is not installed is reported as not run and makes the exit code 1, so ask only for what is there.
strategies=ddp,fsdp1,fsdp1-grad-op,fsdp1-no-shard,fsdp1-hybrid,fsdp2,fsdp2-no-reshard,fsdp2-hybrid
if python -c 'import deepspeed' 2>/dev/null; then
  strategies+=,zero0,zero1,zero2,zero3
fi
timeout 240 python -c 'from ckptkit.cli.main import run; run()' verify --device cuda --steps 6 --strategies "$strategies" \
  --html "$out/verify.html" --junit "$out/verify.xml" --overwrite
timeout 120 python -m pytest -m gpu -k "script" tests/verify/test_gpu.py
