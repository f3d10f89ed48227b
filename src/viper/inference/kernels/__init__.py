"""Compute a block's sums by compiled code: C on a CPU, Triton on a CUDA device. `choice.kernel_for` chooses."""
