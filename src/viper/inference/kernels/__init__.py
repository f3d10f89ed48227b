"""A block's sums in C and in Triton, and the memory of accelerators."""
