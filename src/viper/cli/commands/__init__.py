"""The commands of the program, one to a module: its options, its help, and what it does."""
