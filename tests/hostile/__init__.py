"""Hostile input by the thousand: mutated models, tables, formulas, designs and reports, and runs that are killed.

Each module makes cases of one kind. `prepare(folder)` makes what they start from, and `run_case(material, seed)` makes
the case of a seed, runs it as a user would, and returns its outcome; see `hostile.harness`. `make hostile` runs
thousands of cases and prints a table of their outcomes, and `tests/test_hostile.py` a few hundred.
"""
