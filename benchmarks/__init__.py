"""Ours and the rivals side by side, in one run: `python -m benchmarks [name ...] [--quick] [--device cuda]`."""
