"""Named columns: the grammar of formulas, the encoding of columns, and `from_formula`."""
