"""From options and rows to a fitted process: what the options ask for, the fit itself, and what a file keeps of it."""
