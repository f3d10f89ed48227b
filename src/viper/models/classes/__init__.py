"""Targets of more than two classes, and of several labels."""
