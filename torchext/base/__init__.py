"""Helpers that every folder may use: numbers of others, code that the compiler leaves alone."""
