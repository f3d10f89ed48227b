"""Viper and others side by side, in one run: `python -m benchmarks [name ...] [--quick] [--device cuda]`."""
